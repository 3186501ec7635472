"""The forms a prompt may have.

A prompt is a `str`, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": list[int]}`. The two
dictionaries may have a `cache_salt` beside it: only requests with the same one share computed prefixes.
Read by `engine.input_processor`; everything else is refused there with the list of these forms.
"""

from __future__ import annotations

from typing import TypedDict


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    """A prompt given as text."""

    prompt: str


class TokensPrompt(_Salted):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt
