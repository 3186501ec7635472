"""The work that engines are measured on: token ids, greedy, end tokens ignored.

    a  1 request, prompt 128, output 128
    b  16 requests, prompt 128, output 128
    c  64 requests, prompts 32-512, outputs 16-256 (lengths fixed)
    d  1 prompt of 2,048, output 1
    e  16 requests sharing 512 tokens, 32 of their own, output 32

Token ids change with `round`, lengths do not, so that no cache carries over from one round to the next.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CASES = "abcde"
_LOWEST_ID, _HIGHEST_ID = 300, 30_000  # ordinary tokens of every vocabulary that is measured


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: list[int]
    num_output: int


def make(case: str, round: int) -> list[Job]:
    """Return the jobs of one case in one round."""
    rng = random.Random(1000 * round + ord(case))

    def ids(n: int) -> list[int]:
        return [rng.randrange(_LOWEST_ID, _HIGHEST_ID) for _ in range(n)]

    if case == "a":
        return [Job(ids(128), 128)]
    if case == "b":
        return [Job(ids(128), 128) for _ in range(16)]
    if case == "c":
        lengths = random.Random(1234)
        sizes = [(lengths.randint(32, 512), lengths.randint(16, 256)) for _ in range(64)]
        return [Job(ids(prompt), output) for prompt, output in sizes]
    if case == "d":
        return [Job(ids(2048), 1)]
    if case == "e":
        shared = ids(512)
        return [Job(shared + ids(32), 32) for _ in range(16)]
    raise ValueError(f"unknown case {case!r}; cases: {', '.join(CASES)}")
