"""A tokenizer whose ids are the bytes of UTF-8, for tests that need no real vocabulary.

Ids 0..255 are bytes, 256 is `<bos>`, 257 `<eos>`, 258 `<|im_end|>`; the three are special. It keeps the
promises of `pagemill.tokenizer.base.Tokenizer`: one begin token, exact incremental decoding, hidden
pieces for special tokens left out of the text. Used by the tests of the engine and the server.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pagemill.errors import RequestError
from pagemill.tokenizer.base import IncrementalDecoder, TextPiece

BOS_ID = 256
EOS_ID = 257
IM_END_ID = 258
SPECIALS = {"<bos>": BOS_ID, "<eos>": EOS_ID, "<|im_end|>": IM_END_ID}
NAMES = {token_id: text for text, token_id in SPECIALS.items()}
VOCAB_SIZE = 259


class ByteDecoder:
    """Incremental UTF-8 with special tokens shown or hidden."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> Sequence[TextPiece]:
        """Take one token and return the text that is now certain."""
        if token_id in NAMES and self._skip:
            return [TextPiece(NAMES[token_id], hidden=True)]
        text = self._utf8.decode(_bytes_of(token_id))
        return [TextPiece(text)] if text else []

    def flush(self) -> Sequence[TextPiece]:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        return [TextPiece(text)] if text else []

    def copy(self) -> IncrementalDecoder:
        """Return another decoder that has taken the same tokens."""
        other = ByteDecoder(self._skip)
        other._utf8.setstate(self._utf8.getstate())
        return other


class ByteTokenizer:
    """A `Tokenizer` over bytes. `adds_bos` chooses whether `encode` puts `<bos>` first."""

    def __init__(self, *, adds_bos: bool = False) -> None:
        self._adds_bos = adds_bos

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def bos_token_id(self) -> int | None:
        return BOS_ID

    @property
    def eos_token_id(self) -> int | None:
        return EOS_ID

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    @property
    def chat_template(self) -> str | None:
        return (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        )

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(NAMES)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; the names of special tokens in it become their ids."""
        ids: list[int] = []
        rest = text
        while rest:
            name = next((n for n in SPECIALS if rest.startswith(n)), None)
            if name is not None:
                ids.append(SPECIALS[name])
                rest = rest[len(name) :]
            else:
                ids.extend(rest[0].encode("utf-8", errors="replace"))
                rest = rest[1:]
        if add_special_tokens and self._adds_bos and ids[:1] != [BOS_ID]:
            ids.insert(0, BOS_ID)
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of `token_ids`."""
        kept = [t for t in token_ids if not (skip_special_tokens and t in NAMES)]
        return b"".join(_bytes_of(t) for t in kept).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return _bytes_of(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return _bytes_of(token_id)

    def token_to_id(self, token: str) -> int | None:
        if token in SPECIALS:
            return SPECIALS[token]
        return ord(token) if len(token) == 1 and ord(token) < 128 else None

    def decoder(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> IncrementalDecoder:
        return ByteDecoder(skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render `role: content<|im_end|>` for each message."""
        if not messages:
            raise RequestError("messages is empty; give at least one message", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true",
                param="continue_final_message",
            )
        text = "".join(f"{m['role']}: {m['content']}<|im_end|>" for m in messages)
        if continue_final_message:
            return text[: -len("<|im_end|>")]
        return text + ("assistant: " if add_generation_prompt else "")


def _bytes_of(token_id: int) -> bytes:
    if token_id in NAMES:
        return NAMES[token_id].encode()
    if not 0 <= token_id < 256:
        raise ValueError(f"token id {token_id} is outside the vocabulary of {VOCAB_SIZE} tokens")
    return bytes([token_id])
