"""A tokenizer from a SentencePiece `.model` file of the BPE kind (Llama 2, Mistral 7B, Gemma).

The file is a protocol buffer; the few fields that matter are read here, by the public schema
`sentencepiece_model.proto`. Settings come from the files beside it. Called by `load_tokenizer`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagemill.errors import CheckpointError, NotSupportedError
from pagemill.tokenizer.fast import FastTokenizer
from pagemill.tokenizer.folder import wrap_backend
from pagemill.tokenizer.scored_bpe import TokenType, build_scored_bpe

_BPE = 2  # TrainerSpec.ModelType
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types

Field = int | bytes  # a number, or the bytes of a string, a message or a fixed-size value


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What a `.model` file says, as far as tokenizing needs it."""

    pieces: list[str]
    scores: list[float]
    types: list[int]  # TokenType
    is_bpe: bool
    special_ids: dict[str, int]  # "bos_token" -> id; those that exist
    space_prefix: bool
    plain_normalizer: bool  # nothing but spaces becoming marks

    @property
    def readable(self) -> bool:
        """Return whether the library's BPE gives the same ids."""
        return self.is_bpe and self.plain_normalizer


def find_model_file(path: Path) -> Path | None:
    """Return the `.model` file at a path: itself, or the one in a folder by its usual name."""
    if path.is_file():
        return path if path.suffix == ".model" else None
    file = path / "tokenizer.model"
    return file if file.is_file() else None


def load_sentencepiece_tokenizer(path: Path) -> FastTokenizer:
    """Load a `.model` file, or a folder with tokenizer.model."""
    file = find_model_file(path)
    assert file is not None, "chosen by the file"
    model = read_sentencepiece_model(file)
    if not model.readable:
        raise NotSupportedError(
            f"{file} is a SentencePiece model of a kind that only transformers reads: install it with "
            'pip install "pagemill[transformers]" and pass --tokenizer-mode slow'
        )
    unknown = model.special_ids.get("unk_token")
    backend = build_scored_bpe(
        model.pieces,
        model.scores,
        model.types,
        unknown=None if unknown is None else model.pieces[unknown],
        space_prefix=model.space_prefix,
    )
    from tokenizers import AddedToken

    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for piece, kind in zip(model.pieces, model.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            special = kind != TokenType.USER_DEFINED
            added[special].append(AddedToken(piece, special=special, normalized=False))
    backend.add_tokens(added[False])
    backend.add_special_tokens(added[True])
    defaults = {name: model.pieces[token_id] for name, token_id in model.special_ids.items()}
    return wrap_backend(backend, file.parent, named=defaults, adds_bos=True)


def read_sentencepiece_model(file: Path) -> SentencePieceModel:
    """Read a `.model` file; anything that breaks the format raises CheckpointError."""
    data = file.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Field] = {}
    normalizer: dict[int, Field] = {}
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                pieces.append(_bytes(piece.get(1, b"")).decode())
                scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                types.append(int(piece.get(3, TokenType.NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
    except (ValueError, TypeError, struct.error) as error:
        raise CheckpointError(f"{file} is not a SentencePiece model: {error}") from error
    if not pieces:
        raise CheckpointError(f"{file} is not a SentencePiece model: it has no pieces")
    # Field numbers and defaults of TrainerSpec; an absent token has the id -1.
    ids = {
        "unk_token": _signed(trainer.get(40, 0)),
        "bos_token": _signed(trainer.get(41, 1)),
        "eos_token": _signed(trainer.get(42, 2)),
        "pad_token": _signed(trainer.get(43, -1)),
    }
    suffix_spaces = bool(trainer.get(24, 0))
    return SentencePieceModel(
        pieces,
        scores,
        types,
        is_bpe=trainer.get(3, 1) == _BPE,
        special_ids={name: i for name, i in ids.items() if 0 <= i < len(pieces)},
        space_prefix=bool(normalizer.get(3, 1)),
        # A character map, squeezed spaces and spaces as suffixes change the text ahead of BPE.
        plain_normalizer=not normalizer.get(2)
        and not bool(normalizer.get(4, 1))
        and bool(normalizer.get(5, 1))
        and not suffix_spaces,
    )


def _fields(data: bytes) -> Iterator[tuple[int, Field]]:
    """Yield the fields of one message; a value that runs over the end raises ValueError."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if size > end - at:
            raise ValueError(f"a value of {size} bytes at byte {at} of {end}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"a number does not end at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _signed(value: Field) -> int:
    number = int(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def _bytes(value: Field) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where bytes belong")
    return value
