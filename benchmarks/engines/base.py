"""What every engine file provides, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from benchmarks import work

MAX_MODEL_LEN = 4096  # tokens of the longest sequence that an engine makes room for


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine loads and what it may take. Crosses the pipe as JSON."""

    path: str  # a folder or a file, in the form that the engine loads
    weights: str  # the engine's own word for the weight format
    threads: int
    kv_tokens: int  # tokens of KV cache that hold every job of a case at once
    kv_bytes: int  # the same in bytes of bfloat16
    max_model_len: int = MAX_MODEL_LEN


class Engine(Protocol):
    """Anything that can do a list of jobs."""

    version: str  # of the engine's package, with what else decides its speed

    def run(self, jobs: list[work.Job]) -> work.Outcome:
        """Do all the jobs, greedily, and return what it took."""
        ...
