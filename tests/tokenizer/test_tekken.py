"""tekken.json: ids equal the mistral-common library's."""

from __future__ import annotations

import base64
import json
import random
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from pagemill.errors import CheckpointError
from pagemill.tokenizer import load_tokenizer
from tests.tokenizer.samples import random_texts


def _file(folder: Path, **changes: Any) -> Path:
    """Write a tekken.json of the 256 bytes, "ab" and "abc" behind 30 special tokens."""
    ranked = [*(bytes([i]) for i in range(256)), b"ab", b"abc", b"not in the vocabulary"]
    content: dict[str, Any] = {
        "config": {
            "pattern": r"\p{L}+|\P{L}",
            "default_vocab_size": 30 + 258,
            "default_num_special_tokens": 30,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(data).decode()}
            for rank, data in enumerate(ranked)
        ],
        **changes,
    }
    file = folder / "tekken.json"
    file.write_text(json.dumps(content))
    return file


def test_ids_are_ranks_behind_the_special_tokens(tmp_path: Path) -> None:
    _file(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 288
    assert tokenizer.encode("abc ab") == [1, 30 + 257, 30 + 32, 30 + 256]
    assert tokenizer.encode("é", add_special_tokens=False) == [30 + 0xC3, 30 + 0xA9]
    assert tokenizer.encode("<s>[INST]ab") == [1, 3, 30 + 256]
    assert tokenizer.decode([1, 3, 30 + 257, 29]) == "abc"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.adds_bos) == (1, 2, True)


def test_listed_special_tokens_take_their_places(tmp_path: Path) -> None:
    listed = [{"rank": 0, "token_str": "<unk>"}, {"rank": 5, "token_str": "[THINK]"}]
    tokenizer = load_tokenizer(_file(tmp_path, special_tokens=listed))
    assert tokenizer.token_to_id("[THINK]") == 5
    assert tokenizer.token_to_id("<SPECIAL_1>") == 1
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {}}, "KeyError: 'default_num_special_tokens'"),
        ({"vocab": []}, "rank 0 of 258 is missing"),
        ({"vocab": [{"rank": 0, "token_bytes": "!"}]}, "not a tekken vocabulary"),
        ({"special_tokens": [{"rank": 99, "token_str": "x"}]}, "IndexError"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tokenizer(_file(tmp_path, **changes))
    assert "tekken.json" in str(caught.value)


def test_real_vocabulary_equals_mistral_common() -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    file = Path(str(resources.files("mistral_common") / "data" / "tekken_240718.json"))
    tokenizer, library = load_tokenizer(file), Tekkenizer.from_file(file)
    for text in random_texts(random.Random(5), 300):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text, bos=False, eos=False), text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
