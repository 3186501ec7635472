"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizer.json they came from."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.errors import CheckpointError, NotSupportedError
from pagemill.tokenizer.base import Tokenizer
from pagemill.tokenizer.decoding import byte_level_alphabet
from pagemill.tokenizer.gguf import build_from_metadata
from pagemill.tokenizer.scored_bpe import TokenType, derive_merges
from tests.tokenizer.conftest import RealTokenizer
from tests.tokenizer.samples import random_texts

CONTROL, USER, UNUSED = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED


def _byte_level(**changes: Any) -> dict[str, Any]:
    tokens = [*byte_level_alphabet(), "ab", "abc", "12", "<s>", "</s>", "<tool>", "[PAD0]"]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 259 + [CONTROL, CONTROL, USER, UNUSED],
        "tokenizer.ggml.merges": ["a b", "ab c", "1 2"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in found.items() if value is not None}


WORDS = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "\n", "  ", "   ", "\n\n"]


def _scored(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    scores = [0.0] * 259 + [
        -10.0,
        -11.0,
        -12.0,
        -13.0,
        -2.0,
        -1.0,
        -3.0,
        -4.0,
        -14.0,
        0.0,
        0.0,
        0.0,
    ]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 9 + [USER] * 3,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in found.items() if value is not None}


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


# --- byte-level ----------------------------------------------------------------------------------------


def test_byte_level_merges_and_special_tokens() -> None:
    tokenizer = build_from_metadata(_byte_level(), "x.gguf")
    assert tokenizer.encode("abc</s><tool>") == [257, 260, 261]
    assert not tokenizer.adds_bos
    assert tokenizer.special_token_ids == {259, 260}
    assert tokenizer.decode([257, 260, 261]) == "abc<tool>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (259, 260)
    assert tokenizer.vocab_size == 263


def test_word_rules_cut_differently() -> None:
    assert _pieces(build_from_metadata(_byte_level(), "x"), "12ab") == ["12", "ab"]
    digits = build_from_metadata(_byte_level(pre="smollm"), "x")
    assert _pieces(digits, "12ab") == ["1", "2", "ab"]


def test_unicode_is_composed_where_the_family_does_so() -> None:
    decomposed = "e\u0301"
    assert build_from_metadata(_byte_level(pre="qwen2"), "x").encode(decomposed) == list(
        build_from_metadata(_byte_level(), "x").encode("é")
    )
    assert len(build_from_metadata(_byte_level(), "x").encode(decomposed)) == 3


def test_begin_token_is_the_files_word_else_the_familys() -> None:
    assert build_from_metadata(_byte_level(pre="llama-bpe"), "x").adds_bos
    refused = _byte_level(pre="llama-bpe", add_bos_token=False)
    assert not build_from_metadata(refused, "x").adds_bos
    framed = build_from_metadata(_byte_level(add_bos_token=True, add_eos_token=True), "x")
    assert framed.encode("a") == framed.encode("<s>a") == [259, framed.encode("a")[1], 260]


def test_unknown_word_rule_lists_the_known_ones() -> None:
    with pytest.raises(NotSupportedError, match=r"'bloom' .*known rules: dbrx, .*smollm.*tekken"):
        build_from_metadata(_byte_level(pre="bloom"), "x.gguf")


def test_file_without_a_word_rule_is_read_as_gpt_2_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = build_from_metadata(_byte_level(pre=None), "old.gguf")
    assert "old.gguf does not say how text is cut into words" in caplog.text
    assert _pieces(tokenizer, "12ab") == ["12", "ab"]


# --- SentencePiece -------------------------------------------------------------------------------------


def test_merges_follow_the_scores() -> None:
    assert derive_merges(["a", "b", "c", "ab", "bc", "abc"], [0, 0, 0, -2, -1, -3], [1] * 6) == [
        ("b", "c"),
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
    ]


def test_equal_scores_merge_the_longer_left_part_first() -> None:
    tokens = ["a", "b", "ab", "aab", "aa"]
    assert derive_merges(tokens, [0.0] * 5, [1] * 5) == [
        ("aa", "b"),
        ("a", "ab"),
        ("a", "b"),
        ("a", "a"),
    ]


