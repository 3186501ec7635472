"""Incremental decoding equals one decode of the whole, for every kind of vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pagemill.tokenizer.decoding import REPLACEMENT, BytePlan, TokenPlan, WholePlan, plan_decoding
from pagemill.tokenizer.fast import FastTokenizer, TokenizerSettings

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁a", "a", "bc", "▁.", ".", "##x", "é", "日", "▁don", "'t", "\n", "<0x4", "do▁"]


def _tokenizer(decoder: Any, extra: Sequence[str] = ()) -> FastTokenizer:
    """A vocabulary of words, byte tokens, one special and one ordinary added token."""
    tokens = ["<unk>", *BYTES, *WORDS, *extra]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("<|é end|>", special=True)]
    )
    backend.add_tokens([AddedToken("<tool>"), AddedToken("▁added x")])
    return FastTokenizer(backend, TokenizerSettings("a test", {"bos_token": "<s>"}))


def _shown(tokenizer: FastTokenizer, ids: Sequence[int], skip: bool) -> str:
    decoder = tokenizer.decoder(skip_special_tokens=skip)
    pieces = [piece for token_id in ids for piece in decoder.push(token_id)]
    pieces += decoder.flush()
    return "".join(piece.text for piece in pieces if not piece.hidden)


LLAMA_2 = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
KINDS: dict[str, tuple[Any, type]] = {
    "llama-2": (decoders.Sequence(LLAMA_2), TokenPlan),
    "gemma": (decoders.Sequence(LLAMA_2[:3]), TokenPlan),
    "strip three": (decoders.Sequence([*LLAMA_2[:3], decoders.Strip(" ", 3, 0)]), TokenPlan),
    "strip each": (decoders.Sequence([*LLAMA_2[:2], decoders.Strip(" ", 1, 0)]), TokenPlan),
    "replace after bytes": (
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace(REPLACEMENT, "?")]),
        TokenPlan,
    ),
    "metaspace": (decoders.Metaspace(), TokenPlan),
    "metaspace never": (decoders.Metaspace(prepend_scheme="never"), TokenPlan),
    "metaspace, bytes": (
        decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]),
        TokenPlan,
    ),
    "word pieces": (decoders.WordPiece(cleanup=True), TokenPlan),
    "word pieces, raw": (decoders.WordPiece(cleanup=False), TokenPlan),
    "none": (None, TokenPlan),
    "byte level": (decoders.ByteLevel(), BytePlan),
    "bpe": (decoders.BPEDecoder("▁"), WholePlan),
    "bytes, metaspace": (
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        WholePlan,
    ),
    "strip end": (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 0)]), TokenPlan),
}
TOKENIZERS = {name: _tokenizer(decoder) for name, (decoder, _) in KINDS.items()}
VOCAB_SIZE = TOKENIZERS["none"].vocab_size

# Ids that make trouble come often: byte tokens that form characters, specials, spaces.
_TROUBLE = [1 + byte for byte in "€é😀\n ".encode()] + list(range(257, VOCAB_SIZE))
_ids = st.lists(
    st.one_of(st.sampled_from(_TROUBLE), st.integers(0, VOCAB_SIZE - 1), st.just(VOCAB_SIZE + 3)),
    max_size=14,
)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=300)
@given(ids=_ids, skip=st.booleans())
def test_joined_pieces_equal_the_full_decode(name: str, ids: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    assert _shown(tokenizer, ids, skip) == tokenizer.decode_whole(ids, skip)


@pytest.mark.parametrize("name", KINDS)
def test_decoder_section_chooses_the_plan(name: str) -> None:
    decoder, plan = KINDS[name]
    section = None if decoder is None else json.loads(decoder.__getstate__())
    assert type(plan_decoding(section, TOKENIZERS[name])) is plan


def _byte_level() -> FastTokenizer:
    from pagemill.tokenizer.decoding import byte_level_alphabet

    vocab = {character: byte for character, byte in byte_level_alphabet().items()}
    vocab["Ġword"] = 256
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("<é x>", special=True)]
    )
    backend.add_tokens([AddedToken("à côté")])
    return FastTokenizer(backend, TokenizerSettings("a test"))


BYTE_LEVEL = _byte_level()


@settings(deadline=None, max_examples=500)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)), skip=st.booleans())
def test_random_bytes_decode_as_the_library_does(ids: list[int], skip: bool) -> None:
    assert _shown(BYTE_LEVEL, ids, skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=12))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, TOKENIZERS["gemma"]])
def test_no_piece_of_valid_text_has_a_replacement_character(
    tokenizer: FastTokenizer, text: str
) -> None:
    first = 0 if tokenizer is BYTE_LEVEL else 1
    text = text.replace(REPLACEMENT, "")
    decoder = tokenizer.decoder()
    pieces = [p for byte in text.encode() for p in decoder.push(first + byte)]
    pieces += decoder.flush()
    assert "".join(p.text for p in pieces) == text
    assert not any(REPLACEMENT in p.text for p in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    decoder = BYTE_LEVEL.decoder()
    counts = [len("".join(p.text for p in decoder.push(byte))) for byte in "é😀".encode()]
    assert counts == [0, 1, 0, 0, 0, 1]


def test_broken_bytes_show_as_replacement_and_nothing_after_is_lost() -> None:
    ids = [*b"\xf0\x9f", *b"ok", 0xFF, *b"!"]
    assert _shown(BYTE_LEVEL, ids, True) == f"{REPLACEMENT}ok{REPLACEMENT}!"
    gemma = TOKENIZERS["gemma"]
    a = gemma.token_to_id("a")
    assert a is not None
    assert _shown(gemma, [1 + 0xF0, 1 + 0x9F, a], True) == f"{REPLACEMENT * 2}a"


def test_unfinished_character_comes_out_at_flush() -> None:
    decoder = BYTE_LEVEL.decoder()
    assert [*decoder.push(0xE2), *decoder.push(0x82)] == []
    assert "".join(p.text for p in decoder.flush()) == REPLACEMENT
    assert list(decoder.flush()) == []


def test_hidden_special_token_is_handed_on_at_once_past_waiting_bytes() -> None:
    end = BYTE_LEVEL.token_to_id("<|end|>")
    assert end is not None
    decoder = BYTE_LEVEL.decoder()
    assert list(decoder.push(0xC3)) == []
    assert [(p.text, p.hidden) for p in decoder.push(end)] == [("<|end|>", True)]
    assert [(p.text, p.hidden) for p in decoder.push(0xA9)] == [("é", False)]


def test_special_token_is_visible_when_asked_for() -> None:
    end = BYTE_LEVEL.token_to_id("<|end|>")
    assert end is not None
    pieces = BYTE_LEVEL.decoder(skip_special_tokens=False).push(end)
    assert [(p.text, p.hidden) for p in pieces] == [("<|end|>", False)]


def test_several_spaces_are_kept() -> None:
    gemma, llama = TOKENIZERS["gemma"], TOKENIZERS["llama-2"]
    ids = [gemma.token_to_id(t) for t in ("▁▁", "▁a", "▁", "▁a")]
    assert None not in ids
    assert _shown(gemma, ids, True) == "   a  a"  # type: ignore[arg-type]
    assert _shown(llama, ids, True) == "  a  a"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gemma", "word pieces"])
def test_token_bytes_are_a_tokens_text_inside_a_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    expected = {
        "gemma": {"▁a": b" a", "<0xE2>": b"\xe2", "é": "é".encode(), "<s>": b"<s>"},
        "word pieces": {"##x": b"x", "a": b" a", ".": b"."},
    }[name]
    for token, data in expected.items():
        token_id = tokenizer.token_to_id(token)
        assert token_id is not None
        assert tokenizer.token_bytes(token_id) == data
        assert tokenizer.token_text(token_id) == data.decode(errors="replace")


def test_ids_outside_the_vocabulary_are_refused_by_decode() -> None:
    for token_id in (-1, BYTE_LEVEL.vocab_size):
        with pytest.raises(ValueError, match=rf"{token_id} is outside .* 0 to {VOCAB - 1}"):
            BYTE_LEVEL.decode([1, token_id])


VOCAB = BYTE_LEVEL.vocab_size


def test_id_of_a_padded_vocabulary_gives_no_text() -> None:
    assert list(BYTE_LEVEL.decoder().push(VOCAB + 5)) == []
    assert BYTE_LEVEL.token_bytes(VOCAB + 5) == b""


def test_negative_id_is_refused_by_the_incremental_decoder() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        BYTE_LEVEL.decoder().push(-1)
