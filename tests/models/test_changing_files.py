"""Checkpoints read by pieces: the same models, and an error where the file changes meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill import native
from pagemill.checkpoint import open_checkpoint, plain_rows
from pagemill.checkpoint.base import Checkpoint, Stored, TensorInfo
from pagemill.checkpoint.gguf_blocks import BlockTensor
from pagemill.checkpoint.plain_rows import PlainRows
from pagemill.errors import CheckpointError
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import load_model
from pagemill.quant import base, code_sources, waiting
from tests.checkpoint.test_gguf_files import FAMILIES, original
from tests.models.driver import prompt_logits
from tests.models.tiny import model_config
from tests.quant.test_gguf import KINDS, write_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
DENSE = [
    "torch",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(native.extension() is None, reason="pagemill._C is not built"),
    ),
]
GGUF_KINDS = {"llama3": KINDS["llama3"], "gptneox": KINDS["gptneox"], "gpt2": {}, "qwen3": {}}


def load(checkpoint: Checkpoint, dense: str, quantization: str | None) -> DecoderLM:
    if quantization == "gguf" and "types" not in str(checkpoint.config):
        quantization = None
    config = model_config(checkpoint.config, quantization=quantization, dtype="bfloat16")
    return load_model(config, device=torch.device("cpu"), checkpoint=checkpoint, dense=dense)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which every matrix of a file is read a few rows at a time."""

    def begin() -> None:
        monkeypatch.setattr(plain_rows, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(plain_rows, "_OWN_PAGES_BYTES", 1)
        for module in (waiting, base, code_sources):
            monkeypatch.setattr(module, "_SLICE_ELEMENTS", 512)
        monkeypatch.setattr(waiting, "_READ_ELEMENTS", 512)

    return begin


@pytest.fixture
def checkpoint_file(tiny_pair: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function from the name of a tiny model to a file of its own: folder's or .gguf."""

    def make(name: str) -> Path:
        if name in GGUF_KINDS:
            _, state = original(FAMILIES[name])
            return write_model(tmp_path / "x.gguf", name, state, GGUF_KINDS[name])
        shutil.copytree(tiny_pair(name)[0], tmp_path / name)
        return tmp_path / name / "model.safetensors"

    return make


def opened(file: Path) -> Checkpoint:
    return open_checkpoint(file if file.suffix == ".gguf" else file.parent)


class Watched:
    """A checkpoint that does something after its first large matrix was handed out."""

    def __init__(self, inner: Checkpoint, act: Callable[[], None]) -> None:
        self.path, self.format = inner.path, inner.format
        self.config, self.generation_config = inner.config, inner.generation_config
        self._inner, self._act = inner, act

    def infos(self) -> dict[str, TensorInfo]:
        return self._inner.infos()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        done = False
        for name, stored in self._inner.tensors():
            yield name, stored
            if not done and isinstance(stored, (PlainRows, BlockTensor)):
                self._act()
                done = True
        assert done, "the checkpoint has no matrix that is read by pieces"


@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gpt_neox", "phi3", *GGUF_KINDS])
def test_a_model_read_by_pieces_is_the_one_that_was_read_whole(
    name: str, dense: str, checkpoint_file: Any, in_pieces: Any
) -> None:
    file = checkpoint_file(name)
    expected = prompt_logits(load(opened(file), dense, "gguf"), PROMPT)
    in_pieces()
    pieces = opened(file)
    kinds = {type(stored) for _, stored in pieces.tensors()}
    assert kinds & {PlainRows, BlockTensor}
    assert torch.equal(prompt_logits(load(pieces, dense, "gguf"), PROMPT), expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gpt_neox", "phi3", *GGUF_KINDS])
def test_a_model_rounded_by_pieces_is_the_one_that_was_rounded_whole(
    name: str, quantization: str, checkpoint_file: Any, in_pieces: Any
) -> None:
    file = checkpoint_file(name)
    expected = prompt_logits(load(opened(file), "torch", quantization), PROMPT)
    in_pieces()
    assert torch.equal(prompt_logits(load(opened(file), "torch", quantization), PROMPT), expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-tied", "llama3"])
def test_a_file_that_is_cut_while_it_is_rounded_is_an_error_of_the_file(
    name: str, quantization: str, checkpoint_file: Any, in_pieces: Any
) -> None:
    in_pieces()
    file = checkpoint_file(name)
    size = file.stat().st_size
    with pytest.raises(CheckpointError, match=f"{file.name} changed .* had {size} bytes and has"):
        load(Watched(opened(file), lambda: os.truncate(file, size // 3)), "torch", quantization)


@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("name", ["llama-tied", "llama3", "qwen3"])
def test_a_file_that_another_thread_cuts_while_it_is_loaded_is_an_error(
    name: str, dense: str, checkpoint_file: Any, in_pieces: Any
) -> None:
    in_pieces()
    file = checkpoint_file(name)
    size = file.stat().st_size

    def cut() -> None:
        thread = threading.Thread(target=os.truncate, args=(file, size // 3))
        thread.start()
        thread.join()

    with pytest.raises(CheckpointError, match=f"{file.name} changed .* had {size} bytes and has"):
        load(Watched(opened(file), cut), dense, "gguf")


@pytest.mark.parametrize("name", ["llama-tied", "llama3"])
def test_a_file_that_is_written_to_between_its_check_and_its_reading_is_an_error(
    name: str, checkpoint_file: Any
) -> None:
    file = checkpoint_file(name)
    checkpoint = opened(file)
    raw = file.read_bytes()
    os.utime(file, ns=(1, 1))
    file.write_bytes(raw[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="it was written to. Load it again"):
        load(checkpoint, "torch", "gguf")
