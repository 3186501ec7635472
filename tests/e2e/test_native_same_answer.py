"""One request, one answer on the native kernels: tokens and logprobs bit for bit, whatever the company.

Tiny models of several families (biases, windows, norms of q and k, soft caps, partial rotary, LayerNorm)
answer alone, one thread, prompts whole; then in batches of 2 to 64, in chunks of 1, 7 and 16 tokens, in
blocks of 8, 16 and 32 tokens, in a cache of one and a half requests, with two threads. The best path of the
machine runs all of it; every other path a family with a window and one without.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill import LLM, SamplingParams, native
from pagemill.engine.resolve import resolve
from pagemill.engine_args import EngineArgs
from pagemill.worker.memory import plan_memory
from tests.e2e.native_runs import FORMATS, QUANTIZED, Answer, Format, answer, answers
from tests.models.tiny import TINY, save_tiny
from tests.ops.conftest import ALL_ISAS, needs_extension

pytestmark = needs_extension
FAMILIES: list[Any] = [
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "qwen2", "gpt_neox", "opt")),
]
NUM_TOKENS = 8
MAX_LEN = 64
GREEDY = SamplingParams(
    temperature=0.0,
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
    detokenize=False,
)


def _prompts() -> list[list[int]]:
    """Return 20 prompts; the windows of the tiny models (8 and 11) are crossed within and after many."""
    draw = random.Random(7)
    lengths = [1, 5, 7, 20, 41, 16, 17, 33] + [draw.randint(1, 30) for _ in range(12)]
    return [[draw.randint(3, 150) for _ in range(length)] for length in lengths]


PROMPTS = _prompts()
FEW = 6  # prompts where steps are many
# Name -> requests (the prompts, over and over), engine arguments.
COMPANIES: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (FEW, {"max_num_seqs": 2, "block_size": 8}),
    "nine": (20, {"max_num_seqs": 9, "block_size": 32, "max_num_batched_tokens": 100}),
    "all-64": (64, {"max_num_seqs": 64}),
    "forty-on-two-threads": (40, {"max_num_seqs": 40, "num_threads": 2}),
    "chunks-of-1": (3, {"max_num_batched_tokens": 1}),
    "chunks-of-7": (FEW, {"max_num_batched_tokens": 7, "block_size": 32, "num_threads": 2}),
    "chunks-of-16": (FEW, {"max_num_batched_tokens": 16, "block_size": 8}),
}


# What every path but the best one goes through.
FEWER_FAMILIES = ("llama", "gemma3")
FEWER_COMPANIES = ("nine", "chunks-of-7")


class Answers:
    """What each prompt is told alone, by path, family and format; asked once a session."""

    def __init__(self, folders: Path) -> None:
        self._folders = folders
        self._alone: dict[tuple[str, str, str], list[Answer]] = {}

    def folder(self, family: str) -> Path:
        """Return the tiny model's folder."""
        made = self._folders / family
        if not made.exists():
            save_tiny(TINY[family], made)
        return made

    def engine(self, family: str, form: Format, **arguments: Any) -> LLM:
        """Start an engine; one thread and room for all unless `arguments` say otherwise."""
        settled: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_model_len": MAX_LEN,
            "kv_cache_memory_bytes": 1 << 23,
            "num_threads": 1,
        }
        return LLM(str(self.folder(family)), **{**settled, **form.arguments, **arguments})

    def alone(self, isa: str, family: str, form: Format) -> list[Answer]:
        """Return the answers to the prompts one after the other."""
        key = (isa, family, form.name)
        if key not in self._alone:
            with self.engine(family, form) as llm:
                self._alone[key] = answers(llm, PROMPTS, GREEDY, alone=True)
        return self._alone[key]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def threads_and_path_as_before() -> Iterator[None]:
    module = native.required()
    isa, threads = module.active_isa(), module.num_threads()
    yield
    native.use_isa(isa)
    module.set_num_threads(threads)


def check(told: Answers, isa: str, family: str, form: Format, company: str) -> None:
    """Compare the answers in one company with those alone."""
    expected = told.alone(isa, family, form)
    count, arguments = COMPANIES[company]
    which = [i % len(PROMPTS) for i in range(count)]
    with told.engine(family, form, **arguments) as llm:
        got = answers(llm, [PROMPTS[i] for i in which], GREEDY)
    for i, one in zip(which, got, strict=True):
        assert one == expected[i], f"prompt {i} of {len(PROMPTS[i])} tokens"


@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_same_in_any_company(
    family: str, form: Format, company: str, told: Answers
) -> None:
    check(told, native.required().active_isa(), family, form, company)


@pytest.mark.parametrize("company", ("forty-on-two-threads", "chunks-of-1", "chunks-of-7"))
@pytest.mark.parametrize("form", QUANTIZED, ids=str)
@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_an_answer_is_the_same_in_every_quantized_format(
    family: str, form: Format, company: str, told: Answers
) -> None:
    check(told, native.required().active_isa(), family, form, company)


