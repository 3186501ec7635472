"""GGUF files made with the gguf package, from state dictionaries, as llama.cpp's converters make them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ADDERS = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    quantize: Mapping[str, str] | None = None,
    blocks: Mapping[str, tuple[str, Bytes]] | None = None,
) -> Path:
    """Write a file; metadata keys that begin with "." get the architecture's prefix.

    `blocks`: further tensors as types and bytes [rows, bytes of a row], for what the package cannot quantize.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        full = architecture + key if key.startswith(".") else key
        ADDERS[type(value)](writer, full, value)
    for name, tensor in tensors.items():
        values = tensor.detach().to(torch.float32).numpy()
        kind = (quantize or {}).get(name, "F32")
        if kind == "F32":
            writer.add_tensor(name, values)
        else:
            type_id = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(values, type_id)
            writer.add_tensor(name, packed, raw_dtype=type_id)
    for name, (kind, raw) in (blocks or {}).items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put rotary halves into interleaved pairs, as the converter of Llama does."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def split_qkv(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put q, k, v rows of each head behind one another, as the converter of GPT-NeoX does."""
    rest = weight.shape[1:]
    rows = weight.reshape(num_heads, 3, -1, *rest)
    return torch.cat([rows[:, part].reshape(-1, *rest) for part in range(3)])


def gguf_names(
    architecture: str, state: Mapping[str, torch.Tensor], num_blocks: int
) -> dict[str, str]:
    """Return the gguf package's own name of each Hugging Face tensor."""
    (kind,) = (k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, num_blocks)
    found = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in state}
    assert None not in found.values(), found
    return found


def random_bytes(seed: int, count: int) -> Bytes:
    """Return `count` random bytes."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
