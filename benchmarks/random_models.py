"""Models with random weights in the shapes of real ones, in every form that an engine loads.

Speed depends on shapes alone, so that nothing has to be fetched. Files are made once, under the cache
folder: a Hugging Face folder in bfloat16 first, and from it .gguf files (`benchmarks.gguf_writer`, then
llama.cpp's own quantizer) and OpenVINO's exports (optimum's command, in OpenVINO's virtual environment).
Called by `benchmarks.peers`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gguf_writer
from benchmarks.engines import FOLDER, GGUF, EngineKind
from benchmarks.engines.process import ROOT, python_of
from pagemill import env

_COMMON = {
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, **_COMMON,
    },
    "llama-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0,
            "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        },
        **_COMMON,
    },
}  # fmt: skip
_NUM_MERGED_FILES = 250  # of the standard library, to train a tokenizer on


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model asks of the machine, in bfloat16."""

    weight_bytes: int  # read by every decode step: the tied embedding once, as the head
    linear_flops_per_token: (
        float  # products and sums that a prompt's token needs, without attention and head
    )
    kv_bytes_per_token: int


def sizes(folder: Path) -> Sizes:
    """Return the sizes of a llama-like model; norms, a few thousandths, are left out."""
    config = json.loads((folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    qkv = hidden * (queries + 2 * keys)
    after = hidden * queries + 3 * hidden * config["intermediate_size"]
    linear = layers * (qkv + after)
    return Sizes(
        weight_bytes=2 * (linear + hidden * config["vocab_size"]),
        # Nobody needs what follows the last layer's attention, but of a prompt's last token.
        linear_flops_per_token=2.0 * (linear - after),
        kv_bytes_per_token=2 * 2 * keys * layers,
    )


def model_folder(name: str) -> Path:
    """Return the Hugging Face folder of a shape, made now if it is not there."""
    folder = env.cache_dir() / "benchmarks" / f"{name}-random"
    if not folder.is_dir():
        partial = _partial(folder)
        shutil.rmtree(partial, ignore_errors=True)
        write_folder(SHAPES[name], partial)
        partial.rename(folder)
    return folder


def form_of(name: str, kind: EngineKind, weights: str, venvs: Path) -> Path:
    """Return a model in the form and weight format that an engine loads, made now if it is not there.

    Raises subprocess.CalledProcessError, after the tool's own words, where a tool of the engine fails.
    """
    folder = model_folder(name)
    if kind.form == FOLDER:
        return folder
    plain = folder.with_name(f"{folder.name}-BF16.gguf")
    if kind.form == GGUF and not plain.exists():
        partial = _partial(plain)
        gguf_writer.write(folder, partial)
        partial.rename(plain)
    target = folder.with_name(
        f"{folder.name}-{weights}" + (".gguf" if kind.form == GGUF else "-openvino")
    )
    if target.exists():
        return target
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    python = python_of(venvs, kind.venv)
    assert python is not None, "the caller looks for the engine first"
    if kind.form == GGUF:
        command = [python, "-m", "benchmarks.engines.llamacpp", str(plain), str(partial), weights]
    else:
        command = [
            str(Path(python).with_name("optimum-cli")), "export", "openvino", "--model", str(folder),
            "--task", "text-generation-with-past", "--weight-format", weights, str(partial),
        ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    partial.rename(target)
    return target


def _partial(target: Path) -> Path:
    """Return the name that a file or folder has until it is whole."""
    return target.with_name(f"{target.name}.partial")


def write_folder(shape: dict[str, Any], folder: Path) -> None:
    """Write random weights, and a byte-pair tokenizer trained on Python's own library."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_NUM_MERGED_FILES]
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(text) for text in texts], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
