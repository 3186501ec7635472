"""The worker in the engine's own process: a step is a function call."""

from __future__ import annotations

from collections import deque

from pagemill.config import EngineConfig
from pagemill.errors import EngineDeadError
from pagemill.memory_plan import MemoryPlan
from pagemill.messages import SchedulerOutput, StepOutput
from pagemill.worker.worker import Worker


class InProcessExecutor:
    """An `Executor` over one `Worker`."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker: Worker | None = Worker(config)
        self._plan = self._worker.memory_plan
        self._results: deque[StepOutput] = deque()

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the plan the KV cache was made by."""
        return self._plan

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """Run one step here. What the model raises goes through as it is."""
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; make a new engine")
        return self._worker.execute(scheduled)

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Run one step here, now: in one process nothing is gained by waiting."""
        self._results.append(self.execute(scheduled))

    def collect(self) -> StepOutput:
        """Return the oldest result."""
        return self._results.popleft()

    def check_health(self) -> None:
        """Raise EngineDeadError after shutdown; otherwise this rank lives while the process does."""
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; make a new engine")

    def shutdown(self) -> None:
        """Let go of weights and cache."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None
