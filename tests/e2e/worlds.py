"""The promise as a property: what a request is told in any world, it is told alone in a fresh engine.

A `World` is everything that may not matter: sizes, budgets, policy, caches. `Ask` is a request with the
step at which it arrives and, maybe, the step at which it is aborted. `check_one_answer` serves all asks in
one world and each alone in a fresh engine without any of it, and compares tokens, text, logprobs, prompt
logprobs and reasons: to the bit, or tokens and reasons only where the kernels promise no more. A new axis is
one field of `World` and one line of `worlds`.

Used by `test_one_answer` and, with faults planted, by `test_planted_faults`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pagemill.batch.tier_file import TierFile
from pagemill.beam_search_params import BeamSearchParams
from pagemill.core.policies import POLICIES
from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine.resolve import resolve
from pagemill.engine_args import EngineArgs
from pagemill.executor.in_process import InProcessExecutor
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_model import save_tiny_llama
from tests.models.tiny import TINY, save_tiny

MAX_LEN = 64
# The bytes of the shared beginnings and tails: ASCII, which every tiny vocabulary holds.
_LETTERS = st.integers(97, 105)
_STEM = "abcdefghiabcdefghihgfedcbaabcabcdefdefghi"
# The second one is the first after other four: equal blocks with another past.
_STEMS = (_STEM, f"ihgf{_STEM[4:]}", "hhhhggggffffeeeeddddccccbbbbaaaaabcdefgh")
# About one in nine of the tokens that the tiny models say: without these nearly all requests end by their length.
_LIKELY_STOPS = [*"-5OP[djw"]
_LIKELY_STOP_IDS = [*range(8, 150, 9)]
# Families: the second has windows in some layers, two kinds of rotation, and norms of queries and keys; the
# third a window in all.
FAMILIES = ("llama", "gemma3", "mistral")
# Ways to guess tokens: always as many as fit, since what is learnt about costs differs from run to run.
_MANY = {"num_speculative_tokens": 5, "adaptive_length": False}
SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **_MANY},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0, **_MANY},
    # The target as its own draft model, which is always right.
    "itself": {"method": "draft_model", **_MANY},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a request may be served in. The defaults are those of the fresh engine."""

    family: str = "llama"
    block_size: int = 16
    num_blocks: int = 64
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 16
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = False
    num_threads: int = 1
    is_warm: bool = False  # everything was asked once before
    num_slots: int = 0  # of the host tier
    preemption_mode: str = "auto"
    restarts: bool = False  # what was asked before was asked of another engine, over the same file
    speculation: str | None = None  # key of SPECULATION
    forgets_at: int | None = None  # step at which the prefix cache is emptied
    async_scheduling: bool = False

    @property
    def uses_priority(self) -> bool:
        """Return whether requests may have a priority."""
        return POLICIES.load(self.scheduling_policy).uses_priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a world."""

    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    arrives_at: int = 0
    aborted_at: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels compute, in which dtype, and whether they promise bits or tokens."""

    name: str
    dtype: str
    bits: bool
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


class DifferentAnswer(AssertionError):
    """A request was told something else than alone."""


