"""The forms a prompt may have.

A prompt is a `str`, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": list[int]}`. Read by
`engine.input_processor`; everything else is refused there with the list of these forms.
"""

from __future__ import annotations

from typing import TypedDict


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt
