"""GGUF metadata to the keys of config.json and generation_config.json.

Owns `ARCHITECTURES`: one entry for each architecture that is read, with its tensor names. Called by the
GGUF checkpoint and, for configuration alone, by `read_configs`. Keys are those of the GGUF
specification and of llama.cpp; where llama.cpp fixes a value in its code, the source is beside it.

Rotary frequencies: llama.cpp stores the result of Llama 3's scaling, one divisor a frequency
(`rope_freqs.weight`), not its four parameters. The divisors are handed on unchanged, as kind "longrope"
with equal lists for short and long and no attention scaling: the same formula, exact, and nothing is
guessed back.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.checkpoint import gguf_names
from pagemill.checkpoint.gguf_fields import Fields
from pagemill.checkpoint.gguf_names import Heads, NameTable
from pagemill.checkpoint.gguf_reader import PLAIN_BYTES, GGUFFile, read_gguf
from pagemill.errors import CheckpointError

Config = dict[str, Any]

# Tokens that end a turn in chat templates. Files often name only one end token, the model's first.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_CONTROL = 3  # token type of control tokens

_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: the tensors' names, and what its config.json has beyond the common keys."""

    names: NameTable
    read_config: Callable[[Fields], Config]


def read_gguf_configs(path: Path) -> tuple[Config, Config]:
    """Return (config, generation_config) of a .gguf file."""
    return make_configs(read_gguf(path))


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the entry of a file's architecture; an unknown one lists the known ones."""
    name = file.metadata.get("general.architecture")
    entry = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if entry is None:
        raise CheckpointError(
            f"{file.path} has the GGUF architecture {name!r}, which pagemill does not read; known: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return entry


def make_configs(file: GGUFFile) -> tuple[Config, Config]:
    """Return (config, generation_config) of an opened file."""
    entry = architecture_of(file)
    fields = Fields(file)
    _check_blocks(fields)
    vocab_size = fields.rows("token_embd.weight")
    config: Config = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **entry.read_config(fields),
    }
    types = _block_types(file, entry.names, heads_of(config))
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    bos = fields.token_id("tokenizer.ggml.bos_token_id", vocab_size)
    pad = fields.token_id("tokenizer.ggml.padding_token_id", vocab_size)
    ends = _end_token_ids(fields, vocab_size)
    tokens = {"bos_token_id": bos, "eos_token_id": ends[0] if ends else None, "pad_token_id": pad}
    generation: Config = {key: value for key, value in tokens.items() if value is not None}
    if ends:
        generation["eos_token_id"] = ends
    for key, name in _SAMPLING_KEYS.items():
        value = fields.number(key)
        if value is not None:
            generation[name] = value
    return config | tokens, generation


def _block_types(file: GGUFFile, names: NameTable, heads: Heads) -> dict[str, str]:
    """Return the types of the matrices whose numbers lie in blocks, by module of Hugging Face's."""
    return {
        entry.name.removesuffix(".weight"): tensor.type_name
        for entry in gguf_names.rename(file, names, heads)
        for tensor in [file.tensors[entry.source]]
        if len(tensor.shape) == 2 and tensor.type_name not in PLAIN_BYTES
    }


def heads_of(config: Mapping[str, Any]) -> Heads:
    """Return the numbers of heads in a config that `make_configs` made."""
    query = config.get("num_attention_heads") or config["n_head"]
    return Heads(query, config.get("num_key_value_heads") or query)


def _check_blocks(fields: Fields) -> None:
    """Compare block_count with the tensors, before anything is built by it."""
    count = fields.size("block_count")
    numbers = {name.split(".")[1] for name in fields.file.tensors if name.startswith("blk.")}
    if numbers != {str(number) for number in range(min(count, len(numbers) + 1))}:
        raise CheckpointError(
            f"{fields.file.path}: {fields.key('block_count')} is {count}, but the file has tensors of "
            f"{len(numbers)} blocks"
        )


