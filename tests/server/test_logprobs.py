"""Logprobs in both layouts: offsets, equal texts, ranks, numbers that JSON can hold."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pagemill.outputs import Logprob
from pagemill.server.logprobs import (
    FLOOR,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs_object,
)
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text(max_size=30))
def test_offsets_are_where_each_token_s_character_begins(text: str) -> None:
    raw = text.encode(errors="replace")
    offsets = TextOffsets(TOKENIZER, skip_special_tokens=True)
    found = [offsets.advance(byte) for byte in raw]
    wanted = [i for i, char in enumerate(raw.decode()) for _ in char.encode()]
    assert found == wanted


def test_hidden_special_tokens_move_no_offset_and_shown_ones_do() -> None:
    hidden = TextOffsets(TOKENIZER, skip_special_tokens=True)
    assert [hidden.advance(t) for t in (97, EOS_ID, 98)] == [0, 1, 1]
    shown = TextOffsets(TOKENIZER, skip_special_tokens=False)
    assert [shown.advance(t) for t in (97, EOS_ID, 98)] == [0, 1, 6]


def test_alternatives_of_one_text_keep_the_likelier() -> None:
    # 0xc3 and 0xa9 alone both read as U+FFFD.
    entry = {0xC3: Logprob(-0.1, 1), 0xA9: Logprob(-0.2, 2), 97: Logprob(-3.0, 9)}
    offsets = TextOffsets(TOKENIZER, skip_special_tokens=True)
    made = completion_logprobs([97], [entry], TOKENIZER, offsets, 2)
    assert made["top_logprobs"] == [{"\ufffd": -0.1, "a": -3.0}]


def test_chosen_token_is_listed_among_chat_tops_only_if_it_is_one() -> None:
    entry = {98: Logprob(-0.1, 1), 97: Logprob(-3.0, 9)}
    (item,) = chat_logprobs([97], [entry], TOKENIZER, 1)["content"]
    assert item["token"] == "a"
    assert [top["token"] for top in item["top_logprobs"]] == ["b"]
    (item,) = chat_logprobs([98], [entry], TOKENIZER, 1)["content"]
    assert [top["token"] for top in item["top_logprobs"]] == ["b"]


def test_minus_infinity_becomes_a_number() -> None:
    entry = {97: Logprob(-math.inf, 1)}
    (item,) = chat_logprobs([97], [entry], TOKENIZER, 0)["content"]
    assert item["logprob"] == FLOOR
    made = prompt_logprobs_object([None, entry], [98, 97], 0)
    assert made == [None, {"97": {"logprob": FLOOR, "rank": 1, "decoded_token": None}}]


def test_ids_beyond_the_tokenizer_s_vocabulary_are_named_by_number() -> None:
    entry = {300: Logprob(-0.5, 1)}
    offsets = TextOffsets(TOKENIZER, skip_special_tokens=True)
    made = completion_logprobs([300], [entry], TOKENIZER, offsets, 1)
    assert made["tokens"] == ["token_id:300"]
    (item,) = chat_logprobs([300], [entry], TOKENIZER, 0)["content"]
    assert item["token"] == "token_id:300"
