"""The stand-in tokenizer keeps the promises that the engine's tests build on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.tokenizer.base import Tokenizer
from tests.fakes.byte_tokenizer import BOS_ID, IM_END_ID, VOCAB_SIZE, ByteTokenizer


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1)), st.booleans())
def test_joined_pieces_equal_the_full_decode(ids: list[int], skip: bool) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    decoder = tokenizer.decoder(skip_special_tokens=skip)
    pieces = [piece for token_id in ids for piece in decoder.push(token_id)]
    pieces += decoder.flush()
    shown = "".join(piece.text for piece in pieces if not piece.hidden)
    assert shown == tokenizer.decode(ids, skip_special_tokens=skip)


def test_begin_token_comes_once() -> None:
    tokenizer = ByteTokenizer(adds_bos=True)
    assert tokenizer.encode("<bos>a") == tokenizer.encode("a") == [BOS_ID, ord("a")]
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]


def test_hidden_special_token_gives_its_name_as_a_hidden_piece() -> None:
    pieces = ByteTokenizer().decoder().push(IM_END_ID)
    assert [(p.text, p.hidden) for p in pieces] == [("<|im_end|>", True)]
