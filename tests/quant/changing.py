"""Copies of the quantized checkpoints under tests/data, spoiled on purpose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

CHECKPOINTS = Path(__file__).parents[1] / "data" / "quantized"
Tensors = dict[str, Tensor]


def copied(name: str, to: Path) -> Path:
    """Return a copy of a checkpoint."""
    return Path(shutil.copytree(CHECKPOINTS / name, to / name))


def change_settings(folder: Path, **keys: Any) -> None:
    """Replace keys of the quantization part of config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(keys)
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Replace the tensors by what `change` makes of them."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
