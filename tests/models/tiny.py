"""Tiny random models of every family, made from transformers' own classes with fixed seeds.

A default initialization is so small that most features of a family would not show in its tokens;
the weights here are drawn larger, and the sizes are odd where a family allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from pagemill.config import ModelConfig
from pagemill.models import MODELS

MAX_LEN = 128


@dataclass(frozen=True)
class Tiny:
    """One tiny model: which class, which configuration, how large its weights."""

    config_class: str
    sizes: dict[str, Any]
    seed: int = 0
    weight_scale: float = 4.0  # times 1 / sqrt(fan in)
    # Small where the head is tied: the model would otherwise repeat the token it just read.
    embedding_scale: float = 1.0


_LLAMA = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

TINY: dict[str, Tiny] = {
    "llama": Tiny(
        "LlamaConfig",
        {
            **_LLAMA,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 10,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-tied": Tiny(
        "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}, embedding_scale=0.15
    ),
    "mistral": Tiny("MistralConfig", {**_LLAMA, "sliding_window": 8, "head_dim": 14}),
    "qwen2": Tiny(
        "Qwen2Config",
        {
            **_LLAMA,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": Tiny("Qwen3Config", {**_LLAMA, "head_dim": 22, "attention_bias": True}),
    "gemma2": Tiny(
        "Gemma2Config",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "head_dim": 14,
            "query_pre_attn_scalar": 40,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 0.5,
        },
        embedding_scale=0.02,
    ),
    "gemma3": Tiny(
        "Gemma3TextConfig",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "head_dim": 14,
            "query_pre_attn_scalar": 40,
            "sliding_window": 8,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        embedding_scale=0.02,
        seed=9,
    ),
    "phi3": Tiny(
        "Phi3Config",
        {
            **_LLAMA,
            "hidden_size": 64,
            "max_position_embeddings": MAX_LEN,
            "original_max_position_embeddings": MAX_LEN,
            "sliding_window": 11,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.3, 1.7, 2.1, 2.5, 3.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            },
        },
    ),
    "gpt2": Tiny(
        "GPT2Config",
        {
            "vocab_size": 151,
            "n_embd": 36,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": MAX_LEN,
            "n_inner": 52,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        embedding_scale=0.15,
    ),
    "opt": Tiny(
        "OPTConfig",
        {
            "vocab_size": 151,
            "hidden_size": 36,
            "ffn_dim": 52,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_LEN,
        },
        embedding_scale=0.15,
    ),
    "opt-post-norm": Tiny(
        "OPTConfig",
        {
            "vocab_size": 151,
            "hidden_size": 36,
            "ffn_dim": 52,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_LEN,
            "word_embed_proj_dim": 28,
            "do_layer_norm_before": False,
        },
        embedding_scale=0.1,
        seed=23,
    ),
    "gpt_neox": Tiny(
        "GPTNeoXConfig",
        {
            "vocab_size": 151,
            "hidden_size": 64,
            "intermediate_size": 100,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_LEN,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt_neox-sequential": Tiny(
        "GPTNeoXConfig",
        {
            "vocab_size": 151,
            "hidden_size": 64,
            "intermediate_size": 100,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_LEN,
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
        },
        embedding_scale=0.15,
    ),
}


def make_tiny(tiny: Tiny) -> transformers.PreTrainedModel:
    """Return transformers' model with larger random weights, in eval mode, with eager attention."""
    config = getattr(transformers, tiny.config_class)(**tiny.sizes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name or "ln_" in name
            if parameter.dim() == 1 and name.endswith("weight"):
                noise = parameter + 0.4 * noise
            elif parameter.dim() == 1:
                # The bias of a last norm favours the same tokens everywhere: it stays small.
                noise = noise * (0.15 if is_norm else 0.5)
            elif "embed" in name or "wte" in name or "wpe" in name:
                noise = noise * tiny.embedding_scale
            else:
                fan_in = parameter.shape[0 if tiny.config_class == "GPT2Config" else 1]
                noise = noise * tiny.weight_scale / fan_in**0.5
            parameter.copy_(noise)
    return model.eval()


def save_tiny(tiny: Tiny, folder: Path, **how: Any) -> transformers.PreTrainedModel:
    """Save the tiny model as a checkpoint folder, and return it."""
    model = make_tiny(tiny)
    model.save_pretrained(folder, **how)
    return model


def model_config(hf_config: dict[str, Any], **changes: Any) -> ModelConfig:
    """Return a settled ModelConfig around a config.json, as `engine.resolve` would make it."""
    values: dict[str, Any] = {
        "model": "tiny",
        "path": "tiny",
        "tokenizer": "tiny",
        "skip_tokenizer_init": True,
        "served_model_name": "tiny",
        "load_format": "safetensors",
        "model_type": hf_config["model_type"],
        "hf_config": hf_config,
        "generation_config": {},
        "dtype": "float32",
        "quantization": None,
        "max_model_len": MAX_LEN,
        "seed": 0,
        "eos_token_ids": (),
        "max_logprobs": 20,
        "logprobs_mode": "raw_logprobs",
        "logits_processors": (),
    }
    values.update(changes)
    if "shape" not in values:
        values["shape"] = MODELS.load(values["model_type"]).read_shape(hf_config)
    return ModelConfig(**values)
