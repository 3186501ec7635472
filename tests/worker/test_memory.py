"""The memory plan: its arithmetic, its errors whose advice works, and a real worst-case step."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagemill.config import EngineConfig, SpeculativeConfig
from pagemill.errors import CacheTooSmallError, ConfigError
from pagemill.models import MODELS
from pagemill.worker.memory import check_fits, plan_memory
from pagemill.worker.worker import Worker
from tests.fakes.fake_model import fake_config

MIB = 1 << 20

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def make_config(dtype: str = "float32", **cache: Any) -> EngineConfig:
    base = fake_config(
        hf_config=LLAMA,
        max_model_len=1024,
        block_size=16,
        max_num_batched_tokens=1024,
        max_num_seqs=64,
        model_type="llama",
        dtype=dtype,
        shape=MODELS.load("llama").read_shape(LLAMA),
    )
    cache = {"num_blocks": None, "dtype": dtype, **cache}
    return dataclasses.replace(base, cache=dataclasses.replace(base.cache, **cache))


def with_len(config: EngineConfig, max_model_len: int) -> EngineConfig:
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, max_model_len=max_model_len)
    )


def num_parameters() -> int:
    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    attention = hidden * 64 * (8 + 4 + 4 + 8)
    layer = attention + 3 * hidden * inner + 2 * hidden
    return LLAMA["vocab_size"] * hidden + 8 * layer + hidden


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_parts_add_up(dtype: str, size: int) -> None:
    plan = plan_memory(make_config(dtype), 1024 * MIB)
    assert plan.available_bytes == 1024 * MIB
    assert plan.usable_bytes == 512 * MIB
    # rotary tables and the like are small
    assert num_parameters() * size <= plan.weight_bytes <= num_parameters() * size + MIB
    assert plan.block_bytes == 16 * 8 * 2 * 4 * 64 * size
    free = plan.usable_bytes - plan.weight_bytes - plan.peak_activation_bytes
    assert plan.num_blocks == free // plan.block_bytes
    assert plan.kv_cache_bytes == plan.num_blocks * plan.block_bytes
    assert plan.num_tokens == plan.num_blocks * 16
    assert plan.num_full_requests == plan.num_tokens / 1024


def test_pool_is_no_larger_than_a_full_step_can_use() -> None:
    plan = plan_memory(make_config(), 1 << 40)
    assert plan.num_full_requests == 64


@pytest.mark.parametrize("block_size", [16, 256])
def test_full_requests_are_counted_in_whole_blocks(block_size: int) -> None:
    config = make_config(kv_cache_memory_bytes=100 * MIB)
    cache = dataclasses.replace(config.cache, block_size=block_size)
    config = with_len(dataclasses.replace(config, cache=cache), 300)
    plan = plan_memory(config, 1 << 34)
    assert plan.num_full_requests == plan.num_blocks / -(-300 // block_size)


def test_pool_size_can_be_set_outright() -> None:
    plan = plan_memory(make_config(kv_cache_memory_bytes=100 * MIB), MIB)
    assert plan.num_blocks == 100 * MIB // plan.block_bytes


def test_what_the_machine_cannot_hold_is_not_loaded() -> None:
    pool = plan_memory(make_config(kv_cache_memory_bytes=100 * MIB), MIB)
    with pytest.raises(ConfigError, match=r"KV cache 100\.00 MiB, but 1\.00 MiB of memory"):
        check_fits(pool)
    check_fits(plan_memory(make_config(kv_cache_memory_bytes=100 * MIB), 1024 * MIB))


def test_a_worker_refuses_a_pool_larger_than_the_memory_before_it_takes_any() -> None:
    with pytest.raises(ConfigError, match="of memory is available"):
        Worker(make_config(kv_cache_memory_bytes=1 << 50))


def test_bigger_steps_need_more_activations() -> None:
    config = make_config()
    peaks = [
        plan_memory(
            dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **change)),
            1 << 34,
        ).peak_activation_bytes
        for change in (
            {},
            {"max_num_batched_tokens": 4096},
            {"max_num_seqs": 4096, "max_num_batched_tokens": 4096},
        )
    ]
    assert peaks[0] < peaks[1] < peaks[2]


def test_a_draft_model_takes_weights_and_a_part_of_every_block() -> None:
    config = make_config()
    shape = {**LLAMA, "num_hidden_layers": 2}
    draft = dataclasses.replace(
        config.model, hf_config=shape, shape=MODELS.load("llama").read_shape(shape)
    )
    speculative = SpeculativeConfig(
        method="draft_model", num_speculative_tokens=4, adaptive_length=True, options={},
        draft_model=draft,
    )  # fmt: skip
    plain = plan_memory(config, 1024 * MIB)
    with_draft = plan_memory(dataclasses.replace(config, speculative=speculative), 1024 * MIB)
    alone = plan_memory(dataclasses.replace(config, model=draft), 1024 * MIB)
    assert with_draft.weight_bytes == plain.weight_bytes + alone.weight_bytes
    assert with_draft.block_bytes == plain.block_bytes * 10 // 8
    assert with_draft.num_blocks < plain.num_blocks


GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}


def gemma_config(max_model_len: int, *, window: int = 512, **cache: Any) -> EngineConfig:
    config = with_len(make_config(**cache), max_model_len)
    sizes = {**GEMMA, "sliding_window": window}
    shape = MODELS.load("gemma3_text").read_shape(sizes)
    model = dataclasses.replace(
        config.model, hf_config=sizes, model_type="gemma3_text", shape=shape
    )
    return dataclasses.replace(config, model=model)


@pytest.mark.parametrize(("max_model_len", "times"), [(8192, 4.3), (32768, 5.3)])
def test_several_times_as_many_tokens_fit_where_most_layers_have_a_window(
    max_model_len: int, times: float
) -> None:
    pool = {"kv_cache_memory_bytes": 8192 * MIB}
    plan = plan_memory(gemma_config(max_model_len, **pool), 1 << 40)
    whole = plan_memory(gemma_config(max_model_len, window=max_model_len, **pool), 1 << 40)
    assert plan.kv_cache_bytes == pytest.approx(whole.kv_cache_bytes, rel=1e-3)
    assert whole.num_tokens == pytest.approx(plan.num_tokens_without_windows, rel=1e-3)
    assert plan.num_tokens > times * whole.num_tokens
    assert plan.num_tokens == int(plan.num_full_requests * max_model_len)
    (line,) = [line for line in plan.lines() if "windows" in line]
    assert "80 tokens of 3 layers that see all or 16 tokens of 15 layers that see 512" in line
    assert not any("windows" in line for line in whole.lines())


def test_a_pool_too_small_for_windows_says_what_fits() -> None:
    with pytest.raises(CacheTooSmallError) as caught:
        plan_memory(gemma_config(8192, kv_cache_memory_bytes=40 * MIB), 1 << 40)
    text = str(caught.value)
    longest = int(re.search(r"lower max_model_len to (\d+)", text)[1])  # type: ignore[index]
    size = int(re.search(r"to at least (\d+)", text)[1])  # type: ignore[index]
    assert 512 < longest < 8192
    assert plan_memory(gemma_config(longest, kv_cache_memory_bytes=40 * MIB), 1 << 40).num_blocks
    assert plan_memory(gemma_config(8192, kv_cache_memory_bytes=size), 1 << 40).num_blocks
    with pytest.raises(CacheTooSmallError):
        plan_memory(gemma_config(8192, kv_cache_memory_bytes=size - 1), 1 << 40)


def test_a_draft_model_keeps_every_token_of_every_layer() -> None:
    config = gemma_config(8192, kv_cache_memory_bytes=4096 * MIB)
    speculative = SpeculativeConfig(
        method="draft_model", num_speculative_tokens=4, adaptive_length=True, options={},
        draft_model=make_config().model,
    )  # fmt: skip
    plan = plan_memory(dataclasses.replace(config, speculative=speculative), 1 << 40)
    assert plan.layout is not None and not plan.layout.lets_go
    assert plan.num_tokens == plan.num_blocks * 16


def test_draft_tokens_take_a_row_of_logits_each() -> None:
    config = make_config()
    config = dataclasses.replace(
        config,
        scheduler=dataclasses.replace(
            config.scheduler, max_num_seqs=512, max_num_batched_tokens=512
        ),
    )
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=8, adaptive_length=True, options={}
    )
    plain = plan_memory(config, 1024 * MIB)
    with_drafts = plan_memory(dataclasses.replace(config, speculative=speculative), 1024 * MIB)
    more = with_drafts.peak_activation_bytes - plain.peak_activation_bytes
    assert more >= 64 * 4 * LLAMA["vocab_size"]  # max_drafts of them at most, whatever runs


def test_longest_length_of_the_advice_fits() -> None:
    config = make_config()
    tight = plan_memory(config, 1024 * MIB)
    fixed = tight.weight_bytes + tight.peak_activation_bytes
    available = 2 * (fixed + 40 * tight.block_bytes + 5)
    with pytest.raises(CacheTooSmallError) as caught:
        plan_memory(config, available)
    text = str(caught.value)
    longest = int(re.search(r"lower max_model_len to (\d+)", text)[1])  # type: ignore[index]
    assert longest == 40 * 16
    assert plan_memory(with_len(config, longest), available).num_full_requests >= 1
    assert "max_model_len = 1024" in text and "gpu_memory_utilization = 0.5" in text

    share = float(re.search(r"raise gpu_memory_utilization to ([\d.]+)", text)[1])  # type: ignore[index]
    plan_memory(make_config(gpu_memory_utilization=share), available)
    size = int(re.search(r"kv_cache_memory_bytes to at least (\d+)", text)[1])  # type: ignore[index]
    assert plan_memory(make_config(kv_cache_memory_bytes=size), available).num_full_requests == 1


def test_outright_pool_too_small_says_how_much_is_needed() -> None:
    with pytest.raises(CacheTooSmallError, match="raise kv_cache_memory_bytes") as caught:
        plan_memory(make_config(kv_cache_memory_bytes=3 * MIB), 1 << 40)
    size = int(re.search(r"to at least (\d+)", str(caught.value))[1])  # type: ignore[index]
    with pytest.raises(CacheTooSmallError):
        plan_memory(make_config(kv_cache_memory_bytes=size - 1), 1 << 40)
    plan_memory(make_config(kv_cache_memory_bytes=size), 1 << 40)


def test_no_room_at_all_names_the_step_sizes() -> None:
    with pytest.raises(CacheTooSmallError, match="max_num_batched_tokens") as caught:
        plan_memory(make_config(), 10 * MIB)
    assert "lower max_model_len" not in str(caught.value)
    assert "0 bytes is free" in str(caught.value)


def test_planning_builds_no_weights(tmp_path: Path) -> None:
    big = {**LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    config = make_config()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, hf_config=big, shape=MODELS.load("llama").read_shape(big)
        ),
    )
    assert plan_memory(config, 1 << 42).weight_bytes > 1 << 37


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resident_memory_of_the_worst_step_is_within_a_tenth_of_the_plan(dtype: str) -> None:
    script = Path(__file__).parent / "worst_step.py"
    done = subprocess.run(
        [sys.executable, str(script), dtype], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    used, planned = measured["resident_bytes"], measured["planned_bytes"]
    assert abs(used - planned) < 0.1 * planned, measured


_LIMITED = """
import json, resource, sys
from pagemill import native
from pagemill.device import host
from pagemill.errors import OutOfMemoryError
from pagemill.worker.worker import Worker
from tests.worker.test_memory import MIB, make_config