def test_scored_tokens_with_a_space_prefix() -> None:
    tokenizer = build_from_metadata(_scored(), "x")
    assert tokenizer.adds_bos
    assert _pieces(tokenizer, "abab") == [" ab", "ab"]
    assert _pieces(tokenizer, "é") == [" ", "\ufffd", "\ufffd"]
    for text in ("ab c", " a", "  é\nb", "abc"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_scored_tokens_without_a_space_prefix() -> None:
    tokenizer = build_from_metadata(_scored(add_space_prefix=False), "x")
    assert _pieces(tokenizer, "abab") == ["ab", "ab"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_user_defined_runs_of_spaces_are_taken_whole() -> None:
    tokenizer = build_from_metadata(_scored(add_space_prefix=False), "x")
    assert _pieces(tokenizer, "a    ab") == ["a", "   ", " ab"]
    assert _pieces(tokenizer, "\n\n\n") == ["\n\n", "\n"]


# --- broken files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "has no tokenizer"),
        (_byte_level(tokens=None), "tokens is missing"),
        (_byte_level(tokens="abc"), "tokens is a str, not an array"),
        (_byte_level(tokens=["a", 1]), "no string"),
        (_byte_level(tokens=["a", "b", "a"], token_type=[1, 1, 1]), "has 'a' twice"),
        (_byte_level(token_type=[1, 2]), "one entry for each token"),
        (_byte_level(merges=None), "merges is missing"),
        (_byte_level(merges=["ab"]), "'ab', which is not two tokens"),
        (_byte_level(merges=["a nowhere"]), "merges do not fit the vocabulary"),
        (_byte_level(bos_token_id=263), "bos_token_id is 263; it must be between 0 and 262"),
        (_byte_level(eos_token_id=-1), "eos_token_id is -1"),
        (_byte_level(eos_token_id="x"), "eos_token_id is 'x'"),
        (_scored(scores=None), "scores is missing"),
        (_scored(scores=[1.0]), "271 tokens but 1 scores"),
    ],
)
def test_broken_metadata_is_named(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        build_from_metadata(metadata, "broken.gguf")
    assert "broken.gguf" in str(caught.value) or "vocabulary" in words


def test_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(
        NotSupportedError, match="kind 't5'; kinds that can be rebuilt: gpt2, llama"
    ):
        build_from_metadata(_byte_level(model="t5"), "x.gguf")


def test_chat_templates_come_by_name() -> None:
    metadata = {
        **_byte_level(),
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = build_from_metadata(metadata, "x")
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "tools"


# --- real vocabularies ---------------------------------------------------------------------------------


def _metadata_of(folder: Path, pre: str) -> dict[str, Any]:
    """Return what a conversion to GGUF writes for a byte-level tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    by_id = {token_id: token for token, token_id in content["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, TokenType.NORMAL)
    for token in content["added_tokens"]:
        by_id[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id[i] for i in range(len(by_id))],
        "tokenizer.ggml.token_type": [types[i] for i in range(len(by_id))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }


def _differences(one: Tokenizer, other: Tokenizer, texts: Iterator[str]) -> list[str]:
    return [text for text in texts if one.encode(text) != other.encode(text)]


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3", "llama-bpe")])
def test_byte_level_ids_equal_the_real_tokenizers(
    real_tokenizer: RealTokenizer, packaged_tokenizers: dict[str, Path], name: str, pre: str
) -> None:
    rebuilt = build_from_metadata(_metadata_of(packaged_tokenizers[name], pre), name)
    texts = random_texts(random.Random(1), 500)
    assert _differences(rebuilt, real_tokenizer(name), texts) == []


def test_gemma_ids_equal_the_real_tokenizers(real_tokenizer: RealTokenizer) -> None:
    rebuilt, real = real_tokenizer("gemma_gguf"), real_tokenizer("gemma3")
    assert rebuilt.adds_bos
    assert _differences(rebuilt, real, random_texts(random.Random(2), 500)) == []
    assert all(rebuilt.token_bytes(i) == real.token_bytes(i) for i in range(0, 262_144, 37))


def test_smollm2_ids_are_the_known_ones(real_tokenizer: RealTokenizer) -> None:
    tokenizer = real_tokenizer("smollm2_gguf")
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.adds_bos) == (1, 2, False)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text)[:2] == [1, 9690]
