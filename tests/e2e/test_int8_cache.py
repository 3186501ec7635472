"""int8 KV caches through the engine: one request, one answer, and nearly twice the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemill import LLM, SamplingParams
from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine.resolve import resolve
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError
from pagemill.executor.in_process import InProcessExecutor
from pagemill.worker.memory import plan_memory
from tests.models.tiny import TINY, save_tiny
from tests.ops.conftest import needs_extension

PROMPTS = [[5, 9, 2], list(range(3, 60)), [7], [11, 4] * 13, [100, 50, 25, 12, 6]]
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=1, detokenize=False
)
SAMPLED = SamplingParams(
    temperature=1.0, seed=7, n=3, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False
)
# Windows and soft caps; windows and norms of queries; sinks have tests of their own.
FAMILIES = ["llama", "gemma2", "gemma3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in made.items():
        save_tiny(TINY[name], folder)
    return made


def answers(
    folder: Path, params: SamplingParams = GREEDY, *, together: bool = True, **fields: Any
) -> list[Any]:
    """Return what is said to each prompt, given all at once or one after the other."""
    values: dict[str, Any] = {
        "skip_tokenizer_init": True, "kv_cache_dtype": "int8", "max_model_len": 96, "debug": True,
        "kv_cache_memory_bytes": 1 << 20, "disable_log_stats": True, "dtype": "float32",
        "num_threads": 1,
    }  # fmt: skip
    with LLM(str(folder), **{**values, **fields}) as llm:
        steps = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
        return [
            (output.prompt_logprobs, [(o.token_ids, o.logprobs) for o in output.outputs])
            for prompts in steps
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]


@needs_extension
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logprobs_are_equal_in_any_batch_chunks_and_blocks(
    folders: dict[str, Path], name: str, dtype: str
) -> None:
    folder = folders[name]
    alone = answers(folder, together=False, dtype=dtype)
    for fields in (
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"max_num_seqs": 3, "block_size": 64, "num_threads": 2},
    ):
        assert answers(folder, dtype=dtype, **fields) == alone


@needs_extension
def test_samples_that_share_a_prompt_and_part_are_equal_in_any_batch(
    folders: dict[str, Path],
) -> None:
    folder = folders["llama"]
    alone = answers(folder, SAMPLED, together=False)
    assert answers(folder, SAMPLED, max_num_batched_tokens=9, block_size=16) == alone


@needs_extension
def test_answers_after_preemptions_are_the_same(folders: dict[str, Path]) -> None:
    args = EngineArgs(
        model=str(folders["llama"]), skip_tokenizer_init=True, kv_cache_dtype="int8",
        dtype="float32", max_model_len=96, block_size=4, debug=True, num_threads=1,
        kv_cache_memory_bytes=26 * 4 * 3 * 2 * 2 * (12 + 4),
    )  # fmt: skip
    config = resolve(args)
    engine = LLMEngine(config, InProcessExecutor(config), None)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    finals = {}
    while engine.has_unfinished_requests():
        finals.update({output.request_id: output for output in engine.step()})
    outputs = [finals[str(i)] for i in range(len(PROMPTS))]
    assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
    alone = answers(folders["llama"], together=False)
    for output, (_, [(token_ids, logprobs)]) in zip(outputs, alone, strict=True):
        assert output.outputs[0].token_ids == token_ids
        assert output.outputs[0].logprobs == logprobs


@needs_extension
def test_nearly_twice_the_tokens_fit(folders: dict[str, Path]) -> None:
    plans = [
        plan_memory(
            resolve(
                EngineArgs(
                    model=str(folders["llama"]), skip_tokenizer_init=True, dtype="bfloat16",
                    kv_cache_dtype=dtype, max_model_len=96, kv_cache_memory_bytes=1 << 24,
                    hf_overrides={"head_dim": 64},
                )
            )
        )
        for dtype in ("bfloat16", "int8")
    ]  # fmt: skip
    assert plans[0].block_bytes / plans[1].block_bytes == 128 / 68
    assert plans[1].num_tokens / plans[0].num_tokens == pytest.approx(128 / 68, rel=1e-2)
    assert f"fits {plans[1].num_tokens} tokens" in plans[1].lines()[-1]


def test_the_plain_backend_refuses_it_by_name(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.native.extension", lambda: None)
    args = EngineArgs(model=str(folders["llama"]), skip_tokenizer_init=True, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8'.*'torch'.*float32, bfloat16"):
        resolve(args)
