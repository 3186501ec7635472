"""GGUF files of every architecture: the weights and configuration of the model they were made from.

Small random models of transformers are written as llama.cpp's converter writes them; transformers itself,
built from what we read, must then compute the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from pagemill.checkpoint import locate, open_checkpoint, read_configs
from pagemill.checkpoint.gguf_config import ARCHITECTURES
from pagemill.errors import CheckpointError
from tests.checkpoint.gguf_writing import gguf_names, permute, split_qkv, write_gguf

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One model to write: its config in transformers, and what a converter makes of it."""

    architecture: str
    model_type: str
    config: Config
    metadata: Mapping[str, Any]
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)


SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
METADATA = {
    ".context_length": 64, ".embedding_length": 64, ".block_count": 4, ".feed_forward_length": 80,
    ".attention.head_count": 4, ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-5, ".rope.freq_base": 500.0,
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
}  # fmt: skip
COMMON = SIZES | {"rms_norm_eps": 1e-5, "rope_theta": 500.0}
LAYER_NORM = {k: v for k, v in METADATA.items() if "rms" not in k and "head_count_kv" not in k}


def llama_layout(name: str, tensor: Tensor) -> Tensor:
    if ".q_proj." in name:
        return permute(tensor, 4)
    return permute(tensor, 2) if ".k_proj." in name else tensor


def gemma_layout(name: str, tensor: Tensor) -> Tensor:
    return tensor + 1.0 if name.endswith("norm.weight") else tensor


