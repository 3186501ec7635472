"""Logprobs in OpenAI's two layouts: completions (parallel lists) and chat (one object a token).

JSON has no infinity: a logprob under `FLOOR` is given as FLOOR.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pagemill.outputs import Logprob, PromptLogprobs, TokenLogprobs
from pagemill.tokenizer.base import Tokenizer

FLOOR = -9999.0


def number(value: float) -> float:
    """Return a logprob that JSON can hold."""
    return max(value, FLOOR)


def token_text(tokenizer: Tokenizer | None, token_id: int, entry: Logprob | None = None) -> str:
    """Return a token's own text; without one (no tokenizer, a padded vocabulary) its id."""
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    if tokenizer is None or token_id >= tokenizer.vocab_size:
        return f"token_id:{token_id}"
    return tokenizer.token_text(token_id)


def _token_bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    """Return a token's own bytes; ids that stand for no text have none."""
    if tokenizer is None or token_id >= tokenizer.vocab_size:
        return b""
    return tokenizer.token_bytes(token_id)


class TextOffsets:
    """Where each token begins in the answer's text, in characters.

    Bytes of one character may belong to several tokens, so characters are counted over the joined bytes:
    a token begins at the first character that was not complete before it.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = (
            tokenizer.special_token_ids
            if tokenizer is not None and skip_special_tokens
            else frozenset()
        )
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.offset = 0

    def advance(self, token_id: int) -> int:
        """Return the offset of the next token, and move past it."""
        begin = self.offset
        if token_id not in self._hidden:
            self.offset += len(self._utf8.decode(_token_bytes(self._tokenizer, token_id)))
        return begin


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    tokenizer: Tokenizer | None,
    offsets: TextOffsets,
    num_top: int,
) -> dict[str, Any]:
    """Return the completions layout; an entry of None (a first prompt token) becomes null."""
    tokens, values, tops, places = [], [], [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        chosen = entry[token_id] if entry is not None else None
        tokens.append(token_text(tokenizer, token_id, chosen))
        values.append(None if chosen is None else number(chosen.logprob))
        tops.append(None if entry is None else _top_texts(entry, token_id, tokenizer, num_top))
        places.append(offsets.advance(token_id))
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": places,
    }


def _top_texts(
    entry: TokenLogprobs, token_id: int, tokenizer: Tokenizer | None, num_top: int
) -> dict[str, float]:
    """Return text -> logprob of the top tokens and the chosen one; equal texts keep the likelier."""
    texts: dict[str, float] = {}
    for other, value in entry.items():
        if other == token_id or _is_top(value, num_top):
            texts.setdefault(token_text(tokenizer, other, value), number(value.logprob))
    return texts


def _is_top(value: Logprob, num_top: int) -> bool:
    return num_top == -1 or (value.rank is not None and value.rank <= num_top)


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    tokenizer: Tokenizer | None,
    num_top: int,
) -> dict[str, Any]:
    """Return the chat layout; `num_top` 0 gives empty top lists."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        item = _chat_token(token_id, entry[token_id], tokenizer)
        tops = [(t, v) for t, v in entry.items() if _is_top(v, num_top)]
        item["top_logprobs"] = [_chat_token(t, v, tokenizer) for t, v in tops]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, entry: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = token_text(tokenizer, token_id, entry)
    raw = _token_bytes(tokenizer, token_id)
    return {"token": text, "bytes": list(raw), "logprob": number(entry.logprob)}


def prompt_logprobs_object(
    entries: PromptLogprobs, token_ids: Sequence[int], num_top: int
) -> list[dict[str, Any] | None]:
    """Return prompt logprobs as vLLM lays them out: null, then token id -> its numbers."""
    result: list[dict[str, Any] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            result.append(None)
            continue
        result.append(
            {
                str(other): {
                    "logprob": number(value.logprob),
                    "rank": value.rank,
                    "decoded_token": value.decoded_token,
                }
                for other, value in entry.items()
                if other == token_id or _is_top(value, num_top)
            }
        )
    return result
