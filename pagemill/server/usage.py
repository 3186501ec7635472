"""Counts the tokens of a request: each prompt once, every generated token of every choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill.messages import EngineRequest
from pagemill.outputs import RequestOutput


class Usage:
    """Totals over the prompts and choices of one HTTP request."""

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self._num_prompt = sum(len(r.prompt_token_ids) for r in requests)
        self._num_truncated = sum(r.num_truncated_prompt_tokens for r in requests)
        self._num_cached: dict[str, int] = {}
        self._num_completion = 0

    def note(self, output: RequestOutput) -> None:
        """Add an output's new tokens; with final outputs, all of them."""
        self._num_cached[output.request_id] = output.num_cached_tokens
        self._num_completion += sum(len(choice.token_ids) for choice in output.outputs)
        self._num_completion += output.num_discarded_tokens

    def as_object(self) -> dict[str, Any]:
        """Return OpenAI's usage object; tokens cut by truncate_prompt_tokens are reported beside it."""
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": self._num_prompt + self._num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }
        if self._num_truncated:
            usage["truncated_prompt_tokens"] = self._num_truncated
        return usage
