"""SentencePiece BPE for the `tokenizers` library, from tokens and scores.

SentencePiece (Kudo and Richardson, 2018) keeps no list of merges: two neighbours may merge whenever the
joined text is a token, the highest score first. The library wants the list, so it is derived: every
way to cut a token into two tokens, by falling score. Called by `gguf.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from pagemill.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenType(IntEnum):
    """What a token is for: SentencePiece's kinds, which GGUF took over."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_scored_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unknown: str | None,
    space_prefix: bool,
) -> Backend:
    """Return a tokenizer whose ids are the places in `tokens`; added tokens are the caller's.

    `space_prefix`: text starts as if behind a space (Llama 2), and the decoder takes that space off.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=derive_merges(tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(f"the vocabulary cannot be used: {error}") from error
    backend: Backend = Tokenizer(model)
    mark = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if space_prefix else mark
    )
    back = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(back)
    return backend


def derive_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return every merge, the first to apply first.

    Runs of spaces that are user-defined tokens come ahead of all: SentencePiece takes those whole before
    it merges anything. Among merges of one score the longer left part wins, then the longer right one.
    """
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.USER_DEFINED and not token.strip(SPACE_MARK):
            _append_cuts(merges, token, known)
    _sort_from(merges, 0)
    normal = [i for i, kind in enumerate(types) if kind == TokenType.NORMAL]
    normal.sort(key=scores.__getitem__, reverse=True)
    score, first_of_score, tokens_of_score = None, len(merges), 0
    for i in normal:
        if scores[i] != score:
            if tokens_of_score > 1:
                _sort_from(merges, first_of_score)
            score, first_of_score, tokens_of_score = scores[i], len(merges), 0
        tokens_of_score += 1
        _append_cuts(merges, tokens[i], known)
    if tokens_of_score > 1:
        _sort_from(merges, first_of_score)
    return merges


def _append_cuts(merges: list[tuple[str, str]], token: str, known: set[str]) -> None:
    """Append the ways to cut a token into two known ones, the longest left part first."""
    for at in range(len(token) - 1, 0, -1):
        left = token[:at]
        if left in known:
            right = token[at:]
            if right in known:
                merges.append((left, right))


def _sort_from(merges: list[tuple[str, str]], start: int) -> None:
    merges[start:] = sorted(merges[start:], key=lambda cut: (-len(cut[0]), -len(cut[1])))
