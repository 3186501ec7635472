"""The work that engines are measured on: token ids, greedy, end tokens ignored; and the figures of a turn.

    a  1 request, prompt 128, output 128
    b  16 requests, prompt 128, output 128
    c  64 requests, prompts 32-512, outputs 16-256 (lengths fixed)
    d  1 prompt of 2,048, output 1
    e  16 requests sharing 512 tokens, 32 of their own, output 32

Token ids change with `round`, lengths do not, so that no cache carries over from one round to the next.
Standard library only: this runs in the virtual environment of every peer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CASES = "abcde"
WARM_UP = "warm-up"  # in place of a round's number
_LOWEST_ID, _HIGHEST_ID = 300, 30_000  # ordinary tokens of every vocabulary that is measured
_WARM_UP_JOBS, _WARM_UP_OUTPUT = 16, 8


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an engine's turn at a list of jobs took."""

    wall_s: float
    num_output: int  # tokens generated
    ttft_s: float | None = None  # to the first token of all, None where the engine cannot tell


def make(case: str, round: str) -> list[Job]:
    """Return the jobs of one case in one round: a number, or WARM_UP for a shorter list."""
    if round == WARM_UP:
        jobs = _make(case, 90)[:_WARM_UP_JOBS]
        return [Job(job.prompt, min(job.num_output, _WARM_UP_OUTPUT)) for job in jobs]
    return _make(case, int(round))


def _make(case: str, round: int) -> list[Job]:
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


def num_tokens(jobs: list[Job]) -> int:
    """Return the tokens that the jobs' sequences hold at their ends, prompts included."""
    return sum(len(job.prompt) + job.num_output for job in jobs)


def figures(case: str, jobs: list[Job], outcome: Outcome) -> dict[str, float]:
    """Return a turn's figures by name; names ending in `_ms` and `_s` are times, the others rates.

    a: ttft_ms and decode_tok_per_s where the engine tells the first token's time; d: prefill_tok_per_s;
    the others output_tok_per_s and total_tok_per_s; always wall_s.
    """
    wanted = sum(job.num_output for job in jobs)
    if outcome.num_output != wanted:
        raise RuntimeError(
            f"case {case}: {outcome.num_output} tokens were generated instead of {wanted}"
        )
    made = {"wall_s": outcome.wall_s}
    if case == "d":
        made["prefill_tok_per_s"] = len(jobs[0].prompt) / outcome.wall_s
    elif case != "a":
        made["output_tok_per_s"] = wanted / outcome.wall_s
        made["total_tok_per_s"] = num_tokens(jobs) / outcome.wall_s
    elif outcome.ttft_s is not None:
        made["ttft_ms"] = outcome.ttft_s * 1e3
        made["decode_tok_per_s"] = (wanted - 1) / (outcome.wall_s - outcome.ttft_s)
    return made
