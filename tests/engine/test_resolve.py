"""Every "auto" is settled once, with a reason; what is wrong is named with its value and range."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from pagemill import native
from pagemill.engine.resolve import resolve, resolve_engine
from pagemill.engine_args import EngineArgs
from pagemill.errors import CheckpointError, ConfigError, NotSupportedError, UnknownNameError
from tests.fakes.fake_model import save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=512)


def changed(folder: Path, to: Path, name: str = "config.json", **keys: Any) -> Path:
    """Copy a model folder with some keys of one of its JSON files replaced."""
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    old = json.loads((folder / name).read_text())
    (to / name).write_text(json.dumps({**old, **keys}))
    return to


def args(folder: Path, **fields: Any) -> EngineArgs:
    return EngineArgs(model=str(folder), **fields)


def test_every_auto_is_settled_with_its_reason(folder: Path) -> None:
    config = resolve(args(folder))
    assert config.model.max_model_len == 512
    assert (config.model.dtype, config.model.load_format) == ("float32", "safetensors")
    assert config.cache.block_size == 16
    assert (config.cache.dtype, config.cache.gpu_memory_utilization) == ("float32", 0.5)
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs) == (2048, 256)
    assert (config.device.device, config.parallel.executor) == ("cpu", "in_process")
    assert config.device.num_threads >= 1
    notes = "\n".join(config.notes)
    for name in (
        "dtype",
        "max_model_len",
        "block_size",
        "max_num_seqs",
        "num_threads",
        "device",
        "executor",
    ):
        assert f"{name} = " in notes
    assert all(": " in note for note in config.notes)


def test_what_is_given_is_taken_and_not_noted(folder: Path) -> None:
    config = resolve(
        args(
            folder, max_model_len=100, block_size=32, max_num_seqs=3, max_num_batched_tokens=50,
            dtype="float", num_threads=1, gpu_memory_utilization=0.25, kv_cache_memory_bytes=10**6,
            distributed_executor_backend="mp", served_model_name="tiny", seed=5,
        )
    )  # fmt: skip
    assert (config.model.max_model_len, config.cache.block_size) == (100, 32)
    assert (config.model.dtype, config.model.served_model_name) == ("float32", "tiny")
    assert (config.parallel.executor, config.model.seed) == ("multi_process", 5)
    assert not any(
        note.startswith(("block_size", "max_model_len", "dtype")) for note in config.notes
    )


def test_few_tokens_a_step_mean_few_sequences(folder: Path) -> None:
    assert resolve(args(folder, max_num_batched_tokens=7)).scheduler.max_num_seqs == 7


def test_half_precision_becomes_bfloat16_on_cpu_and_is_refused_when_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    half = changed(folder, tmp_path, torch_dtype="float16")
    config = resolve(args(half))
    assert config.model.dtype == "bfloat16"
    assert any(n.startswith("dtype = bfloat16") and "float16" in n for n in config.notes)
    for name in ("float16", "half"):
        with pytest.raises(ConfigError, match="bfloat16"):
            resolve(args(half, dtype=name))


def test_dtype_may_stand_under_its_new_name(folder: Path, tmp_path: Path) -> None:
    new = changed(folder, tmp_path, torch_dtype=None, dtype="bfloat16")
    assert resolve(args(new)).model.dtype == "bfloat16"


CHANNEL = {"weights": {"num_bits": 8, "strategy": "channel"}, "targets": ["Linear"]}
IN_WORDS = {"format": "pack-quantized", "config_groups": {"group_0": CHANNEL}}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}}, "awq"),
        ({"compression_config": IN_WORDS}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "fbgemm_fp8"}}}, "fbgemm_fp8"),
    ],
)
def test_a_checkpoint_s_own_quantization_is_taken_with_its_reason(
    folder: Path, tmp_path: Path, keys: dict[str, Any], method: str, load_format: str
) -> None:
    quantized = changed(folder, tmp_path, **keys)
    for asked in (None, "auto", method):
        config = resolve(args(quantized, load_format=load_format, quantization=asked))
        assert config.model.quantization == method
        assert any(n.startswith(f"quantization = {method}: ") for n in config.notes)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"quantization_config": "awq"}, "'awq'"),
        ({"quantization_config": {}}, "quantization_config of config.json: no quant_method"),
        (
            {"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}},
            "'bitsandbytes'.*this version reads awq, compressed-tensors, .*gptq",
        ),
    ],
)
def test_quantized_weights_are_refused_by_the_name_of_their_format(
    folder: Path, tmp_path: Path, keys: dict[str, Any], named: str, load_format: str
) -> None:
    quantized = changed(folder, tmp_path, **keys)
    with pytest.raises(NotSupportedError, match=named):
        resolve(args(quantized, load_format=load_format))


def test_settings_that_are_not_supported_are_refused_before_loading(
    folder: Path, tmp_path: Path
) -> None:
    three = changed(folder, tmp_path, quantization_config={"quant_method": "gptq", "bits": 3})
    with pytest.raises(CheckpointError, match=r"bits is 3; supported: 4, 8"):
        resolve(args(three))


def test_another_quantization_than_the_checkpoint_s_is_refused_with_both_names(
    folder: Path, tmp_path: Path
) -> None:
    quantized = changed(folder, tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    for asked in ("awq", "int8", "none", "gguf"):
        with pytest.raises(ConfigError, match=f"quantization is '{asked}', .* as 'gptq'"):
            resolve(args(quantized, quantization=asked))
    with pytest.raises(ConfigError, match=r"quantization is 'awq', .* weights are plain.*int8"):
        resolve(args(folder, quantization="awq"))
    assert resolve(args(folder, quantization="none")).model.quantization is None
    blocks = changed(folder, tmp_path, quantization_config={"quant_method": "gguf", "types": {}})
    with pytest.raises(CheckpointError, match="belongs to .gguf files"):
        resolve(args(blocks))


def test_a_gguf_file_in_blocks_stays_as_it_is_or_becomes_plain(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = native.extension() is not None
    for asked in (None, "auto"):
        config = resolve(args(smollm2_gguf, quantization=asked))
        assert config.model.quantization == ("gguf" if built else None)
        assert any(n.startswith("quantization = ") for n in config.notes)
    assert resolve(args(smollm2_gguf, quantization="none")).model.quantization is None
    assert resolve(args(smollm2_gguf, quantization="gguf")).model.quantization == "gguf"
    assert resolve(args(smollm2_gguf, quantization="int8")).model.quantization == "int8"
    with pytest.raises(ConfigError, match=r"'gptq', but this checkpoint is a .gguf file in blocks"):
        resolve(args(smollm2_gguf, quantization="gptq"))
    monkeypatch.setattr(native, "extension", lambda: None)
    config = resolve(args(smollm2_gguf))
    assert config.model.quantization is None
    assert any("without native kernels plain weights are faster" in n for n in config.notes)


def test_dequantized_weights_load_when_the_caller_says_so(folder: Path, tmp_path: Path) -> None:
    quantized = changed(folder, tmp_path, quantization_config={"quant_method": "fp8"})
    resolve(args(quantized, hf_overrides={"quantization_config": None}))


def test_a_length_over_the_checkpoint_s_is_refused_with_both_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 513,.* 512 tokens"):
        resolve(args(folder, max_model_len=513))


@pytest.mark.parametrize(
    ("scaling", "usual", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 512, 512),
        ({"rope_type": "linear", "factor": 2.5}, 512, 1280),
        ({"rope_type": "dynamic", "factor": 2.0}, 512, 1024),
        (
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            512, 512,
        ),
    ],
)  # fmt: skip
def test_rotary_scaling_stretches_the_context(
    folder: Path, scaling: dict[str, Any], usual: int, longest: int
) -> None:
    overrides = {"rope_scaling": scaling, "rope_parameters": None}
    assert resolve(args(folder, hf_overrides=overrides)).model.max_model_len == usual
    asked = args(folder, hf_overrides=overrides, max_model_len=longest)
    assert resolve(asked).model.max_model_len == longest
    with pytest.raises(ConfigError, match=rf"{longest + 1}, .* {longest} tokens"):
        resolve(args(folder, hf_overrides=overrides, max_model_len=longest + 1))


def test_keys_of_the_config_can_be_replaced(folder: Path) -> None:
    config = resolve(args(folder, hf_overrides={"max_position_embeddings": 1024}))
    assert config.model.max_model_len == 1024
    assert any("hf_overrides" in note for note in config.notes)


def test_end_tokens_are_the_union_of_all_three_sources(folder: Path, tmp_path: Path) -> None:
    one = changed(folder, tmp_path / "a", eos_token_id=11)
    two = changed(one, tmp_path / "b", "generation_config.json", eos_token_id=[12, 13, -1, 9999])
    assert resolve(args(two)).model.eos_token_ids == (11, 12, 13, 257)
    with_ids = resolve(args(two, generation_config="pagemill")).model.eos_token_ids
    assert with_ids == (11, 12, 13, 257)  # the sampling defaults are off, not the end tokens


def test_a_broken_end_token_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        resolve(args(changed(folder, tmp_path, eos_token_id="</s>")))


def test_overriding_one_sampling_default_keeps_the_others(folder: Path, tmp_path: Path) -> None:
    made = changed(
        folder, tmp_path, "generation_config.json",
        temperature=0.6, top_k=20, max_new_tokens=99, do_sample=True, pad_token_id=3,
    )  # fmt: skip
    config = resolve(args(made))
    assert config.model.generation_config == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    config = resolve(args(made, override_generation_config={"temperature": 0.1, "top_p": 0.5}))
    assert config.model.generation_config == {
        "temperature": 0.1, "top_k": 20, "top_p": 0.5, "max_tokens": 99,
    }  # fmt: skip
    assert resolve(args(made, generation_config="pagemill")).model.generation_config == {}
    other = changed(folder, tmp_path / "o", "generation_config.json", top_p=0.3)
    config = resolve(args(made, generation_config=str(other)))
    assert config.model.generation_config == {"top_p": 0.3}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"override_generation_config": {"temprature": 1}}, "temprature"),
        ({"override_generation_config": {"top_p": 7}}, "top_p is 7"),
        ({"generation_config": "/no/such/folder"}, "generation_config"),
    ],
)
def test_wrong_sampling_defaults_are_refused(folder: Path, fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(args(folder, **fields))


BAD = [
    ("max_model_len", 0), ("max_model_len", 1.5), ("max_model_len", "many"), ("max_num_seqs", 0),
    ("max_num_seqs", True), ("max_num_batched_tokens", -1), ("block_size", 3), ("block_size", 512),
    ("block_size", True), ("block_size", 16.0), ("enable_chunked_prefill", 0),
    ("enable_chunked_prefill", "no"), ("max_context_len_to_capture", "x"), ("gpu_memory_utilization", 0.0), ("gpu_memory_utilization", 1.5),
    ("gpu_memory_utilization", float("nan")), ("kv_cache_memory_bytes", 0), ("num_threads", 0),
    ("max_logprobs", -2), ("max_logprobs", None), ("seed", 2**63), ("seed", "x"),
    ("dtype", "int4"), ("load_format", "zip"), ("kv_cache_dtype", "fp8"), ("tokenizer_mode", "fast"),
    ("logprobs_mode", "raw"), ("log_stats_interval_s", 0), ("metrics_prefix", "a b"),
    ("metrics_prefix", ""), ("model", ""), ("hf_overrides", [1]), ("logits_processors", "a:b"),
    ("logits_processors", ["no colon"]), ("debug", 1), ("served_model_name", 7),
    ("swap_space", -1.0), ("swap_space", 1e300), ("swap_space", float("inf")), ("swap_space", True), ("swap_space", "4"),
    ("swap_dir", ""), ("kv_cache_file", 3), ("preemption_mode", "maybe"), ("model", "a\0b"),
    ("kv_cache_file", "/tmp/a\0b"), ("kv_cache_file", "/tmp/\ud800"), ("swap_dir", "\0"), ("tokenizer", "a\0b"),
    ("generation_config", "a\0b"), ("download_dir", "a\0b"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_out_of_range_is_refused_by_name(folder: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineArgs(**{"model": str(folder), name: value}))
    assert str(caught.value).startswith(f"{name} is {value!r}")
    assert "must be" in str(caught.value)


SWITCHES = [
    name
    for name, hint in typing.get_type_hints(EngineArgs).items()
    if bool in {hint, *typing.get_args(hint)}
]


@pytest.mark.parametrize("name", SWITCHES)
def test_what_only_looks_like_a_switch_is_refused_by_name(folder: Path, name: str) -> None:
    for value in ("yes", "no", "", 0, 1, 0.0, [], "True"):
        with pytest.raises(ConfigError, match=f"^{name}(=| is ){re.escape(repr(value))}"):
            resolve(EngineArgs(**{"model": str(folder), name: value}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_cache_file": "t", "swap_space": 0}, "kv_cache_file needs room: swap_space is 0"),
        ({"async_scheduling": True}, "needs distributed_executor_backend='mp'"),
        (
            {
                "async_scheduling": True,
                "distributed_executor_backend": "mp",
                "speculative_config": {"method": "ngram"},
            },
            "leave one of them out",
        ),
        ({"async_scheduling": "yes"}, "async_scheduling is 'yes'"),
        ({"preemption_mode": "swap", "swap_space": 0.0}, "'swap', but swap_space is 0"),
        ({"kv_cache_file": "t", "enable_prefix_caching": False}, "enable_prefix_caching is False"),
    ],
)
def test_settings_of_the_host_tier_that_contradict_each_other_are_refused(
    folder: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(args(folder, **fields))


def test_host_tier_is_four_gib_in_the_cache_folder_unless_said_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path))
    cache = resolve(args(folder)).cache
    assert (cache.swap_space_bytes, cache.swap_dir) == (4 << 30, str(tmp_path / "swap"))
    other = resolve(args(folder, swap_space=0.5, swap_dir="/x", kv_cache_file="/y/t"))
    assert (other.cache.swap_space_bytes, other.cache.swap_dir) == (1 << 29, "/x")
    assert other.cache.kv_cache_file == "/y/t"
    assert resolve(args(folder)).scheduler.preemption_mode == "auto"


@pytest.mark.parametrize(
    ("name", "value"),
    [("tensor_parallel_size", 2),
     ("enable_lora", True),
     ("trust_remote_code", True), ("limit_mm_per_prompt", {"image": 1}),
     ("enable_chunked_prefill", False), ("tensor_parallel_size", True), ("max_loras", 1.0)],
)  # fmt: skip
def test_a_feature_that_is_not_there_is_refused_by_name(
    folder: Path, name: str, value: Any
) -> None:
    with pytest.raises(NotSupportedError, match=name):
        resolve(args(folder, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [("scheduling_policy", "random", "fcfs"), ("device", "abacus", "cpu"), ("quantization", "int3", "int8"), ("quantization", ["int8"], "int8"),
     ("distributed_executor_backend", "ray", "in_process")],
)  # fmt: skip
def test_an_unknown_name_lists_the_known_ones(
    folder: Path, name: str, value: str, known: str
) -> None:
    with pytest.raises(UnknownNameError, match=f"{value}.*{known}"):
        resolve(args(folder, **{name: value}))


def test_threads_beyond_the_processors_are_said_and_far_too_many_refused(folder: Path) -> None:
    from pagemill.device.host import num_processors

    most = num_processors()
    with pytest.raises(ConfigError, match=f"may use {most} processors; .* at most {16 * most}"):
        resolve(args(folder, num_threads=16 * most + 1))
    notes = resolve(args(folder, num_threads=most + 1)).notes
    assert any(f"more than the {most} processors" in note for note in notes)


def test_an_unknown_model_type_lists_the_known_ones(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="llamma.*llama"):
        resolve(args(changed(folder, tmp_path, model_type="llamma")))
    with pytest.raises(CheckpointError, match="model_type"):
        resolve(args(changed(folder, tmp_path, model_type=None)))


def test_a_model_that_is_not_there_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        resolve(EngineArgs(model=str(tmp_path / "nowhere" / "at" / "all")))


def test_the_format_must_be_what_lies_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="load_format is 'gguf'.*safetensors"):
        resolve(args(folder, load_format="gguf"))
    assert resolve(args(folder, load_format="dummy")).model.load_format == "dummy"


def test_the_tokenizer_may_lie_elsewhere_or_be_left_out(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes((folder / "tokenizer.json").read_bytes())
    config, tokenizer = resolve_engine(args(folder, tokenizer=str(file)))
    assert config.model.tokenizer == str(file)
    assert tokenizer is not None
    assert tokenizer.encode("A") == [65]
    config, tokenizer = resolve_engine(args(folder, skip_tokenizer_init=True))
    assert tokenizer is None
    assert config.model.eos_token_ids == (257,)


def test_importing_the_engine_brings_no_torch() -> None:
    rooms = "async_engine, engine_process, llm_engine, resolve, input_processor, prometheus"
    code = f"import sys; from pagemill.engine import {rooms}; import pagemill.llm; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_folder_without_a_model_is_named_before_its_tokenizer_is_looked_for(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match="has no config.json"):
        resolve(EngineArgs(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "ahead"),
    [
        ({}, False),
        ({"distributed_executor_backend": "mp", "num_threads": 1}, True),
        ({"distributed_executor_backend": "mp", "num_threads": 2}, False),
        ({"distributed_executor_backend": "mp", "num_threads": 2, "async_scheduling": True}, True),
        (
            {"distributed_executor_backend": "mp", "num_threads": 1, "async_scheduling": False},
            False,
        ),
        (
            {
                "distributed_executor_backend": "mp",
                "num_threads": 1,
                "speculative_config": {"method": "ngram"},
            },
            False,
        ),
    ],
)
def test_steps_are_planned_ahead_where_a_processor_is_left_for_it(
    folder: Path, fields: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.engine.resolve.num_processors", lambda: 2)
    config = resolve(args(folder, **fields))
    assert config.scheduler.async_scheduling is ahead


def test_tenant_weights_reach_the_scheduler(folder: Path) -> None:
    weights = {"a": 2, "b": 0.5}
    config = resolve(args(folder, scheduling_policy="fair", tenant_weights=weights))
    assert config.scheduler.tenant_weights == weights


@pytest.mark.parametrize("weights", [{"a": 0}, {"a": -1}, {"a": "2"}, {"a": True}, {3: 1.0}, [1]])
def test_a_tenant_weight_is_a_number_greater_than_0(folder: Path, weights: Any) -> None:
    with pytest.raises(ConfigError, match="tenant_weights"):
        resolve(args(folder, scheduling_policy="fair", tenant_weights=weights))


def test_tenant_weights_are_refused_where_nobody_looks_at_them(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fcfs' does not look at it.*'fair'"):
        resolve(args(folder, tenant_weights={"a": 2}))
