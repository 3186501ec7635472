"""Tensor names of GGUF to Hugging Face's, and the layout changes that converters made, undone.

Owns one `NameTable` an architecture. Names are those of llama.cpp's TENSOR_NAMES; the changes those of
its convert_hf_to_gguf.py. Called by `gguf_config`, which lists the architectures, and by the GGUF
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagemill.checkpoint.gguf_reader import GGUFFile
from pagemill.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of attention heads, for what depends on them."""

    query: int
    kv: int


Undo = Callable[["Tensor", Heads], "Tensor"]


@dataclass(frozen=True, slots=True)
class NameTable:
    """How one architecture's tensors are called and stored, without their ".weight" or ".bias"."""

    top: Mapping[str, str]
    block_prefix: str
    block: Mapping[str, str]
    undo: Mapping[str, Undo] = field(default_factory=dict)  # by GGUF name
    settings: frozenset[str] = frozenset()  # tensors that carry configuration, whole names


@dataclass(frozen=True, slots=True)
class Renamed:
    """One tensor of a file under its Hugging Face name."""

    name: str
    source: str  # in the file
    shape: tuple[int, ...]  # after `undo`
    undo: Undo | None


def unpermute_query(weight: Tensor, heads: Heads) -> Tensor:
    """Undo llama.cpp's order of rotary pairs in q [heads * head_dim, ...]: interleaved to halves."""
    return _unpermute(weight, heads.query)


def unpermute_key(weight: Tensor, heads: Heads) -> Tensor:
    """Undo llama.cpp's order of rotary pairs in k [kv_heads * head_dim, ...]."""
    return _unpermute(weight, heads.kv)


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    rows, *rest = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return pairs.transpose(1, 2).reshape(weight.shape)


def transpose(weight: Tensor, heads: Heads) -> Tensor:
    """Turn [out, in] back into the [in, out] of GPT-2's Conv1D."""
    return weight.t()


def interleave_qkv(weight: Tensor, heads: Heads) -> Tensor:
    """Turn rows q of all heads, k of all, v of all back into q, k, v head by head (GPT-NeoX)."""
    rows, *rest = weight.shape
    parts = weight.reshape(3, heads.query, rows // (3 * heads.query), *rest)
    return parts.transpose(0, 1).reshape(weight.shape)


def subtract_one(weight: Tensor, heads: Heads) -> Tensor:
    """Turn the stored factor 1 + w of a Gemma norm back into w."""
    return weight - 1.0


# Those that leave whole rows whole: an order of rows, or the transpose.
MATRIX_UNDOS: frozenset[Undo] = frozenset(
    {unpermute_query, unpermute_key, interleave_qkv, transpose}
)
# Rows must divide by this many, given the heads.
_ROW_UNITS: dict[Undo, Callable[[Heads], int]] = {
    unpermute_query: lambda heads: 2 * heads.query,
    unpermute_key: lambda heads: 2 * heads.kv,
    interleave_qkv: lambda heads: 3 * heads.query,
}

_ROPE_FREQS = frozenset({"rope_freqs.weight"})
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SEPARATE_QKV = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

LLAMA = NameTable(
    top=_TOP,
    block_prefix="model.layers",
    block=_PRE_NORMS | _SEPARATE_QKV | _GATED_MLP,
    undo={"attn_q": unpermute_query, "attn_k": unpermute_key},
    settings=_ROPE_FREQS,
)
QWEN2 = NameTable(
    top=_TOP,
    block_prefix="model.layers",
    block=_PRE_NORMS | _SEPARATE_QKV | _GATED_MLP,
    settings=_ROPE_FREQS,
)
QWEN3 = NameTable(
    top=_TOP,
    block_prefix="model.layers",
    block=_PRE_NORMS | _SEPARATE_QKV | _HEAD_NORMS | _GATED_MLP,
    settings=_ROPE_FREQS,
)
GEMMA2 = NameTable(
    top=_TOP,
    block_prefix="model.layers",
    block=_GEMMA_NORMS | _SEPARATE_QKV | _GATED_MLP,
    undo=dict.fromkeys([*_GEMMA_NORMS, "output_norm"], subtract_one),
)
GEMMA3 = NameTable(
    top=_TOP,
    block_prefix="model.layers",
    block=_GEMMA_NORMS | _SEPARATE_QKV | _HEAD_NORMS | _GATED_MLP,
    undo=dict.fromkeys([*_GEMMA_NORMS, *_HEAD_NORMS, "output_norm"], subtract_one),
)
PHI3 = NameTable(
    top=_TOP,
    block_prefix="model.layers",
    block=_PRE_NORMS
    | {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    settings=frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}),
)
GPT2 = NameTable(
    top={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    block_prefix="transformer.h",
    block={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    undo=dict.fromkeys(["attn_qkv", "attn_output", "ffn_up", "ffn_down"], transpose),
)
GPTNEOX = NameTable(
    top={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    block_prefix="gpt_neox.layers",
    block={
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    undo={"attn_qkv": interleave_qkv},
)


def rename(file: GGUFFile, table: NameTable, heads: Heads) -> list[Renamed]:
    """Return the file's tensors under their Hugging Face names; unknown names are listed and refused."""
    renamed, unknown = [], []
    for tensor in file.tensors.values():
        if tensor.name in table.settings:
            continue
        base, _, kind = tensor.name.rpartition(".")
        inside = _BLOCK_TENSOR.fullmatch(base)
        key = inside.group(2) if inside else base
        target = (table.block if inside else table.top).get(key)
        if target is None or kind not in ("weight", "bias"):
            unknown.append(tensor.name)
            continue
        undo = table.undo.get(key)
        if undo is transpose and kind == "bias":
            undo = None
        _check_layout(file, tensor.name, tensor.shape, undo, heads)
        shape = tensor.shape[::-1] if undo is transpose else tensor.shape
        prefix = f"{table.block_prefix}.{inside.group(1)}." if inside else ""
        renamed.append(Renamed(f"{prefix}{target}.{kind}", tensor.name, shape, undo))
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise CheckpointError(
            f"{file.path} has {len(unknown)} tensors that its architecture does not know: "
            f"{', '.join(unknown[:8])}{more}"
        )
    return renamed


def _check_layout(
    file: GGUFFile, name: str, shape: tuple[int, ...], undo: Undo | None, heads: Heads
) -> None:
    if undo is transpose and len(shape) != 2:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has shape {shape}; it must be a matrix"
        )
    unit = _ROW_UNITS[undo](heads) if undo in _ROW_UNITS else 1
    if shape[0] % unit:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has shape {shape}; with {heads.query} heads and {heads.kv} "
            f"for keys its rows must be a multiple of {unit}"
        )
