"""The .gguf file of a random model holds the bits of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gguf_writer, random_models
from pagemill.checkpoint import open_checkpoint

_SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(random_models.SHAPES))
def test_written_file_is_the_same_model(name: str, tmp_path: Path) -> None:
    folder, target = tmp_path / "folder", tmp_path / "model.gguf"
    random_models.write_folder({**random_models.SHAPES[name], **_SMALL}, folder)
    gguf_writer.write(folder, target)
    original, written = open_checkpoint(folder), open_checkpoint(target)
    weights = dict(original.tensors())
    for key, tensor in written.tensors():
        assert torch.equal(tensor.float(), weights.pop(key).float()), key
    assert set(weights) <= {"lm_head.weight"}
    shared = ("model_type", "num_hidden_layers", "head_dim", "rms_norm_eps", "vocab_size")
    for key in shared:
        assert written.config[key] == pytest.approx(original.config[key]), key
