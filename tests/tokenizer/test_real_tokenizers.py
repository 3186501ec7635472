"""Exact decoding, one begin token and chat templates, over the real tokenizers."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from pagemill.errors import RequestError
from pagemill.tokenizer.decoding import REPLACEMENT, WholePlan
from pagemill.tokenizer.fast import FastTokenizer
from tests.tokenizer.conftest import RealTokenizer
from tests.tokenizer.samples import random_texts
from tests.tokenizer.test_chat_template import CHATS, TOOLS

NAMES = ["smollm2_gguf", "gemma_gguf", "gemma3", "qwen3", "llama3"]
every_tokenizer = pytest.mark.parametrize("name", NAMES)


def _deltas(tokenizer: FastTokenizer, ids: list[int], skip: bool = True) -> list[str]:
    decoder = tokenizer.decoder(skip_special_tokens=skip)
    pieces = [piece for token_id in ids for piece in decoder.push(token_id)]
    return [piece.text for piece in [*pieces, *decoder.flush()] if not piece.hidden]


@functools.cache
def _troublesome_ids(tokenizer: FastTokenizer) -> list[int]:
    """Return ids that make trouble: special ones, and parts of characters."""
    found = sorted(tokenizer.special_token_ids)[:20]
    for text in "\n é€😀\u0301ꙮ🏴󠁧󠁢󠁥󠁮󠁧󠁿":
        found += tokenizer.encode(text, add_special_tokens=False)
    found += [i for i in range(2000) if REPLACEMENT in tokenizer.token_text(i)]
    return found


@every_tokenizer
@settings(deadline=None, max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_of_random_ids_equal_the_full_decode(
    real_tokenizer: RealTokenizer, name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = real_tokenizer(name)
    trouble = st.sampled_from(_troublesome_ids(tokenizer))
    ids = data.draw(st.lists(trouble | st.integers(0, tokenizer.vocab_size - 1), max_size=16))
    joined = "".join(_deltas(tokenizer, ids, skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@every_tokenizer
def test_deltas_of_text_join_to_it_and_split_no_character(
    real_tokenizer: RealTokenizer, name: str
) -> None:
    tokenizer = real_tokenizer(name)
    for text in random_texts(random.Random(6), 250):
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas = _deltas(tokenizer, ids, skip=False)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)
        assert not any(REPLACEMENT in delta for delta in deltas)


@every_tokenizer
def test_text_streams_token_by_token(real_tokenizer: RealTokenizer, name: str) -> None:
    tokenizer = real_tokenizer(name)
    ids = tokenizer.encode("The capital of France is Paris.", add_special_tokens=False)
    decoder = tokenizer.decoder()
    assert all(decoder.push(token_id) for token_id in ids)
    assert not isinstance(tokenizer._plan, WholePlan)


@every_tokenizer
def test_spaces_are_kept(real_tokenizer: RealTokenizer, name: str) -> None:
    tokenizer = real_tokenizer(name)
    for text in ("a  b   c    d", "  a", "a  ", "\n\n  x\t\ty"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@every_tokenizer
def test_token_bytes_join_to_the_text(real_tokenizer: RealTokenizer, name: str) -> None:
    tokenizer = real_tokenizer(name)
    text = "Déjà vu: 日本語 😀  2024\n\tx = a[1];"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@every_tokenizer
def test_begin_token_comes_once(real_tokenizer: RealTokenizer, name: str) -> None:
    tokenizer = real_tokenizer(name)
    bos = tokenizer.bos_token_id
    assert tokenizer.adds_bos is (name in ("gemma3", "gemma_gguf"))
    if bos is not None:
        ids = tokenizer.encode(tokenizer.token_text(bos) + "hello")
        assert ids == [bos, *tokenizer.encode("hello", add_special_tokens=False)]
    if not tokenizer.adds_bos:
        assert tokenizer.encode("") == []


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", ["smollm2_gguf", "gemma3", "qwen3", "llama3"])
def test_chat_templates_render_as_in_transformers(
    real_tokenizer: RealTokenizer, name: str, chat: str, tools: Any
) -> None:
    tokenizer = real_tokenizer(name)
    special = tokenizer._settings.special_tokens
    for variables in ({}, {"enable_thinking": False}, {"add_generation_prompt": False}):
        given_all: dict[str, Any] = {"add_generation_prompt": True, **variables}
        if name == "gemma3" and chat == "tool call":
            with pytest.raises(RequestError, match="Conversation roles must alternate"):
                tokenizer.apply_chat_template(CHATS[chat], tools=tools, **given_all)
            continue
        expected, _ = render_jinja_template(
            [CHATS[chat]],
            tools=tools,
            chat_template=tokenizer.chat_template,
            **special,
            **given_all,
        )
        found = tokenizer.apply_chat_template(CHATS[chat], tools=tools, **given_all)
        assert found == expected[0]
        bos = tokenizer.bos_token_id
        if bos is not None and found.startswith(tokenizer.token_text(bos)):
            assert tokenizer.encode(found).count(bos) == found.count(tokenizer.token_text(bos))
