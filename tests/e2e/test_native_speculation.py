"""Speculation on the native kernels: every proposer, tokens and logprobs bit for bit those without it.

Tiny models with and without sliding windows, float32, bfloat16, quantized weights and an int8 cache; greedy
and sampled requests with penalties; long and short chunks, small blocks, few seats, warm caches, another
process. The draft models are the target itself, whose drafts are always right, and a stranger of the same
vocabulary, whose drafts hardly ever are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill import LLM, SamplingParams, native
from pagemill.engine.resolve import resolve
from pagemill.engine_args import EngineArgs
from pagemill.worker.memory import plan_memory
from tests.e2e.native_runs import FORMATS, QUANTIZED, Answer, Format, answer
from tests.models.tiny import TINY, save_tiny
from tests.ops.conftest import needs_extension

pytestmark = needs_extension
MAX_LEN = 64
# Name -> settings; {target} and {stranger} are folders.
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0},
    "itself": {"model": "{target}"},
    "stranger": {"model": "{stranger}", "num_speculative_tokens": 3},
}
COMPANIES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks-of-7": {"max_num_batched_tokens": 7, "block_size": 32},
    "two-seats": {"max_num_seqs": 2, "block_size": 4},
}


def _requests() -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(5)
    prompts, params = [], []
    for index, length in enumerate((1, 5, 17, 30, 8, 22)):
        prompt = [draw.randint(3, 150) for _ in range(length)]
        prompts.append(prompt + prompt[: length // 2])
        params.append(
            SamplingParams(
                temperature=(0.0, 1.0, 0.3)[index % 3],
                seed=index,
                max_tokens=(16, 19)[index % 2],
                ignore_eos=True,
                logprobs=2,
                prompt_logprobs=1 if index % 2 else None,
                repetition_penalty=1.3 if index == 3 else 1.0,
                min_tokens=3,
                detokenize=False,
            )
        )
    return prompts, params


PROMPTS, PARAMS = _requests()


class Runs:
    """What the requests are told without speculation, asked once a family and format."""

    def __init__(self, folders: Path) -> None:
        self._folders = folders
        self._plain: dict[tuple[str, str], list[Answer]] = {}

    def folder(self, family: str, seed: int = 0) -> str:
        made = self._folders / f"{family}-{seed}"
        if not made.exists():
            tiny = TINY[family]
            save_tiny(type(tiny)(**{**_fields(tiny), "seed": seed}), made)
        return str(made)

    def ask(
        self,
        family: str,
        form: Format,
        method: str | None,
        *,
        adapts: bool = False,
        pool: int = 0,
        **arguments: Any,
    ) -> tuple[list[Answer], dict[str, float]]:
        """Ask twice, so that the second time finds what the first left; return answers and metrics.

        `pool` is the number of blocks, 0: enough.
        """
        settings = None
        if method is not None:
            names = {"target": self.folder(family), "stranger": self.folder(family, 9)}
            settings = {"adaptive_length": adapts, **METHODS[method]}
            if "model" in settings:
                settings["model"] = settings["model"].format(**names)
        args: dict[str, Any] = {
            "skip_tokenizer_init": True, "max_model_len": MAX_LEN, "num_threads": 1,
            "kv_cache_memory_bytes": 1 << 22, "speculative_config": settings, "debug": True,
            **form.arguments, **arguments,
        }  # fmt: skip
        if pool:
            plan = plan_memory(resolve(EngineArgs(self.folder(family), **args)))
            args["kv_cache_memory_bytes"] = pool * plan.block_bytes
        with LLM(self.folder(family), **args) as llm:
            outputs = [o for _ in "ab" for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
            found = {m.name.rpartition("decode_num_")[2]: m.value for m in llm.get_metrics()}
        return [answer(output) for output in outputs], found

    def plain(self, family: str, form: Format) -> list[Answer]:
        key = (family, form.name)
        if key not in self._plain:
            self._plain[key] = self.ask(family, form, None)[0]
        return self._plain[key]


def _fields(tiny: Any) -> dict[str, Any]:
    return {name: getattr(tiny, name) for name in tiny.__dataclass_fields__}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    module = native.required()
    threads = module.num_threads()
    yield
    module.set_num_threads(threads)


CASES = [
    *(("llama", FORMATS[1], company) for company in COMPANIES),
    ("llama", FORMATS[0], "two-seats"),
    ("gemma3", FORMATS[0], "default"),
    ("gemma3", FORMATS[1], "two-seats"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "form", "company"), CASES, ids=lambda value: str(value))
def test_answers_are_those_without_speculation(
    runs: Runs, family: str, form: Format, method: str, company: str
) -> None:
    told, found = runs.ask(family, form, method, **COMPANIES[company])
    assert told == runs.plain(family, form)
    assert found["draft_tokens"] > 0
    if method == "itself":  # also where it draws: the random numbers are the target's
        assert found["accepted_tokens"] == found["draft_tokens"]


@pytest.mark.parametrize("form", QUANTIZED, ids=str)
def test_answers_are_those_without_speculation_in_every_format(runs: Runs, form: Format) -> None:
    told, found = runs.ask("llama", form, "suffix")
    assert told == runs.plain("llama", form)
    assert found["accepted_tokens"] > 0


def test_answers_are_those_without_speculation_in_a_process_and_with_adaptive_lengths(
    runs: Runs,
) -> None:
    told, found = runs.ask(
        "llama", FORMATS[1], "itself", adapts=True, distributed_executor_backend="multi_process"
    )
    assert told == runs.plain("llama", FORMATS[1])
    assert found["draft_tokens"] > 0


@pytest.mark.parametrize("method", ["ngram", "itself"])
def test_a_small_pool_with_preemptions_changes_no_answer(runs: Runs, method: str) -> None:
    told, found = runs.ask("llama", FORMATS[1], method, pool=11, block_size=8)
    assert told == runs.plain("llama", FORMATS[1])
    assert found["draft_tokens"] > 0
    assert found["pagemill:num_preemptions"] > 0
    if method == "itself":  # its cache follows blocks through whatever happens to them
        assert found["accepted_tokens"] == found["draft_tokens"]
