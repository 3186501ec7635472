"""Saved tiny models, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pagemill.checkpoint import open_checkpoint
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import load_model
from tests.models.tiny import TINY, Tiny, model_config, save_tiny

Pair = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return a function from a name in TINY to (saved folder, transformers' model)."""
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, save_tiny(TINY[name], folder))
        return made[name]

    return pair


def load(folder: Path, **changes: object) -> DecoderLM:
    """Load a folder the way the worker does."""
    checkpoint = open_checkpoint(folder)
    config = model_config(checkpoint.config, **changes)
    return load_model(config, device=torch.device("cpu"), checkpoint=checkpoint)


def save_and_load(tiny: Tiny, folder: Path) -> tuple[DecoderLM, PreTrainedModel]:
    """Return our model and transformers' of one recipe."""
    theirs = save_tiny(tiny, folder)
    return load(folder), theirs