# ------------------------------------------------------------ what is drawn


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a world: often with less room than its requests want."""
    block_size = draw(st.sampled_from([1, 4, 8, 16, 32]))
    least = -(-MAX_LEN // block_size)
    caching = draw(st.booleans())
    return World(
        family=draw(st.sampled_from(FAMILIES)),
        block_size=block_size,
        num_blocks=least + draw(st.integers(0, 2 * least)),
        max_num_batched_tokens=draw(st.sampled_from([1, 5, 5, 16, 40, 2048])),
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 16])),
        scheduling_policy=draw(st.sampled_from(sorted(POLICIES.names()))),
        enable_prefix_caching=caching,
        num_threads=draw(st.sampled_from([1, 1, 1, 2])),
        is_warm=caching and draw(st.booleans()),
        num_slots=draw(st.sampled_from([0, 3, least, 4 * least])),
        preemption_mode=draw(st.sampled_from(["auto", "swap", "recompute"])),
        restarts=draw(st.booleans()),
        speculation=draw(st.sampled_from([None, None, *SPECULATION])),
        forgets_at=draw(st.sampled_from([None, None, 5])),
        async_scheduling=draw(st.booleans()),
    )


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    """Draw how tokens are chosen one after the other."""
    max_tokens = draw(st.integers(1, 16))
    greedy = draw(st.booleans())
    fields: dict[str, Any] = {
        "temperature": 0.0 if greedy else draw(st.sampled_from([0.5, 1.0, 2.0])),
        "n": 1 if greedy else draw(st.sampled_from([1, 1, 2, 3])),
        "seed": draw(st.sampled_from([None, 0, 1, 2**40])),
        "top_p": draw(st.sampled_from([1.0, 0.6])),
        "top_k": draw(st.sampled_from([0, 4])),
        "min_p": draw(st.sampled_from([0.0, 0.02])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.4])),
        "frequency_penalty": draw(st.sampled_from([0.0, 2.0])),
        "presence_penalty": draw(st.sampled_from([0.0, -2.0])),
        "logprobs": draw(st.sampled_from([None, 0, 3])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        "stop": draw(st.sampled_from([[], ["a"], ["bc", "Q"], _LIKELY_STOPS])),
        "stop_token_ids": draw(st.sampled_from([[], [], [109], _LIKELY_STOP_IDS])),
        "bad_words": draw(st.sampled_from([[], ["e", "xy"]])),
        "logit_bias": draw(st.sampled_from([None, {100: 2.0}])),
        "ignore_eos": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, min(4, max_tokens))),
        "max_tokens": max_tokens,
    }
    return SamplingParams(**fields)


@st.composite
def searches(draw: st.DrawFn) -> BeamSearchParams:
    """Draw a search for the best beams."""
    width = draw(st.integers(1, 4))
    return BeamSearchParams(
        beam_width=width,
        n=draw(st.integers(1, width)),
        max_tokens=draw(st.integers(1, 12)),
        ignore_eos=draw(st.booleans()),
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        stop=draw(st.sampled_from([None, None, ["a"], ["bc", "Q"], _LIKELY_STOPS])),
        stop_token_ids=draw(st.sampled_from([None, None, [109], _LIKELY_STOP_IDS])),
        logprobs=draw(st.sampled_from([None, 0, 3, 20])),
    )


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Draw a request; many begin alike."""
    stem = draw(st.sampled_from(_STEMS))[: draw(st.integers(0, 36))].encode()
    tail = draw(st.lists(_LETTERS, min_size=not stem, max_size=12))
    params = draw(searches() if draw(st.integers(0, 3)) == 3 else samplings())
    return Ask(
        prompt=(*stem, *tail),
        params=params,
        arrives_at=draw(st.integers(0, 8)),
        aborted_at=draw(st.sampled_from([None, None, None, None, 4, 12])),
        priority=draw(st.integers(-1, 1)),
    )


# ------------------------------------------------------------ engines


