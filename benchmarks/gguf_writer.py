"""Writes a Hugging Face folder of bfloat16 or float32 weights as a .gguf file of the same bits.

For random models of the families qwen3 and llama, without a vocabulary: engines are measured on token
ids. Called by `benchmarks.random_models`. The format: GGUF's specification and llama.cpp's names.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

_BF16_FILE = 32  # llama.cpp's number of a file of bfloat16 weights
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write(folder: Path, target: Path) -> None:
    """Write the folder's one safetensors file as a .gguf file."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_name(folder.name)
    writer.add_file_type(_BF16_FILE)
    writer.add_context_length(min(config["max_position_embeddings"], 32768))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = float(config.get("rope_theta") or rope["rope_theta"])
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, theta, head_dim))
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name != "lm_head.weight":  # the embedding again
                _add(writer, config, name, file.get_tensor(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, config: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    """Add one tensor under its other name: norms in float32, matrices as they are."""
    part = name.removesuffix(".weight").split(".", 3)
    if part[1] == "layers":
        target = f"blk.{part[2]}.{_NAMES[part[3]]}.weight"
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        kind = part[3].split(".")[-1]
        if config["model_type"] == "llama" and kind in heads:
            tensor = _interleave(tensor, config[heads[kind]])
    else:
        target = {"embed_tokens": "token_embd", "norm": "output_norm"}[part[1]] + ".weight"
    if tensor.ndim == 1 or tensor.dtype == torch.float32:
        writer.add_tensor(target, tensor.float().numpy())
    else:
        bits = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(target, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of each head in the order of llama.cpp's rotation: pairs side by side."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _llama3_factors(rope: dict[str, Any], theta: float, head_dim: int) -> np.ndarray[Any, Any]:
    """Return what llama.cpp divides each rotary frequency by, [head_dim / 2] float32."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi)
    factors = []
    for i in range(0, head_dim, 2):
        smooth = min(1.0, max(0.0, (turns * theta ** (-i / head_dim) - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)
