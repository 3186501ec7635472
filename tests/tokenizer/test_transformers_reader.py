"""Folders that only transformers can read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pagemill.errors import CheckpointError, ConfigError
from pagemill.tokenizer import load_tokenizer
from pagemill.tokenizer.decoding import byte_level_alphabet


def _gpt2_folder(folder: Path) -> Path:
    """Write the two files that GPT-2's tokenizer came in, without a tokenizer.json."""
    vocab = {**byte_level_alphabet(), "ab": 256, "<|endoftext|>": 257}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def test_vocabulary_and_merges_are_read_through_transformers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_gpt2_folder(tmp_path))
    assert tokenizer.encode("abc<|endoftext|>") == [256, ord("c"), 257]
    assert tokenizer.eos_token_id == 257
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'pip install "pagemill\[transformers\]"'):
        load_tokenizer(_gpt2_folder(tmp_path))


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path)
