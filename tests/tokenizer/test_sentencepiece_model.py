"""SentencePiece `.model` files: ids equal the sentencepiece library's."""

from __future__ import annotations

import random
import shutil
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from pagemill.errors import CheckpointError, NotSupportedError
from pagemill.tokenizer import load_tokenizer
from pagemill.tokenizer.sentencepiece_model import read_sentencepiece_model
from tests.tokenizer.samples import random_texts

TEXT = [
    f"the quick brown fox number {n} jumps  over the lazy dog, déjà vu {n * 7}" for n in range(300)
]


def _train(folder: Path, **options: object) -> Path:
    """Train a small model and return its file."""
    defaults: dict[str, object] = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>"],
        "minloglevel": 2,
    }
    prefix = folder / "tokenizer"
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_prefix=str(prefix), **{**defaults, **options}
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("spm"))


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_equal_the_sentencepiece_library(tmp_path: Path, prefix: bool) -> None:
    file = _train(tmp_path, add_dummy_prefix=prefix)
    tokenizer = load_tokenizer(file)
    library = SentencePieceProcessor(model_file=str(file))
    for text in random_texts(random.Random(3), 300):
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text), text


def test_mistrals_vocabulary_equals_the_sentencepiece_library(tmp_path: Path) -> None:
    shutil.copy(
        str(resources.files("mistral_common") / "data" / "tokenizer.model.v1"),
        tmp_path / "tokenizer.model",
    )
    tokenizer = load_tokenizer(tmp_path)
    library = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert (tokenizer.adds_bos, tokenizer.bos_token_id, tokenizer.eos_token_id) == (True, 1, 2)
    for text in random_texts(random.Random(4), 300):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text), text
        decoder = tokenizer.decoder()
        pieces = [p for token_id in ids for p in decoder.push(token_id)]
        joined = "".join(p.text for p in [*pieces, *decoder.flush()] if not p.hidden)
        assert joined == tokenizer.decode(ids)


def test_begin_token_comes_once_and_special_tokens_are_known(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == tokenizer.encode("<s>the fox") == [1, *plain]
    assert tokenizer.special_token_ids == {0, 1, 2}
    tool = tokenizer.token_to_id("<tool>")
    assert tool is not None
    assert tokenizer.encode("<tool>") == [1, tool]
    assert tokenizer.decode([1, tool]) == "<tool>"


def test_settings_beside_the_model_win(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"add_bos_token": false, "eos_token": "<unk>", "chat_template": "t"}'
    )
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.adds_bos
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    assert tokenizer.chat_template == "t"


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 320},
        {"normalization_rule_name": "nfkc"},
        {"remove_extra_whitespaces": True},
    ],
)
def test_other_kinds_are_refused_with_the_way_out(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(NotSupportedError, match=r"pagemill\[transformers\]"):
        load_tokenizer(_train(tmp_path, **options))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_models_raise_nothing_but_checkpoint_errors(
    trained: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(trained.read_bytes()[:600])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.model"
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        read_sentencepiece_model(file)
    except CheckpointError as error:
        assert "damaged.model" in str(error)
