"""One request, one answer: random requests in random worlds, each compared with itself alone.

Greedy and sampled requests with every kind of parameter, and searches of beams, arrive at random steps in engines
of random block sizes, pools, budgets and policies, cold and warm, and are aborted or cut by stops. On the native kernels
tokens and logprobs are equal to the bit, in float32 and bfloat16; on plain torch tokens in float32.

`make property` draws more worlds than a test run does (hypothesis profile "property").
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill import native
from tests.e2e.worlds import Ask, Engines, Kernels, World, asks, check_one_answer, worlds
from tests.ops.conftest import needs_extension

NATIVE = [Kernels("native-float32", "float32", True), Kernels("native-bfloat16", "bfloat16", True)]
PLAIN = Kernels("plain-float32", "float32", False)
PROFILE = settings.get_current_profile_name()
NUM_EXAMPLES = settings.get_profile(PROFILE).max_examples if PROFILE == "property" else 12
USUAL = settings(
    deadline=None,
    max_examples=NUM_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("tiny"))


@needs_extension
@pytest.mark.parametrize("kernels", NATIVE, ids=str)
@USUAL
@given(world=worlds(), asked=st.lists(asks(), min_size=2, max_size=6))
def test_a_request_is_told_the_same_in_any_world(
    kernels: Kernels, world: World, asked: list[Ask], engines: Engines
) -> None:
    check_one_answer(engines, world, asked, kernels)


@settings(USUAL, max_examples=max(10, NUM_EXAMPLES // 3))
@given(world=worlds(), asked=st.lists(asks(), min_size=2, max_size=6))
def test_tokens_are_the_same_in_any_world_on_plain_kernels(
    world: World, asked: list[Ask], engines: Engines
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "extension", lambda: None)
        # Two threads sum in another order than one there.
        check_one_answer(engines, dataclasses.replace(world, num_threads=1), asked, PLAIN)