def gpt2_layout(name: str, tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if ".c_" in name and tensor.dim() == 2 else tensor


def neox_layout(name: str, tensor: Tensor) -> Tensor:
    return split_qkv(tensor, 4) if ".query_key_value." in name else tensor


def llama3_divisors(head_dim: int, base: float, low: float, high: float, old: int) -> Tensor:
    """Return what llama.cpp's converter stores for factor 8 (generate_extra_tensors)."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (i / head_dim)
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(8.0)
        else:
            smooth = (old / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return torch.tensor(divisors)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_METADATA = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0,
                 ".rope.scaling.original_context_length": 16}  # fmt: skip
SHORT, LONG = [1.0, 1.2, 1.5, 1.7, 2.0, 2.1], [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]

FAMILIES = {
    "llama3": Family(
        "llama", "llama", COMMON | {"rope_scaling": LLAMA3, "tie_word_embeddings": True},
        METADATA | {".rope.dimension_count": 16}, llama_layout,
        {"rope_freqs.weight": llama3_divisors(16, 500.0, 1.0, 4.0, 32)},
    ),
    "llama with biases": Family(
        "llama", "llama",
        COMMON | {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "rope_scaling": YARN},
        METADATA | YARN_METADATA | {".attention.key_length": 24, ".attention.value_length": 24},
        llama_layout,
    ),
    "llama linear": Family(
        "llama", "llama", COMMON | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        METADATA | {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0}, llama_layout,
    ),
    "mistral": Family(
        "llama", "mistral", COMMON | {"sliding_window": 5},
        METADATA | {".attention.sliding_window": 5}, llama_layout,
    ),
    "qwen2": Family(
        "qwen2", "qwen2", COMMON | {"rope_scaling": YARN, "tie_word_embeddings": True},
        METADATA | YARN_METADATA,
    ),
    "qwen3": Family(
        "qwen3", "qwen3", COMMON | {"head_dim": 24},
        METADATA | {".attention.key_length": 24, ".attention.value_length": 24},
    ),
    "gemma2": Family(
        "gemma2", "gemma2",
        COMMON | {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 5,
                  "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        METADATA | {".attention.key_length": 24, ".attention.value_length": 24,
                    ".attention.sliding_window": 5, ".attn_logit_softcapping": 3.0,
                    ".final_logit_softcapping": 5.0},
        gemma_layout,
    ),
    "gemma3": Family(
        "gemma3", "gemma3_text",
        COMMON | {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 5,
                  "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                  "rope_local_base_freq": 10000.0,
                  "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]},
        METADATA | {".attention.key_length": 24, ".attention.value_length": 24, ".block_count": 7,
                    ".attention.sliding_window": 5, ".rope.scaling.type": "linear",
                    ".rope.scaling.factor": 8.0},
        gemma_layout,
    ),
    "phi3 longrope": Family(
        "phi3", "phi3",
        COMMON | {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
                  "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75,
                  "sliding_window": 5, "num_key_value_heads": 4},
        METADATA | {".rope.dimension_count": 12, ".rope.scaling.original_context_length": 16,
                    ".rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(16)),
                    ".attention.sliding_window": 5, ".attention.head_count_kv": 4},
        extra={"rope_factors_long.weight": torch.tensor(LONG),
               "rope_factors_short.weight": torch.tensor(SHORT)},
    ),
    "phi3 plain": Family(
        "phi3", "phi3", COMMON | {"sliding_window": None, "tie_word_embeddings": True},
        METADATA | {".rope.dimension_count": 16, ".attention.sliding_window": 0},
    ),
    "gpt2": Family(
        "gpt2", "gpt2",
        {"vocab_size": 96, "n_embd": 64, "n_inner": 80, "n_layer": 4, "n_head": 4,
         "n_positions": 64, "layer_norm_epsilon": 1e-4, "bos_token_id": 1, "eos_token_id": 2},
        LAYER_NORM | {".attention.layer_norm_epsilon": 1e-4}, gpt2_layout,
    ),
    "gptneox": Family(
        "gptneox", "gpt_neox",
        {**SIZES, "layer_norm_eps": 1e-4, "rotary_pct": 0.25, "rotary_emb_base": 10000,
         "use_parallel_residual": True, "hidden_act": "gelu"},
        {k: v for k, v in LAYER_NORM.items() if "freq_base" not in k}
        | {".attention.layer_norm_epsilon": 1e-4, ".use_parallel_residual": True,
           ".rope.dimension_count": 4},
        neox_layout,
    ),
    "gptneox serial": Family(
        "gptneox", "gpt_neox",
        {**SIZES, "layer_norm_eps": 1e-4, "rotary_pct": 1.0, "rotary_emb_base": 500,
         "use_parallel_residual": False, "tie_word_embeddings": True},
        LAYER_NORM | {".attention.layer_norm_epsilon": 1e-4, ".use_parallel_residual": False,
                      ".rope.dimension_count": 16},
        neox_layout,
    ),
}  # fmt: skip


def build(model_type: str, config: Config) -> Any:
    # A copy: transformers writes into the dictionaries it is given.
    settings = {k: deepcopy(v) for k, v in config.items() if k not in ("model_type", "dtype")}
    hf_config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    return model.float().eval()


def original(family: Family) -> tuple[Any, dict[str, Tensor]]:
    """Return a model whose every weight matters, and its state without a tied head."""
    torch.manual_seed(0)
    model = build(family.model_type, family.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.2
            parameter.add_(torch.randn_like(parameter) * spread)
            assert parameter.abs().sum() > 0, name
    state = dict(model.named_parameters())  # a tied head is not listed twice
    return model, {name: tensor.detach() for name, tensor in state.items()}


def write(family: Family, state: Mapping[str, Tensor], path: Path, **metadata: Any) -> Path:
    names = gguf_names(family.architecture, state, family.metadata[".block_count"])
    tensors = {names[name]: family.change(name, tensor) for name, tensor in state.items()}
    return write_gguf(
        path, family.architecture, {**family.metadata, **metadata}, tensors | dict(family.extra)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_family_comes_back_with_the_same_weights_and_logits(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model, state = original(family)
    checkpoint = open_checkpoint(write(family, state, tmp_path / "x.gguf"))
    read = dict(checkpoint.tensors())
    assert read.keys() == checkpoint.infos().keys()
    for key, tensor in read.items():
        assert checkpoint.infos()[key].shape == tuple(tensor.shape)
    if "embed_out.weight" in read:  # files of GPT-NeoX call the head so, transformers no longer
        read["lm_head.weight"] = read.pop("embed_out.weight")
    assert read.keys() == state.keys()
    for key, tensor in read.items():
        torch.testing.assert_close(tensor, state[key], rtol=0, atol=2e-7)
    tied = family.config.get("tie_word_embeddings", model.config.tie_word_embeddings)
    assert checkpoint.config["tie_word_embeddings"] is tied
    again = build(checkpoint.config["model_type"], checkpoint.config)
    missing, unknown = again.load_state_dict(read, strict=False)
    assert unknown == []
    assert set(missing) <= ({"lm_head.weight"} if tied else set())
    again.tie_weights()
    for length in (8, 24):  # within and past windows and original contexts
        tokens = torch.arange(3, 3 + length).unsqueeze(0)
        with torch.no_grad():
            torch.testing.assert_close(
                again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4
            )


def test_every_architecture_is_tested() -> None:
    assert {family.architecture for family in FAMILIES.values()} == set(ARCHITECTURES)


def test_untied_head_is_read_as_the_head(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    _, state = original(family)
    assert "lm_head.weight" in state
    checkpoint = open_checkpoint(write(family, state, tmp_path / "x.gguf"))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(dict(checkpoint.tensors())["lm_head.weight"], state["lm_head.weight"])


def test_writing_to_tensors_leaves_the_file_alone(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    _, state = original(family)
    path = write(family, state, tmp_path / "x.gguf")
    before = path.read_bytes()
    for _, tensor in open_checkpoint(path).tensors():
        tensor.zero_()
    assert path.read_bytes() == before


def test_configuration_is_that_of_the_original(tmp_path: Path) -> None:
    family = FAMILIES["gemma3"]
    _, state = original(family)
    config, generation = read_configs(write(family, state, tmp_path / "x.gguf"))
    for key, value in family.config.items():
        assert config[key] == value, key
    assert config["dtype"] == "float32"
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}


def test_end_tokens_are_those_named_and_those_the_template_ends_turns_with(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    _, state = original(family)
    tokens = [f"t{n}" for n in range(96)]
    types = [1] * 96
    for token_id, token in ((7, "<|im_end|>"), (8, "<|end|>"), (9, "<|eot_id|>")):
        tokens[token_id], types[token_id] = token, 3
    types[9] = 1  # ordinary text that only looks so
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_template": "{{ m }}<|im_end|><|eot_id|>",
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
    }
    _, generation = read_configs(write(family, state, tmp_path / "x.gguf", **extra))
    assert generation["eos_token_id"] == [2, 5, 7]
    assert (generation["temperature"], generation["top_k"]) == (0.7, 20)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({".block_count": 5}, "qwen3.block_count is 5, but the file has tensors of 4 blocks"),
        ({".block_count": 2**31}, "block_count is 2147483648; it must be a whole number"),
        ({".attention.head_count": 0}, "head_count is 0; it must be a whole number from 1"),
        ({".attention.head_count": "four"}, "head_count is 'four'"),
        ({".attention.head_count_kv": [2, 2, 1, 2]}, "head_count_kv is 4 values"),
        ({".attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan"),
        ({".rope.freq_base": -1.0}, "freq_base is -1.0"),
        ({".rope.scaling.type": "ntk"}, "'ntk'; known here: none, linear, yarn"),
        ({".expert_count": 8}, "mixture of experts"),
        ({".attention.key_length": 24, ".attention.value_length": 16}, "needs all three equal"),
        ({"tokenizer.ggml.eos_token_id": 96}, "eos_token_id is 96.*token id from 0 to 95"),
        ({"tokenizer.chat_template": 3}, "chat_template is 3; it must be a string"),
        ({"tokenizer.chat_template": True}, "chat_template is True; it must be a string"),
        ({"tokenizer.ggml.tokens": 3}, "tokens is 3; it must be an array"),
        ({"tokenizer.ggml.token_type": "x"}, "token_type is 'x'; it must be an array"),
    ],
)
def test_impossible_metadata_is_refused_with_key_value_and_range(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    family = FAMILIES["qwen3"]
    _, state = original(family)
    path = write(family, state, tmp_path / "x.gguf", **change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_missing_key_is_refused_by_name(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    _, state = original(family)
    left = {k: v for k, v in family.metadata.items() if k != ".embedding_length"}
    names = gguf_names("qwen3", state, 4)
    path = write_gguf(tmp_path / "x.gguf", "qwen3", left, {names[n]: t for n, t in state.items()})
    with pytest.raises(CheckpointError, match=r"lacks the metadata qwen3\.embedding_length"):
        open_checkpoint(path)


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "mamba", {".block_count": 1}, {})
    with pytest.raises(CheckpointError, match="'mamba'.*gemma2, gemma3, gpt2, gptneox, llama"):
        open_checkpoint(path)


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    _, state = original(family)
    path = write(
        Family(**{**vars(family), "extra": {"blk.0.surprise.weight": torch.ones(2)}}),
        state,
        tmp_path / "x.gguf",
    )
    with pytest.raises(CheckpointError, match=r"1 tensors.*blk\.0\.surprise\.weight"):
        open_checkpoint(path)


def test_missing_embedding_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "x.gguf",
        "llama",
        METADATA | {".block_count": 1},
        {"blk.0.a.weight": torch.ones(2)},
    )
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'token_embd\.weight'"):
        open_checkpoint(path)


def test_unread_quantization_is_refused_by_tensor_and_type(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    _, state = original(family)
    names = gguf_names("qwen3", state, 4)
    path = write_gguf(
        tmp_path / "x.gguf", "qwen3", family.metadata, {names[n]: t for n, t in state.items()},
        quantize={"blk.1.attn_q.weight": "MXFP4"},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.weight.*MXFP4.*reads F32"):
        open_checkpoint(path)


def test_head_count_that_does_not_divide_the_rows_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["llama3"]
    _, state = original(family)
    path = write(family, state, tmp_path / "x.gguf", **{".attention.head_count": 5})
    with pytest.raises(CheckpointError, match=r"attn_q\.weight.*multiple of 10|needs all three"):
        open_checkpoint(path)


def test_pulled_model_is_located_and_has_the_configuration_of_its_family(
    smollm2_gguf: Path,
) -> None:
    assert locate("smollm2-135m-instruct") == smollm2_gguf
    checkpoint = open_checkpoint(smollm2_gguf)
    config = checkpoint.config
    assert (config["model_type"], config["vocab_size"], config["hidden_size"]) == (
        "llama",
        49152,
        576,
    )
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert len(checkpoint.infos()) == 272
    assert checkpoint.infos()["model.layers.29.mlp.down_proj.weight"].dtype == "Q4_1"
