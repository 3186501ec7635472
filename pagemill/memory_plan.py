"""Where the memory goes: the result of planning, as the log and `pagemill plan` show it.

Made by `worker.memory.plan_memory`; read by the executors, the engine and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.cache_layout import CacheLayout
from pagemill.host_tier_plan import HostTierPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes, in bytes, and what fits. `pagemill plan` prints the same object."""

    available_bytes: int  # what the process may use at start: machine or cgroup, whichever is less
    usable_bytes: int  # available times gpu_memory_utilization
    weight_bytes: int
    peak_activation_bytes: int  # of the worst-case step
    kv_cache_bytes: int  # the pool: num_blocks * block_bytes
    block_bytes: int  # one block over all layers
    num_blocks: int
    num_tokens: int  # that fit the pool; with windows, of requests of full length
    max_model_len: int
    num_full_requests: float  # of max_model_len tokens, in blocks of their own
    layout: CacheLayout | None = None  # which layers share a block table; None: all of them
    num_tokens_without_windows: int = 0  # that would fit if windowed layers kept every token
    host_tier: HostTierPlan | None = None  # opened by the worker; a plan alone has none

    def lines(self) -> list[str]:
        """Return the plan as lines for the log and for `pagemill plan`."""
        gib = 2.0**30
        lines = [
            f"memory: {self.available_bytes / gib:.2f} GiB available, "
            f"{self.usable_bytes / gib:.2f} GiB to use",
            f"  weights      {self.weight_bytes / gib:8.2f} GiB",
            f"  activations  {self.peak_activation_bytes / gib:8.2f} GiB (worst-case step)",
            f"  KV cache     {self.kv_cache_bytes / gib:8.2f} GiB ({self.num_blocks} blocks of "
            f"{self.block_bytes / 1024:.0f} KiB)",
            f"  fits {self.num_tokens} tokens: {self.num_full_requests:.1f} requests of "
            f"{self.max_model_len} tokens",
        ]
        if self.layout is not None and self.layout.lets_go:
            lines.append(
                f"  windows: {self.layout.describe()}; if every layer kept every token, "
                f"{self.num_tokens_without_windows} tokens would fit"
            )
        return lines
