"""What int8 costs in quality: perplexity and KL of logits on a fixed text, and errors of matrices.

    python -m benchmarks.quality_int8 [--model FOLDER] [--matrices FILE.safetensors] [--tokens 2048]

The text is LICENSE.txt as CPython ships it (the PSF licence and its history), the first `--tokens` tokens
after the model's own begin token, if it has one; each is predicted from all before it. The model runs in
bfloat16 and, as the standard of comparison, in float32; KL is that of the float32 distributions to the
others, the mean over tokens. `--matrices` names a file whose float32 matrices were never quantized: the
error of rounding them, and of products with normal numbers, relative to the root mean square.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import smollm2_folder
from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBatch, StepAttention
from pagemill.checkpoint import open_checkpoint
from pagemill.device import DEVICES
from pagemill.engine.resolve import resolve_engine
from pagemill.engine_args import EngineArgs
from pagemill.models.loader import load_model
from pagemill.ops import reference

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 KV cache, bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8 KV cache, float32": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8 weights, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 weights, float32": {"dtype": "float32", "quantization": "int8"},
    "int8 weights and KV cache, bfloat16": {
        "dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8",
    },
}  # fmt: skip
BLOCK_SIZE, CHUNK = 16, 256


def log_probabilities(
    folder: Path, text: str, num_tokens: int, fields: Any
) -> tuple[Tensor, Tensor]:
    """Return float32 log probabilities [tokens - 1, vocab] of each next token, and the tokens."""
    config, tokenizer = resolve_engine(EngineArgs(model=str(folder), **fields))
    assert tokenizer is not None
    ids = torch.tensor(tokenizer.encode(text)[:num_tokens])
    device = DEVICES.load(config.device.device)()
    device.configure(config.device.num_threads)
    model = load_model(
        config.model, device=device.torch_device, checkpoint=open_checkpoint(folder),
        dense=device.dense_weights,
    )  # fmt: skip
    backend, blocks = BACKENDS.load(device.attention_backend)(), -(-len(ids) // BLOCK_SIZE)
    kv = [
        backend.allocate_kv(
            spec, blocks, BLOCK_SIZE, getattr(torch, config.cache.dtype), device.torch_device
        )
        for spec in model.attention_specs
    ]
    rows = []
    for start in range(0, len(ids) - 1, CHUNK):
        positions = torch.arange(start, min(start + CHUNK, len(ids) - 1))
        batch = AttentionBatch(
            query_starts=(0, len(positions)),
            num_computed=(start,),
            block_tables=torch.arange(blocks).view(1, -1),
            slot_mapping=positions,
            block_size=BLOCK_SIZE,
        )
        attend = StepAttention(backend, model.attention_specs, kv, batch)
        rows.append(model.logits(model.forward(ids[positions], positions, attend)).log_softmax(-1))
    return torch.cat(rows), ids


def language_model(folder: Path, num_tokens: int) -> None:
    """Print perplexity and KL of every format."""
    text = (Path(os.__file__).parent / "LICENSE.txt").read_text(encoding="utf-8")
    standard: Tensor | None = None
    for name, fields in FORMATS.items():
        given, ids = log_probabilities(folder, text, num_tokens, fields)
        if standard is None:
            standard = given
            print(
                f"{len(ids)} tokens of LICENSE.txt\n| format | perplexity | KL | best token agrees |"
            )
            print("|---|---|---|---|")
        nats = -given.gather(1, ids[1:].unsqueeze(1)).mean()
        apart = (standard.exp() * (standard - given)).sum(-1).mean()
        agree = (standard.argmax(-1) == given.argmax(-1)).float().mean()
        print(
            f"| {name} | {float(nats.exp()):.3f} | {float(apart):.5f} | {float(agree):.1%} |",
            flush=True,
        )


def matrices(file: Path) -> None:
    """Print the errors of a file's matrices, of weights alone and of products."""
    from safetensors.torch import load_file

    weights, products = [], []
    for name, tensor in sorted(load_file(file).items()):
        if tensor.dim() != 2 or tensor.dtype != torch.float32 or "embedding" in name:
            continue
        codes, scales, _ = reference.int8_codes(tensor)
        weights.append(float((codes * scales - tensor).norm() / tensor.norm()))
        x = torch.randn(64, tensor.shape[1], generator=torch.Generator().manual_seed(0))
        exact = x.double() @ tensor.double().t()
        got = reference.linear_int8(x, codes, scales.squeeze(1)).double()
        products.append(float((got - exact).norm() / exact.norm()))
    print(
        f"{len(weights)} matrices of {file.name}: weights {sum(weights) / len(weights):.4f} "
        f"(most {max(weights):.4f}), products {sum(products) / len(products):.4f} "
        f"(most {max(products):.4f})"
    )


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="folder; default: SmolLM2-135M")
    parser.add_argument("--matrices", type=Path, default=None)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    if arguments.matrices is not None:
        matrices(arguments.matrices)
    language_model(arguments.model or smollm2_folder(), arguments.tokens)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
