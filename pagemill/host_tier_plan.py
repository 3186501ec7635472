"""What the host tier of the KV cache holds and what moving costs, as the ranks measured it at start.

Made by `worker.worker` (sizes, costs) and its tier file (what is kept from before); read by the executors,
by `core.host_tier`, which decides with it, and by the log and the metrics, which show it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """Seconds. A prompt of n tokens, s of them found, takes a (n - s) + b (n n - s s) / 2."""

    swap_out_s: float  # one block, device to host
    swap_in_s: float  # and back
    compute_token_s: float  # a: one token of a prompt, at its beginning
    compute_context_s: float  # b: what each token before it adds

    def recompute_s(self, start: int, end: int) -> float:
        """Return what computing positions [start, end) takes."""
        context = (end * end - start * start) / 2
        return self.compute_token_s * (end - start) + self.compute_context_s * context

    def swap_s(self, num_out: int, num_in: int) -> float:
        """Return what moving so many blocks out and in takes."""
        return self.swap_out_s * num_out + self.swap_in_s * num_in


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierPlan:
    """A tier of `num_slots` slots, one block each."""

    num_slots: int
    slot_bytes: int
    place: str  # where the bytes are, in words
    costs: MoveCosts
    lasts: bool = (
        False  # it is there for who starts next: prefixes are written when they are computed
    )
    kept: tuple[
        tuple[int, bytes], ...
    ] = ()  # (slot, block name) from before, unused for longest first

    def lines(self, block_size: int, num_blocks: float = 1.0) -> list[str]:
        """Return the tier as lines for the log; `num_blocks` is what `block_size` tokens take."""
        costs = self.costs
        what = f"a block of {block_size} tokens"
        if num_blocks != 1.0:
            what = f"{block_size} tokens in {num_blocks:g} blocks"
        lines = [
            f"host tier: {self.num_slots} blocks of {self.slot_bytes / 1024:.0f} KiB in {self.place}",
            f"  {what}: {1e3 * costs.swap_out_s * num_blocks:.3g} ms out, "
            f"{1e3 * costs.swap_in_s * num_blocks:.3g} ms in, "
            f"{1e3 * costs.recompute_s(0, block_size):.3g} ms to compute at a prompt's beginning, "
            f"{1e3 * costs.recompute_s(1024, 1024 + block_size):.3g} ms after 1024 tokens",
        ]
        if self.kept:
            lines.append(f"  {len(self.kept)} blocks are known from before")
        return lines
