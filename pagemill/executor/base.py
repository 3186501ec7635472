"""How the engine reaches its ranks. Implementations: one file each, registered in `__init__`."""

from __future__ import annotations

from typing import Protocol

from pagemill.memory_plan import MemoryPlan
from pagemill.messages import SchedulerOutput, StepOutput

__all__ = ["Executor", "MemoryPlan"]


class Executor(Protocol):
    """Runs steps on the ranks. Made from an `EngineConfig`; loading happens in the constructor."""

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the plan the KV cache was made by."""
        ...

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """Run one step. Raises EngineDeadError when a rank is gone."""
        ...

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Give the ranks a step; returns at once where they compute elsewhere. Two may be submitted."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the result of the oldest submitted step and return it. Raises like `execute`."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError when a rank is gone."""
        ...

    def shutdown(self) -> None:
        """End the ranks and free their memory; calling it twice is harmless."""
        ...