class Engines:
    """Makes engines over tiny models that are saved once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_files = 0

    @functools.cache  # noqa: B019 - lives as long as the test session's one object
    def model(self, family: str) -> str:
        """Return the folder of a tiny model."""
        made = self._folder / family
        if family == "llama":
            save_tiny_llama(made, max_position=MAX_LEN)
        else:
            save_tiny(TINY[family], made)
        return str(made)

    def new_file(self) -> str:
        """Return the path of a tier file that is not there yet."""
        self._num_files += 1
        return str(self._folder / f"tier-{self._num_files}")

    def _speculative_config(self, world: World) -> dict[str, Any] | None:
        if world.speculation == "itself":
            return {**SPECULATION["itself"], "model": self.model(world.family)}
        return SPECULATION.get(world.speculation or "")

    def make(self, world: World, kernels: Kernels, tier_file: str | None = None) -> LLMEngine:
        """Start an engine."""
        args = EngineArgs(
            self.model(world.family),
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            seed=0,
            dtype=kernels.dtype,
            block_size=world.block_size,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_num_seqs=world.max_num_seqs,
            scheduling_policy=world.scheduling_policy,
            enable_prefix_caching=world.enable_prefix_caching,
            num_threads=world.num_threads,
            disable_log_stats=True,
            preemption_mode=world.preemption_mode,
            speculative_config=self._speculative_config(world),
            swap_dir=str(self._folder / "swap"),
            **kernels.arguments,
        )
        config = resolve(args)
        slot = config.model.shape.kv_bytes_per_token(config.cache.dtype) * world.block_size
        cache = dataclasses.replace(
            config.cache,
            num_blocks=world.num_blocks,
            swap_space_bytes=world.num_slots * (slot + TierFile.overhead_bytes(slot)),
            kv_cache_file=tier_file,
        )
        # In this process: what is planned ahead is the same wherever it is computed.
        ahead = world.async_scheduling and world.speculation is None
        scheduler = dataclasses.replace(config.scheduler, async_scheduling=ahead)
        config = dataclasses.replace(config, cache=cache, scheduler=scheduler)
        return LLMEngine(config, InProcessExecutor(config), ByteTokenizer())


# ------------------------------------------------------------ serving


def serve(engine: LLMEngine, asked: Sequence[Ask], world: World) -> list[RequestOutput]:
    """Serve all asks; return the last output of each. Every block is free or cached after it."""
    finals: dict[str, RequestOutput] = {}
    waiting = sorted(range(len(asked)), key=lambda i: asked[i].arrives_at)
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and asked[waiting[0]].arrives_at <= step:
            i = waiting.pop(0)
            priority = asked[i].priority if world.uses_priority else 0
            engine.add_request(
                str(i),
                list(asked[i].prompt),
                asked[i].params,
                priority=priority,
                tenant=f"tenant{asked[i].priority}",
            )
        if step == world.forgets_at:
            engine.reset_prefix_cache()
        leaving = [
            str(i) for i, ask in enumerate(asked) if ask.aborted_at == step and i not in waiting
        ]
        for output in [*engine.abort_request(leaving), *engine.step()]:
            finals[output.request_id] = output
        step += 1
        assert step < 20_000, "no end"
    engine._scheduler.check_invariants()
    assert engine._scheduler.cache_usage() == 0.0, "blocks that nobody needs are in use"
    return [finals[str(i)] for i in range(len(asked))]


def alone(engines: Engines, ask: Ask, kernels: Kernels, family: str, seed: int) -> RequestOutput:
    """Return what a request is told in a fresh engine with room for everything."""
    world = World(family=family)
    params = ask.params
    if isinstance(params, SamplingParams):
        params = dataclasses.replace(params, seed=seed)
    ask = dataclasses.replace(ask, params=params, arrives_at=0, aborted_at=None)
    engine = engines.make(world, kernels)
    output = serve(engine, [ask], world)[0]
    engine.shutdown()
    return output


def check_one_answer(
    engines: Engines, world: World, asked: Sequence[Ask], kernels: Kernels
) -> LLMEngine:
    """Raise DifferentAnswer unless every request is told what it is told alone."""
    keeps = world.num_slots and world.is_warm and world.restarts
    tier_file = engines.new_file() if keeps else None
    engine = engines.make(world, kernels, tier_file)
    if world.is_warm:
        serve(engine, asked, world)
    if keeps:
        engine.shutdown()
        engine = engines.make(world, kernels, tier_file)
    outputs = serve(engine, asked, world)
    engine.shutdown()
    for index, (ask, output) in enumerate(zip(asked, outputs, strict=True)):
        # Before its first token an aborted request has no sample, and was told nothing.
        seed = output.outputs[0].seed if output.outputs else 0
        expected = alone(engines, ask, kernels, world.family, seed)
        _compare(index, output, expected, kernels)
    return engine


def _compare(index: int, got: RequestOutput, expected: RequestOutput, kernels: Kernels) -> None:
    told, whole = _told(got, kernels), _told(expected, kernels)
    for name, one, two in _pairs(told, whole):
        if one != two:
            raise DifferentAnswer(f"request {index}: {name} is {one!r}, alone {two!r}")


Told = dict[tuple[int, str], Any]


def _told(output: RequestOutput, kernels: Kernels) -> Told:
    """Return what must not depend on the world, by (sample, what)."""
    told: Told = {(0, "error"): output.error}
    for sample in output.outputs:
        cut = sample.finish_reason == "abort"
        told[sample.index, "tokens"] = list(sample.token_ids)
        told[sample.index, "cut"] = cut
        if not cut:
            told[sample.index, "text"] = sample.text
            told[sample.index, "reason"] = (sample.finish_reason, sample.stop_reason)
        if kernels.bits:
            told[sample.index, "logprobs"] = [_scores(e) for e in sample.logprobs or []]
    if kernels.bits:
        told[0, "prompt logprobs"] = [_scores(e) for e in output.prompt_logprobs or []]
    return told


def _scores(entry: Any) -> list[tuple[int, float, int]] | None:
    if entry is None:
        return None
    return [(token, score.logprob, score.rank) for token, score in entry.items()]


def _pairs(told: Told, whole: Told) -> Iterator[tuple[str, Any, Any]]:
    """Yield what to compare; of an aborted sample the beginning that it was told."""
    any_cut = any(value for (_, what), value in told.items() if what == "cut")
    if not any_cut and told.keys() != whole.keys():
        raise DifferentAnswer(f"told {sorted(told)}, alone {sorted(whole)}")
    for (sample, what), one in told.items():
        if what == "cut":
            continue
        two = whole[sample, what]
        is_cut = any_cut if sample == 0 else told.get((sample, "cut"), False)
        if is_cut and isinstance(one, list):
            two = two[: len(one)]
        yield f"{what} of sample {sample}", one, two


Property = Callable[[World, list[Ask]], None]
