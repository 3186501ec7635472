"""The progress bar of `LLM.generate`: requests done, with token rates in and out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pagemill.outputs import RequestOutput


class Progress:
    """A tqdm bar, one of the caller's own making, or nothing."""

    def __init__(self, num_requests: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self._start = time.perf_counter()
        self._num_input = self._num_output = 0
        if not use_tqdm:
            return
        make = use_tqdm
        if not callable(make):
            from tqdm.auto import tqdm

            make = tqdm
        self._bar = make(
            total=num_requests,
            desc="Processed prompts",
            dynamic_ncols=True,
            postfix=self._rates(0.0),
        )

    def add(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if self._bar is None or not output.finished:
            return
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(sample.token_ids) for sample in output.outputs)
        self._bar.postfix = self._rates(time.perf_counter() - self._start)
        self._bar.update(1)

    def _rates(self, elapsed_s: float) -> str:
        inputs = self._num_input / elapsed_s if elapsed_s else 0.0
        outputs = self._num_output / elapsed_s if elapsed_s else 0.0
        return f"est. speed input: {inputs:.2f} toks/s, output: {outputs:.2f} toks/s"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
