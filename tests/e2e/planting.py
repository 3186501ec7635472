"""How a fault is planted, and what it means that the property of `worlds` sees it.

A fault is what a slip in one place would do, and shows only in company: the fresh engine that a request is
compared with has the same fault, and no chance to show it. A fault that is not seen means that the property
proves less than it says.

Used by `test_planted_faults` and `test_planted_overlap_faults`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e.worlds import MAX_LEN, Ask, Engines, Kernels, World, asks, check_one_answer, worlds

KERNELS = Kernels("native-float32", "float32", True)
MOST_EXAMPLES = 600  # most faults are seen in the first few
Plant = Callable[[pytest.MonkeyPatch], None]

QUICK = {"family": "llama", "num_threads": 1, "restarts": False, "speculation": None}
CACHED = {"enable_prefix_caching": True, "block_size": 4, "forgets_at": None, "is_warm": True}
CROWDED = {"block_size": 4, "num_blocks": 17, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
SWAPPED = {**CROWDED, "num_slots": 64, "preemption_mode": "swap", "is_warm": True}
CHUNKED = {"max_num_batched_tokens": 5}
# Short texts of nine letters repeat themselves, and not for long: some drafts are right.
DRAFTED = {"speculation": "ngram", "max_num_batched_tokens": 2048}


@dataclass(frozen=True)
class Fault:
    """One fault: how it is planted, and the worlds in which it can show."""

    plant: Plant
    world: dict[str, Any] = field(default_factory=dict)

    def placed(self, world: World) -> World:
        """Return a world like this one in which the fault can show."""
        world = dataclasses.replace(world, **{**QUICK, **self.world})
        least = -(-MAX_LEN // world.block_size)
        return dataclasses.replace(world, num_blocks=max(world.num_blocks, least))


def check_is_seen(name: str, fault: Fault, engines: Engines) -> None:
    """Raise unless the property fails while the fault is planted."""

    @settings(
        deadline=None,
        max_examples=MOST_EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(
        world=worlds().map(fault.placed),
        asked=st.lists(asks(), min_size=3, max_size=6),
    )
    def property_holds(world: World, asked: list[Ask]) -> None:
        check_one_answer(engines, world, asked, KERNELS)

    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is looked at below
            property_holds()
    # A different answer, or an invariant of the engine's own; never a slip in the planting.
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, (AssertionError, KeyError)):
        error = error.__cause__
    assert error is not None, f"{name} ended with {caught.value!r}"