# What is asked is what happens past the plan, which knows the limit.
host.available_bytes = lambda: 1 << 40
native.extension()
config = make_config(kv_cache_memory_bytes=int(sys.argv[1]) * MIB)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[2]) * MIB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    Worker(config)
except OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
@pytest.mark.parametrize(
    ("cache_mib", "room_mib", "what"),
    [(64, 30, "weights were loaded and packed"), (2000, 500, "the KV cache was made")],
)
def test_memory_that_the_system_refuses_is_an_error_with_advice(
    cache_mib: int, room_mib: int, what: str
) -> None:
    command = [sys.executable, "-c", _LIMITED, str(cache_mib), str(room_mib)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert f"the system refused memory while {what}" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_the_plan_knows_the_limit_of_the_process() -> None:
    program = _LIMITED.replace("host.available_bytes = lambda: 1 << 40\n", "")
    command = [sys.executable, "-c", program, "64", "60"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "ConfigError: weights take" in done.stderr
    assert "raise the process's limit (ulimit -v)" in done.stderr


_PLANNED = """
import resource, sys
from pagemill import native
from pagemill.errors import CacheTooSmallError
from pagemill.worker.worker import Worker
from tests.worker.test_memory import make_config

native.extension()
config = make_config(gpu_memory_utilization=0.9)
pages = int(open("/proc/self/statm").read().split()[0])
limit = int(sys.argv[1]) << 10 or pages * resource.getpagesize() + (60 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    print(Worker(config).memory_plan.num_full_requests)
except CacheTooSmallError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_a_limit_that_leaves_no_cache_is_named_with_one_that_does() -> None:
    def said(limit_kib: str) -> str:
        command = [sys.executable, "-c", _PLANNED, limit_kib]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    refused = said("0")
    assert "under the process's limit on address space (RLIMIT_AS, ulimit -v" in refused
    assert "raise gpu_memory_utilization" not in refused
    enough = re.search(r"raise the limit to about ulimit -v (\d+)", refused)
    assert enough is not None, refused
    assert float(said(enough[1])) >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_wherever_memory_ends_in_packing_the_start_is_refused_and_nothing_dies(
    quantization: str,
) -> None:
    rooms = ["40", "60", "90", "130", "170", "4000"]
    program = Path(__file__).parent / "memory_limits.py"
    done = subprocess.run(
        [sys.executable, str(program), quantization, "2", *rooms], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ends = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert len(ends) == len(rooms)
    assert ends[-1] == "started"
    for end in ends[:-1]:
        assert end == "started" or "the system refused memory while" in end, done.stdout
    assert sum(end != "started" for end in ends) >= 3, done.stdout
