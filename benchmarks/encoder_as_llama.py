"""Writes an encoder's float32 matrices in the places of a Llama's, for packers that take language models only.

    python -m benchmarks.encoder_as_llama ENCODER FOLDER

ENCODER is a folder of all-MiniLM-L6-v2 (or another BERT). What comes out is no language model, but its matrices
are numbers that were never quantized: `tests/data/quantized/make.py` packs them (PACK_MODEL), and
`benchmarks.quality --encoder-llama` says how far each format is from them. The first matrix of the MLP stands in
both places, gate and up.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_PLACES = {
    "self_attn.q_proj": "attention.self.query", "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value", "self_attn.o_proj": "attention.output.dense",
    "mlp.gate_proj": "intermediate.dense", "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}  # fmt: skip


def write(encoder: Path, folder: Path) -> None:
    """Write config.json, the weights and the encoder's tokenizer."""
    given = json.loads((encoder / "config.json").read_text())
    weights = load_file(encoder / "model.safetensors")
    hidden, heads, layers = (
        given[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "gelu",
        "vocab_size": given["vocab_size"], "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": given["intermediate_size"], "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": hidden // heads, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "torch_dtype": "float32", "bos_token_id": 101, "eos_token_id": 102,
    }  # fmt: skip
    tensors = {
        "model.embed_tokens.weight": weights["embeddings.word_embeddings.weight"],
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
        for place, source in _PLACES.items():
            matrix = weights[f"encoder.layer.{layer}.{source}.weight"]
            tensors[f"{prefix}.{place}.weight"] = matrix.clone()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(encoder / name, folder / name)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("encoder", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write(arguments.encoder, arguments.folder)


if __name__ == "__main__":
    main()