@pytest.mark.parametrize("company", FEWER_COMPANIES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("family", FEWER_FAMILIES)
@pytest.mark.parametrize("path", ALL_ISAS)
def test_an_answer_is_the_same_on_every_path(
    path: str, family: str, form: Format, company: str, told: Answers
) -> None:
    available = native.required().available_isas()
    if path not in available.split(", "):
        pytest.skip(f"this machine or build has no {path}; it has {available}")
    native.use_isa(path)
    check(told, path, family, form, company)


def growing() -> list[int]:
    """Return prompts that come to want more than a tight pool has.

    The long ones hold much at once; the short ones grow together, also where nothing grows past a window.
    """
    order = sorted(range(len(PROMPTS)), key=lambda i: -len(PROMPTS[i]))
    return order[:4] + order[-8:]


def tight_memory(told: Answers, family: str, form: Format, block_size: int) -> int:
    """Return the bytes of a pool for one request of the longest kind and a half."""
    shape = EngineArgs(
        str(told.folder(family)), skip_tokenizer_init=True, max_model_len=MAX_LEN, block_size=block_size,
        kv_cache_memory_bytes=1 << 23, **form.arguments,
    )  # fmt: skip
    plan = plan_memory(resolve(shape))
    return plan.layout.blocks_of_request(MAX_LEN) * 3 // 2 * plan.block_bytes


@pytest.mark.parametrize("form", [*FORMATS, QUANTIZED[0]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_same_after_preemptions(family: str, form: Format, told: Answers) -> None:
    expected = told.alone(native.required().active_isa(), family, form)
    size, memory = 2, tight_memory(told, family, form, 2)
    order = growing()
    with told.engine(
        family, form, block_size=size, kv_cache_memory_bytes=memory, debug=True
    ) as llm:
        assert 1 <= llm.llm_engine.memory_plan.num_full_requests < 2
        outputs = llm.generate([PROMPTS[i] for i in order], GREEDY, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    for i, output in zip(order, outputs, strict=True):
        assert answer(output) == expected[i], f"prompt {i} of {len(PROMPTS[i])} tokens"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("form", [*FORMATS, *QUANTIZED], ids=str)
@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_an_answer_is_the_same_however_it_is_preempted(
    family: str, form: Format, mode: str, told: Answers, tmp_path: Path
) -> None:
    expected = told.alone(native.required().active_isa(), family, form)
    memory = tight_memory(told, family, form, 2)
    order = growing()
    with told.engine(
        family, form, block_size=2, kv_cache_memory_bytes=memory, preemption_mode=mode,
        swap_dir=str(tmp_path), swap_space=0.01, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        outputs = llm.generate([PROMPTS[i] for i in order], GREEDY, use_tqdm=False)
        counts = {metric.name: metric.value for metric in llm.get_metrics()}
    assert counts["pagemill:num_preemptions"] > 0
    assert (counts["pagemill:num_preemptions_by_swap"] > 0) == (mode == "swap")
    assert (counts["pagemill:swapped_in_blocks"] > 0) == (mode == "swap")
    for i, output in zip(order, outputs, strict=True):
        assert answer(output) == expected[i], f"prompt {i} of {len(PROMPTS[i])} tokens"


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_prompt_logprobs_are_the_same_with_a_warm_cache(
    family: str, form: Format, told: Answers
) -> None:
    long = [i for i, prompt in enumerate(PROMPTS) if len(prompt) > 16]
    expected = [told.alone(native.required().active_isa(), family, form)[i] for i in long]
    unscored = dataclasses.replace(GREEDY, prompt_logprobs=None)
    # Of four: where kinds of layers have tables of their own, prefixes are found by a few blocks.
    with told.engine(family, form, enable_prefix_caching=True, block_size=4) as llm:
        warm = llm.generate([PROMPTS[i] for i in long], unscored, use_tqdm=False)
        for _ in range(2):
            assert answers(llm, [PROMPTS[i] for i in long], GREEDY) == expected
        again = llm.generate([PROMPTS[i] for i in long], unscored, use_tqdm=False)
    assert all(output.num_cached_tokens == 0 for output in warm)
    assert all(output.num_cached_tokens for output in again), "the cache was not warm"


@pytest.mark.parametrize("form", [*FORMATS, *QUANTIZED], ids=str)
@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_an_answer_is_the_same_after_a_cache_hit(family: str, form: Format, told: Answers) -> None:
    params = dataclasses.replace(GREEDY, prompt_logprobs=None)
    long = [prompt for prompt in PROMPTS if len(prompt) > 16]
    branches = [prompt[:17] + [5, 6, 7] for prompt in long]  # share 17 tokens with a prompt
    rounds = [long, branches, long]
    with told.engine(family, form, enable_prefix_caching=False) as llm:
        cold = [answers(llm, prompts, params) for prompts in rounds]
    with told.engine(family, form, enable_prefix_caching=True, block_size=4) as llm:
        for i, (prompts, expected) in enumerate(zip(rounds, cold, strict=True)):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [answer(output) for output in outputs] == expected
            if i > 0:
                assert all(output.num_cached_tokens >= 12 for output in outputs)


def test_answers_differ_from_prompt_to_prompt(told: Answers) -> None:
    """A model that says the same whatever it reads would prove nothing above."""
    for family in ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2"):
        alone = told.alone(native.required().active_isa(), family, FORMATS[0])
        assert len({tuple(tokens) for tokens, *_ in alone}) > 15