def _dtype(file: GGUFFile) -> str:
    """Return the dtype to compute in: that of the matrices, bfloat16 when they are quantized."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + math.prod(tensor.shape)
    largest = max(sizes, key=lambda name: sizes[name], default="F32")
    return {"F32": "float32", "F16": "float16"}.get(largest, "bfloat16")


def _end_token_ids(fields: Fields, vocab_size: int) -> list[int]:
    """Return the end tokens the file names, then those with which its chat template ends a turn."""
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        token_id = fields.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size)
        if token_id is not None:
            ids.append(token_id)
    template = fields.of_kind("tokenizer.chat_template", str) or ""
    tokens = fields.of_kind("tokenizer.ggml.tokens", list) or []
    types = fields.of_kind("tokenizer.ggml.token_type", list, array) or []
    for text in _TURN_ENDS:
        if text in template and text in tokens:
            token_id = tokens.index(text)
            if token_id < min(len(types), vocab_size) and types[token_id] == _CONTROL:
                ids.append(token_id)
    return list(dict.fromkeys(ids))


# ---------------------------------------------------------------- parts that architectures share


def _decoder(fields: Fields, model_type: str, class_name: str) -> Config:
    """Return the keys of every decoder with rotary positions and RMSNorm."""
    if fields.whole("expert_count", 0):
        raise CheckpointError(
            f"{fields.file.path} is a mixture of experts ({fields.key('expert_count')} is "
            f"{fields.whole('expert_count', 0)}); this version reads dense models only"
        )
    num_heads = fields.size("attention.head_count")
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": fields.size("embedding_length"),
        "num_hidden_layers": fields.size("block_count"),
        "intermediate_size": fields.size("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", num_heads),
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
    }


def _per_head(fields: Fields) -> int:
    """Return the size of a head where the embedding is divided among the heads."""
    hidden, num_heads = fields.size("embedding_length"), fields.size("attention.head_count")
    if hidden % num_heads:
        raise CheckpointError(
            f"{fields.file.path}: {fields.key('embedding_length')} is {hidden}, no multiple of the "
            f"{num_heads} heads"
        )
    return hidden // num_heads


def _head_dim(fields: Fields, config: Config) -> int:
    """Return the size of a head, for keys and values alike; all of it must be rotated."""
    size = fields.size(
        "attention.key_length", config["hidden_size"] // config["num_attention_heads"]
    )
    value_size = fields.size("attention.value_length", size)
    rotated = fields.size("rope.dimension_count", size)
    if (value_size, rotated) != (size, size):
        raise CheckpointError(
            f"{fields.file.path}: keys have {size} elements a head, values {value_size}, and {rotated} "
            f"are rotated; {config['model_type']} needs all three equal"
        )
    return size


def _rope_scaling(fields: Fields, rotated: int) -> Config | None:
    """Return rope_scaling from the scaling keys or the stored divisors, or None."""
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.real("rope.scaling.factor", 1.0)
    if kind == "none" and fields.has("rope.scale_linear"):  # how old files say it
        kind, factor = "linear", fields.real("rope.scale_linear")
    divisors = fields.floats("rope_freqs.weight", rotated // 2)
    if divisors is not None and any(value != 1.0 for value in divisors):
        if kind != "none":
            raise CheckpointError(
                f"{fields.file.path} has both rope_freqs.weight and {fields.key('rope.scaling.type')} "
                f"{kind!r}; only one can be applied"
            )
        context = fields.size("context_length")
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(fields, factor)
    raise CheckpointError(
        f"{fields.file.path}: {fields.key('rope.scaling.type')} is {kind!r}; known here: none, linear, "
        "yarn"
    )


def _yarn(fields: Fields, factor: float) -> Config:
    """Return YaRN's parameters; llama.cpp's attention factor multiplies 1 + 0.1 ln(factor)."""
    scaling: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if fields.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = fields.real(f"rope.scaling.yarn_{name}")
    attention = fields.real("rope.scaling.yarn_attn_factor", 1.0)
    attention *= fields.real("rope.scaling.attn_factor", 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _layer_types(num_layers: int, period: int) -> list[str]:
    """Return a sliding window in all layers but each `period`-th."""
    return [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(num_layers)
    ]


# ---------------------------------------------------------------- architectures


def _llama(fields: Fields) -> Config:
    """Llama, and Mistral: one GGUF architecture, told apart by the window."""
    window = fields.whole("attention.sliding_window", 0)
    config = (
        _decoder(fields, "mistral", "MistralForCausalLM") | {"sliding_window": window}
        if window
        else _decoder(fields, "llama", "LlamaForCausalLM")
    )
    head_dim = _head_dim(fields, config)
    return config | {
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in fields.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in fields.file.tensors,
        "rope_scaling": _rope_scaling(fields, head_dim),
    }


def _qwen2(fields: Fields) -> Config:
    config = _decoder(fields, "qwen2", "Qwen2ForCausalLM")
    head_dim = _head_dim(fields, config)
    return config | {
        "head_dim": head_dim,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_scaling": _rope_scaling(fields, head_dim),
    }


def _qwen3(fields: Fields) -> Config:
    config = _decoder(fields, "qwen3", "Qwen3ForCausalLM")
    head_dim = _head_dim(fields, config)
    return config | {
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in fields.file.tensors,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_scaling": _rope_scaling(fields, head_dim),
    }


def _gemma(fields: Fields, config: Config, blocks_of_27b: int) -> Config:
    """Return what Gemma 2 and 3 share. The scale is not stored: llama.cpp knows it by size."""
    head_dim = _head_dim(fields, config)
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": (
            per_head if config["num_hidden_layers"] == blocks_of_27b else head_dim
        ),
        "rope_scaling": _rope_scaling(fields, head_dim),
    }


def _gemma2(fields: Fields) -> Config:
    """Defaults as in llama.cpp's loader (llama-model.cpp, LLM_ARCH_GEMMA2)."""
    config = _gemma(fields, _decoder(fields, "gemma2", "Gemma2ForCausalLM"), blocks_of_27b=46)
    return config | {
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "layer_types": _layer_types(config["num_hidden_layers"], 2),
        "attn_logit_softcapping": fields.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.real("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: Fields) -> Config:
    """Text part. Without a window every layer is full (llama-model.cpp, LLM_ARCH_GEMMA3)."""
    config = _gemma(fields, _decoder(fields, "gemma3_text", "Gemma3ForCausalLM"), blocks_of_27b=62)
    num_layers = config["num_hidden_layers"]
    window = fields.whole("attention.sliding_window", 0)
    pattern = fields.flags("attention.sliding_window_pattern", num_layers)
    if pattern is not None:
        types = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    else:
        types = _layer_types(num_layers, fields.size("attention.sliding_window_pattern", 6))
    capping = {
        f"{name}_logit_softcapping": fields.real(f"{name}_logit_softcapping")
        if fields.has(f"{name}_logit_softcapping")
        else None
        for name in ("attn", "final")
    }
    return config | {
        # A window no layer uses still has to be a number.
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": types if window else ["full_attention"] * num_layers,
        "rope_local_base_freq": fields.real("rope.freq_base_swa", 10000.0),
        **capping,
    }


def _phi3(fields: Fields) -> Config:
    config = _decoder(fields, "phi3", "Phi3ForCausalLM")
    head_dim = _per_head(fields)
    rotated = fields.size("rope.dimension_count", head_dim)
    context = config["max_position_embeddings"]
    original = fields.size("rope.scaling.original_context_length", context)
    long = fields.floats("rope_factors_long.weight", rotated // 2)
    short = fields.floats("rope_factors_short.weight", rotated // 2)
    if (long is None) != (short is None):
        raise CheckpointError(
            f"{fields.file.path} has only one of rope_factors_long.weight and rope_factors_short.weight"
        )
    scaling: Config | None = None
    if long is not None:
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        attention = fields.real("rope.scaling.attn_factor", 0.0, minimum=0.0)
        if attention and not math.isclose(
            attention, _longrope_attention(context, original), rel_tol=1e-5
        ):
            scaling["attention_factor"] = attention
    elif fields.text("rope.scaling.type", "none") not in ("none", "longrope"):
        scaling = _rope_scaling(fields, rotated)
    return config | {
        "hidden_act": "silu",
        "sliding_window": fields.whole("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotated / head_dim,
        "rope_scaling": scaling,
    }


def _longrope_attention(context: int, original: int) -> float:
    """Return LongRoPE's own attention factor; a file that stores it in float32 loses digits."""
    if context <= original or original < 2:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def _gpt2(fields: Fields) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": fields.size("embedding_length"),
        "n_layer": fields.size("block_count"),
        "n_head": fields.size("attention.head_count"),
        "n_inner": fields.size("feed_forward_length"),
        "n_positions": fields.size("context_length"),
        "layer_norm_epsilon": fields.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _gptneox(fields: Fields) -> Config:
    head_dim = _per_head(fields)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": fields.size("embedding_length"),
        "num_hidden_layers": fields.size("block_count"),
        "intermediate_size": fields.size("feed_forward_length"),
        "num_attention_heads": fields.size("attention.head_count"),
        "max_position_embeddings": fields.size("context_length"),
        "layer_norm_eps": fields.real("attention.layer_norm_epsilon"),
        "use_parallel_residual": fields.flag("use_parallel_residual", True),
        "rotary_pct": fields.size("rope.dimension_count", head_dim) / head_dim,
        "rotary_emb_base": fields.real("rope.freq_base", 10000.0),
        "hidden_act": "gelu",
        "attention_bias": True,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(gguf_names.LLAMA, _llama),
    "qwen2": Architecture(gguf_names.QWEN2, _qwen2),
    "qwen3": Architecture(gguf_names.QWEN3, _qwen3),
    "gemma2": Architecture(gguf_names.GEMMA2, _gemma2),
    "gemma3": Architecture(gguf_names.GEMMA3, _gemma3),
    "phi3": Architecture(gguf_names.PHI3, _phi3),
    "gpt2": Architecture(gguf_names.GPT2, _gpt2),
    "gptneox": Architecture(gguf_names.GPTNEOX, _gptneox),
}
