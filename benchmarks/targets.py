"""What pagemill is to reach beside its peers, and whether a run has shown it.

Ratios say how many times as good pagemill is: above 1 it is faster. A ratio is of medians, its spread the
lowest and the highest of the single rounds' ratios. A target inside the spread counts as not shown, and so
does any target in fewer than MIN_ROUNDS rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

OWN = "pagemill"
BEST_PEER = "best peer"
MIN_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as good one is as another."""

    value: float  # of the medians
    lowest: float
    highest: float
    num_rounds: int

    def verdict(self, target: float) -> str:
        """Return whether a target is shown, missed, or inside the spread."""
        if self.num_rounds < MIN_ROUNDS:
            return f"not shown: {self.num_rounds} of {MIN_ROUNDS} rounds"
        if self.lowest >= target:
            return "shown"
        return "missed" if self.highest < target else "not shown"

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.lowest:.2f}-{self.highest:.2f})"


def is_time(figure: str) -> bool:
    """Return whether less is better."""
    return figure.endswith(("_ms", "_s")) and not figure.endswith("_per_s")


def ratio(figure: str, own: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return how many times as good `own` is as `other`, over the rounds that both have."""
    pairs = list(zip(own, other, strict=False))
    if is_time(figure):
        pairs = [(theirs, mine) for mine, theirs in pairs]
    singles = [first / second for first, second in pairs]
    medians = [statistics.median(one) for one in zip(*pairs, strict=True)]
    return Ratio(medians[0] / medians[1], min(singles), max(singles), len(singles))


@dataclass(frozen=True, slots=True)
class Target:
    """pagemill in one format against an engine in one format."""

    case: str
    figure: str
    format: str
    engine: str  # a name in ENGINES, or BEST_PEER
    engine_format: str
    at_least: float


TARGETS = (
    Target("a", "decode_tok_per_s", "bf16", BEST_PEER, "bf16", 1.25),
    Target("a", "ttft_ms", "bf16", "vllm", "bf16", 2.5),
    Target("b", "output_tok_per_s", "bf16", "vllm", "bf16", 2.0),
    Target("c", "output_tok_per_s", "bf16", "vllm", "bf16", 2.0),
    Target("d", "prefill_tok_per_s", "bf16", "vllm", "bf16", 2.0),
    Target("e", "wall_s", "bf16", "vllm", "bf16", 1.5),
    Target("a", "decode_tok_per_s", "int8", OWN, "bf16", 1.8),
    Target("a", "decode_tok_per_s", "int4", OWN, "bf16", 2.8),
    Target("a", "decode_tok_per_s", "int8", BEST_PEER, "int8", 1.0),
    Target("a", "decode_tok_per_s", "int4", BEST_PEER, "int4", 1.0),
    Target("b", "output_tok_per_s", "int8", OWN, "bf16", 1.0),
    Target("d", "prefill_tok_per_s", "int8", OWN, "bf16", 1.0),
)
STREAMING_SHARE = 0.85  # of case a's bfloat16 decode
