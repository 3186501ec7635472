"""Incremental decoders: tokens to text, as they come, equal to one decode of the whole.

What a vocabulary needs is read from the `decoder` section of tokenizer.json, whose kinds are those of
the `tokenizers` library; three strategies cover them.

- `BytePlan` (ByteLevel): every token is bytes of UTF-8. A character that is not complete waits; broken
  bytes become U+FFFD by the rule of the Unicode standard ("maximal subpart"), which Rust's
  `from_utf8_lossy` and Python's "replace" share.
- `TokenPlan` (Replace, Metaspace, WordPiece, ByteFallback, Fuse, Strip, or no decoder at all): a token's
  text depends on the token and on whether it is the first; byte tokens (`<0x0A>`) form runs. The library
  turns a run that is not valid as a whole into one U+FFFD a byte, so a run waits until it ends.
- `WholePlan` (anything else): the text is known only at the end, so all of it waits for `flush`. Exact,
  but nothing streams; the loader says so once.

Hidden special tokens do not end a character or a run: the library drops them before it decodes, so bytes
on both sides of one join. A hidden piece is handed on at once (a stop string may be in it), visible text
that waits comes later.

A plan belongs to a tokenizer, is shared by all its decoders, and fills its tables on first use; a
decoder belongs to one sequence. The tables are plain dicts with idempotent entries, so threads may
share a plan.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagemill.errors import CheckpointError
from pagemill.tokenizer.base import IncrementalDecoder, TextPiece

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Pieces = tuple[TextPiece, ...]
_NOTHING: Pieces = ()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """What a plan asks about ids."""

    def spelling(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None where the id has no token."""
        ...

    def is_special(self, token_id: int) -> bool: ...

    def decode_whole(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class DecodingPlan(Protocol):
    """How one vocabulary turns tokens into text."""

    def decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        """Return a fresh decoder of one sequence."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes as they appear inside a text; b"" where the id has no token."""
        ...


def plan_decoding(section: dict[str, Any] | None, vocabulary: Vocabulary) -> DecodingPlan:
    """Choose the strategy for a `decoder` section of tokenizer.json (None: the section is null).

    Raises CheckpointError for a section with which the library cannot decode every text.
    """
    kinds = _flatten(section)
    for kind in kinds:
        if kind["type"] == "Strip" and kind["stop"]:
            # The library panics when a token (or the text) is shorter than what is to be stripped.
            raise CheckpointError(
                f"the decoder of this tokenizer strips {kind['stop']} characters {kind['content']!r} "
                "from the end (Strip, stop), which no known model needs; set stop to 0 in "
                "tokenizer.json"
            )
    if [kind["type"] for kind in kinds] == ["ByteLevel"]:
        return BytePlan(vocabulary)
    rules = _token_rules(kinds)
    return WholePlan(vocabulary) if rules is None else TokenPlan(vocabulary, rules)


# --- bytes -------------------------------------------------------------------------------------------


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's table from printable character to byte.

    Bytes that print keep their Latin-1 character; the other 68 get U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


_ALPHABET = byte_level_alphabet()


class BytePlan:
    """Byte-level vocabularies: GPT-2, Llama 3, Qwen, SmolLM2."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        # Pieces of tokens that are whole characters by themselves: by far the most, and free of cost.
        self._whole: dict[int, Pieces] = {}
        self._hidden: dict[int, Pieces] = {}

    def decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        return _ByteDecoder(self, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            spelling = self._vocabulary.spelling(token_id) or ""
            try:
                found = bytes([_ALPHABET[character] for character in spelling])
            except KeyError:  # an added token is plain text, not byte-level
                found = spelling.encode()
            self._bytes[token_id] = found
        return found

    def hidden_pieces(self, token_id: int) -> Pieces:
        """Return the piece of a special token; empty for an ordinary one."""
        found = self._hidden.get(token_id)
        if found is None:
            found = self._hidden[token_id] = _hidden_pieces(self._vocabulary, token_id)
        return found

    def whole_pieces(self, token_id: int) -> Pieces | None:
        """Return the pieces of a token that is valid UTF-8 by itself, else None."""
        found = self._whole.get(token_id)
        if found is None:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                return None
            found = self._whole[token_id] = (TextPiece(text),) if text else _NOTHING
        return found


class _ByteDecoder:
    """UTF-8 with memory of an unfinished character (at most 3 bytes)."""

    __slots__ = ("_pending", "_plan", "_skip")

    def __init__(self, plan: BytePlan, skip_special_tokens: bool) -> None:
        self._plan = plan
        self._skip = skip_special_tokens
        self._pending = b""

    def push(self, token_id: int) -> Pieces:
        plan = self._plan
        if self._skip and (hidden := plan.hidden_pieces(token_id)):
            return hidden
        if not self._pending and (pieces := plan.whole_pieces(token_id)) is not None:
            return pieces
        return self._take(plan.token_bytes(token_id), final=False)

    def flush(self) -> Pieces:
        return self._take(b"", final=True)

    def copy(self) -> _ByteDecoder:
        other = _ByteDecoder(self._plan, self._skip)
        other._pending = self._pending
        return other

    def _take(self, data: bytes, final: bool) -> Pieces:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return (TextPiece(text),) if text else _NOTHING


# --- tokens ------------------------------------------------------------------------------------------

Rule = Callable[[str, bool], str]  # (token, is it the first) -> its text


@dataclass(frozen=True, slots=True)
class TokenRules:
    """A decoder section, sorted: rules for each token, byte runs, one strip of the whole text."""

    before: tuple[Rule, ...]  # ahead of ByteFallback
    byte_runs: bool
    after: tuple[Rule, ...]  # behind ByteFallback, on its output
    strip: str  # the character stripped from the start of the whole text; "" for none
    strip_count: int


class TokenPlan:
    """Vocabularies whose tokens are text: SentencePiece, WordPiece, Unigram, WordLevel."""

    def __init__(self, vocabulary: Vocabulary, rules: TokenRules) -> None:
        self._vocabulary = vocabulary
        self.rules = rules
        self._first: dict[int, str | int] = {}
        self._later: dict[int, str | int] = {}
        self._pieces: dict[int, Pieces] = {}
        self._hidden: dict[int, Pieces] = {}
        self.broken_byte = self._apply(rules.after, REPLACEMENT, False)

    def decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        return _TokenDecoder(self, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        text = self.text_or_byte(token_id, first=False)
        return bytes([text]) if isinstance(text, int) else text.encode()

    def hidden_pieces(self, token_id: int) -> Pieces:
        """Return the piece of a special token; empty for an ordinary one."""
        found = self._hidden.get(token_id)
        if found is None:
            found = self._hidden[token_id] = _hidden_pieces(self._vocabulary, token_id)
        return found

    def has_token(self, token_id: int) -> bool:
        """Return whether the id has a token; one without leaves no trace, as in the library."""
        return self._vocabulary.spelling(token_id) is not None

    def text_or_byte(self, token_id: int, first: bool) -> str | int:
        """Return a token's text, or its byte if it is a byte token."""
        table = self._first if first else self._later
        found = table.get(token_id)
        if found is None:
            spelling = self._vocabulary.spelling(token_id)
            if spelling is None:
                return ""
            text = self._apply(self.rules.before, spelling, first)
            match = _BYTE_TOKEN.fullmatch(text) if self.rules.byte_runs else None
            found = int(match[1], 16) if match else self._apply(self.rules.after, text, first)
            table[token_id] = found
        return found

    def pieces(self, token_id: int, text: str) -> Pieces:
        """Return the shared piece of a token that is not the first."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = (TextPiece(text),) if text else _NOTHING
        return found

    def run_text(self, run: bytes) -> str:
        """Return the text of a whole run of byte tokens."""
        try:
            text = run.decode()
        except UnicodeDecodeError:
            return self.broken_byte * len(run)
        return self._apply(self.rules.after, text, False)

    @staticmethod
    def _apply(rules: tuple[Rule, ...], text: str, first: bool) -> str:
        for rule in rules:
            text = rule(text, first)
        return text


class _TokenDecoder:
    """Tokens in, text out; remembers an open byte run and whether the text has begun."""

    __slots__ = ("_first", "_plan", "_run", "_skip", "_to_strip")

    def __init__(self, plan: TokenPlan, skip_special_tokens: bool) -> None:
        self._plan = plan
        self._skip = skip_special_tokens
        self._first = True
        self._run = bytearray()
        self._to_strip = plan.rules.strip_count

    def push(self, token_id: int) -> Pieces:
        plan = self._plan
        if self._skip and (hidden := plan.hidden_pieces(token_id)):
            return hidden
        first = self._first
        text = plan.text_or_byte(token_id, first)
        if isinstance(text, int):
            self._first = False
            self._run.append(text)
            return _NOTHING
        if not first and not self._run and not self._to_strip:
            return plan.pieces(token_id, text)
        if not plan.has_token(token_id):
            return _NOTHING
        self._first = False
        return self._show(self._end_run() + text)

    def flush(self) -> Pieces:
        return self._show(self._end_run())

    def copy(self) -> _TokenDecoder:
        other = _TokenDecoder(self._plan, self._skip)
        other._first = self._first
        other._run = bytearray(self._run)
        other._to_strip = self._to_strip
        return other

    def _end_run(self) -> str:
        if not self._run:
            return ""
        text = self._plan.run_text(bytes(self._run))
        self._run.clear()
        return text

    def _show(self, text: str) -> Pieces:
        if self._to_strip and text:
            strip = self._plan.rules.strip
            while self._to_strip and text.startswith(strip):
                text = text[len(strip) :]
                self._to_strip -= 1
            if text:
                self._to_strip = 0
        return (TextPiece(text),) if text else _NOTHING


# --- anything else -----------------------------------------------------------------------------------


class WholePlan:
    """Decoders that need the whole text before any of it is certain."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        return _WholeDecoder(self._vocabulary, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.decode_whole([token_id], False).encode()


class _WholeDecoder:
    """Collects every token and decodes once, at the end."""

    __slots__ = ("_ids", "_skip", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._ids: list[int] = []

    def push(self, token_id: int) -> Pieces:
        if self._skip and (hidden := _hidden_pieces(self._vocabulary, token_id)):
            return hidden
        self._ids.append(token_id)
        return _NOTHING

    def flush(self) -> Pieces:
        text = self._vocabulary.decode_whole(self._ids, False)
        self._ids = []
        return (TextPiece(text),) if text else _NOTHING

    def copy(self) -> _WholeDecoder:
        other = _WholeDecoder(self._vocabulary, self._skip)
        other._ids = list(self._ids)
        return other


def _hidden_pieces(vocabulary: Vocabulary, token_id: int) -> Pieces:
    if not vocabulary.is_special(token_id):
        return _NOTHING
    return (TextPiece(vocabulary.spelling(token_id) or "", hidden=True),)


# --- reading the decoder section ---------------------------------------------------------------------


def _flatten(section: dict[str, Any] | None) -> list[dict[str, Any]]:
    if section is None:
        return []
    if section["type"] != "Sequence":
        return [section]
    return [kind for inner in section["decoders"] for kind in _flatten(inner)]


def _token_rules(kinds: list[dict[str, Any]]) -> TokenRules | None:
    """Sort a decoder section into rules; None when it is none that a `TokenPlan` can follow."""
    if not kinds:
        # Without a decoder the library joins the tokens with single spaces.
        return TokenRules((_space_between,), False, (), "", 0)
    before: list[Rule] = []
    after: list[Rule] = []
    byte_runs = fused = False
    strip, strip_count = "", 0
    for kind in kinds:
        name = kind["type"]
        if name == "Fuse":
            fused = True
        elif name == "ByteFallback" and not byte_runs and not fused:
            byte_runs = True
        elif name == "Strip" and fused and not strip_count and kind["stop"] == 0:
            strip, strip_count = kind["content"], kind["start"]
        elif fused or (rule := _rule(kind, after_bytes=byte_runs)) is None:
            return None
        else:
            (after if byte_runs else before).append(rule)
    return TokenRules(tuple(before), byte_runs, tuple(after), strip, strip_count)


def _rule(kind: dict[str, Any], *, after_bytes: bool) -> Rule | None:
    """Return the rule of one kind of decoder, or None if it does not work token by token."""
    name = kind["type"]
    if name == "Replace" and "String" in kind["pattern"]:
        old, new = kind["pattern"]["String"], kind["content"]
        return (lambda token, first: token.replace(old, new)) if old else None
    if name == "Strip" and kind["stop"] == 0:
        content, count = kind["content"], kind["start"]
        return lambda token, first: _strip_start(token, content, count)
    # These look at a token's place, which a byte run (many tokens, one text) would shift.
    if name == "Metaspace" and not after_bytes:
        mark, keeps_first = kind["replacement"], kind.get("prepend_scheme") == "never"
        return lambda token, first: token.replace(mark, "" if first and not keeps_first else " ")
    if name == "WordPiece" and not after_bytes:
        prefix, cleanup = kind["prefix"], kind["cleanup"]
        return lambda token, first: _word_piece(token, first, prefix, cleanup)
    return None


def _space_between(token: str, first: bool) -> str:
    return token if first else " " + token


def _strip_start(token: str, content: str, count: int) -> str:
    while count and token.startswith(content):
        token = token[len(content) :]
        count -= 1
    return token


# The order matters: later pairs see what earlier ones made.
_WORD_PIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(token: str, first: bool, prefix: str, cleanup: bool) -> str:
    if not first:
        token = token[len(prefix) :] if token.startswith(prefix) else " " + token
    if cleanup:
        for old, new in _WORD_PIECE_CLEANUP:
            token = token.replace(old, new)
    return token
