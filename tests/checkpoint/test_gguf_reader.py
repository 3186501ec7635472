"""The GGUF container: equal to the gguf package on good files, CheckpointError alone on bad ones."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.checkpoint import open_checkpoint
from pagemill.checkpoint.gguf_reader import read_gguf, read_metadata
from pagemill.errors import CheckpointError
from tests.checkpoint.gguf_writing import write_gguf
from tests.model_files import plain

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
           U64: "Q", I64: "q", F64: "d"}  # fmt: skip


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def listing(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(
    name: str | bytes, dims: tuple[int, ...], kind: int, offset: int, num_dims: int | None = None
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def container(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    entries, tensors = entries or [], tensors or []
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def write(folder: Path, raw: bytes) -> Path:
    file = folder / "x.gguf"
    file.write_bytes(raw)
    return file


def tiny_llama(path: Path) -> Path:
    """Write a whole small model: every kind of value, quantized and plain tensors, a vocabulary."""
    torch.manual_seed(0)
    shapes = {
        "token_embd.weight": (10, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32), "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,), "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64),
        "rope_freqs.weight": (8,),
    }  # fmt: skip
    metadata = {
        ".embedding_length": 32, ".block_count": 1, ".feed_forward_length": 64,
        ".attention.head_count": 2, ".attention.head_count_kv": 1, ".context_length": 128,
        ".attention.layer_norm_rms_epsilon": 1e-5, ".rope.freq_base": 10000.0,
        "general.name": "tiny", "general.flag": True,
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(10)],
        "tokenizer.ggml.token_type": [1] * 9 + [3], "tokenizer.ggml.eos_token_id": 9,
        "tokenizer.chat_template": "{{ t9 }}",
    }  # fmt: skip
    kinds = {"blk.0.attn_q.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_1"}
    values = {name: torch.rand(shape) + 0.5 for name, shape in shapes.items()}
    return write_gguf(path, "llama", metadata, values, quantize=kinds)


def load_all(path: Path) -> None:
    """Do all that loading does with the files."""
    checkpoint = open_checkpoint(path)
    infos = checkpoint.infos()
    for name, value in checkpoint.tensors():
        assert infos[name].shape == tuple(plain(value).shape)


# ---------------------------------------------------------------- good files


def test_every_value_type_is_read(tmp_path: Path) -> None:
    numbers = {U8: 255, I8: -128, U16: 65535, I16: -5, U32: 2**32 - 1, I32: -(2**31), F32: 0.5,
               U64: 2**64 - 1, I64: -(2**63), F64: 1e300}  # fmt: skip
    entries = [entry(f"n{k}", k, struct.pack("<" + LETTERS[k], v)) for k, v in numbers.items()]
    entries += [
        entry(f"a{k}", ARRAY, listing(k, 2, struct.pack("<2" + LETTERS[k], v, 1)))
        for k, v in numbers.items()
    ]
    entries += [
        entry("yes", BOOL, b"\1"),
        entry("no", BOOL, b"\0"),
        entry("bools", ARRAY, listing(BOOL, 3, b"\1\0\1")),
        entry("text", STRING, text("grüße 🙂")),
        entry("empty", STRING, text("")),
        entry("texts", ARRAY, listing(STRING, 3, text("a") + text("") + text("ß"))),
        entry("none", ARRAY, listing(STRING, 0, b"")),
        entry(
            "nested", ARRAY, listing(ARRAY, 2, listing(U8, 2, b"\1\2") + listing(STRING, 0, b""))
        ),
    ]
    metadata = read_metadata(write(tmp_path, container(entries)))
    for kind, value in numbers.items():
        assert metadata[f"n{kind}"] == value
        assert list(metadata[f"a{kind}"]) == [value, 1]
        assert isinstance(metadata[f"a{kind}"], array)
    assert metadata["yes"] is True
    assert metadata["no"] is False
    assert metadata["bools"] == [True, False, True]
    assert (metadata["text"], metadata["empty"]) == ("grüße 🙂", "")
    assert (metadata["texts"], metadata["none"]) == (["a", "", "ß"], [])
    assert metadata["nested"] == [array("B", [1, 2]), []]


def assert_equals_oracle(path: Path) -> None:
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        mine, expected = ours.metadata[key], field.contents()
        assert (list(mine) if isinstance(mine, array) else mine) == expected, key
    assert len(ours.metadata) == len([k for k in theirs.fields if not k.startswith("GGUF.")])
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    for theirs_one in theirs.tensors:
        mine = ours.tensors[theirs_one.name]
        assert mine.shape == tuple(int(n) for n in reversed(theirs_one.shape))
        assert mine.type_name == theirs_one.tensor_type.name
        data = raw[mine.offset : mine.offset + mine.size_bytes]
        assert np.array_equal(data, theirs_one.data.reshape(-1).view(np.uint8))


def test_written_file_reads_as_the_oracle_reads_it(tmp_path: Path) -> None:
    assert_equals_oracle(tiny_llama(tmp_path / "x.gguf"))


@pytest.mark.slow  # the oracle takes seconds
def test_real_file_reads_as_the_oracle_reads_it(smollm2_gguf: Path) -> None:
    assert_equals_oracle(smollm2_gguf)


def test_version_2_and_other_alignments_are_read(tmp_path: Path) -> None:
    entries = [entry("general.alignment", U32, struct.pack("<I", 64))]
    tensors = [tensor("w", (2,), 0, 64)]
    raw = container(entries, tensors, b"\0" * 64 + b"\1" * 8, version=2, alignment=64)
    file = read_gguf(write(tmp_path, raw))
    assert file.version == 2
    assert file.tensors["w"].offset == len(raw) - 8
    assert file.tensors["w"].size_bytes == 8


def test_metadata_alone_does_not_need_the_tensors(tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path / "x.gguf").read_bytes()
    cut = write(tmp_path, whole[: whole.index(b"blk.0.attn_norm")])
    assert read_metadata(cut)["general.name"] == "tiny"
    with pytest.raises(CheckpointError):
        read_gguf(cut)


def test_large_vocabulary_is_read_whole(tmp_path: Path) -> None:
    tokens = [f"tok{n}" for n in range(300_000)]
    raw = container(
        [
            entry("tokens", ARRAY, listing(STRING, len(tokens), b"".join(map(text, tokens)))),
            entry("scores", ARRAY, listing(F32, len(tokens), b"\0\0\x80\x3f" * len(tokens))),
        ]
    )
    metadata = read_metadata(write(tmp_path, raw))
    assert metadata["tokens"] == tokens
    assert metadata["scores"] == array("f", [1.0]) * len(tokens)


# ---------------------------------------------------------------- bad files

BIG = 2**63


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "0 bytes"),
        (b"GGUF", "4 bytes"),
        (b"\x80\2}q" + b"\0" * 40, "begins with"),
        (container(version=1), "version 1; pagemill reads versions 2 and 3"),
        (container(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (container(counts=(BIG, 0)), f"tensor count is {BIG}"),
        (container(counts=(0, 2**64 - 1)), "metadata count is"),
        (container(counts=(3, 0)), "tensor count is 3"),
        (container([entry("k", 13, b"\0" * 8)]), "'k' has value type 13"),
        (container([entry("k", BOOL, b"\2")]), "bool with the value 2"),
        (container([entry("k", STRING, struct.pack("<Q", BIG))]), f"'k' needs {BIG} bytes"),
        (container([entry(b"\xff", U8, b"\0")]), "not UTF-8"),
        (container([entry("k", STRING, text(b"ab\xffcd"))]), r"'k' is not UTF-8.*ab\\xffcd"),
        (container([entry("k", ARRAY, listing(U64, BIG, b""))]), f"length, is {BIG}"),
        (container([entry("k", ARRAY, listing(U8, 2**40, b""))]), "its length"),
        (container([entry("k", ARRAY, listing(STRING, BIG, b""))]), "its length"),
        (container([entry("k", ARRAY, listing(42, 1, b"\0" * 64))]), "elements of type 42"),
        (
            container([entry("k", ARRAY, listing(STRING, 2, text("a") + struct.pack("<Q", BIG)))]),
            "string 1 of 2",
        ),
        (
            container([entry("k", ARRAY, listing(STRING, 2, text(b"\xc3") + text("a")))]),
            "string 0 of 2, is not UTF-8",
        ),
        (
            container([entry("k", ARRAY, listing(ARRAY, 1, b"") * 8 + b"\0" * 64)]),
            "nests arrays deeper than 4",
        ),
        (container([entry("k", U8, b"\1"), entry("k", U8, b"\1")]), "'k' is there twice"),
        (
            container([entry("general.alignment", U32, struct.pack("<I", 24))]),
            "alignment' is 24",
        ),
        (
            container([entry("general.alignment", U32, struct.pack("<I", 0))]),
            "alignment' is 0",
        ),
        (container([entry("general.alignment", STRING, text("x"))]), "alignment' is 'x'"),
        (container([entry("split.count", U16, b"\3\0")]), "one of 3 pieces.*--merge"),
        (container([], [tensor("w", (), 0, 0)], b"\0" * 64), "'w' has 0 dimensions"),
        (container([], [tensor("w", (1,) * 5, 0, 0)], b"\0" * 64), "5 dimensions"),
        (
            container([], [tensor("w", (1,), 0, 0, num_dims=2**32 - 1)], b"\0" * 64),
            "4294967295 dimensions",
        ),
        (container([], [tensor("w", (0,), 0, 0)], b"\0" * 64), r"dimensions \[0\]"),
        (container([], [tensor("w", (31,), 8, 0)], b"\0" * 64), r"Q8_0 needs.*first by 32"),
        (container([], [tensor("w", (2,), 31, 0)], b"\0" * 64), "tensor type 31"),
        (container([], [tensor("w", (2,), 2**32 - 1, 0)], b"\0" * 64), "tensor type 4294967295"),
        (container([], [tensor("w", (BIG, BIG, BIG, BIG), 0, 0)], b"\0" * 64), "cut short"),
        (container([], [tensor("w", (2**62,), 0, 0)], b"\0" * 64), "cut short"),
        (container([], [tensor("w", (2,), 0, 7)], b"\0" * 64), "offset 7, not a multiple of 32"),
        (container([], [tensor("w", (2,), 0, 2**64 - 32)], b"\0" * 64), "cut short"),
        (container([], [tensor("w", (17,), 0, 0)], b"\0" * 64), "bytes 64 to 132.*ends at 128"),
        (
            container([], [tensor("w", (2,), 0, 0), tensor("w", (2,), 0, 32)], b"\0" * 64),
            "'w' is there twice",
        ),
        (
            container([], [tensor("v", (9,), 0, 0), tensor("w", (2,), 0, 32)], b"\0" * 64),
            "'w' at offset 32 overlaps 'v', up to 36",
        ),
    ],
)
def test_lie_is_refused_with_file_field_and_numbers(tmp_path: Path, raw: bytes, words: str) -> None:
    file = write(tmp_path, raw)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_gguf(file)
    assert "x.gguf" in str(caught.value)


def test_arrays_of_too_many_objects_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.checkpoint.gguf_reader.MAX_ARRAY_OBJECTS", 100)
    one = entry("a", ARRAY, listing(STRING, 60, text("") * 60))
    two = entry("b", ARRAY, listing(BOOL, 60, b"\0" * 60))
    assert len(read_metadata(write(tmp_path, container([one])))["a"]) == 60
    with pytest.raises(CheckpointError, match="'b' has 60 elements, and arrays over 100 together"):
        read_metadata(write(tmp_path, container([one, two])))


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    raw = tiny_llama(tmp_path / "x.gguf").read_bytes()
    data_start = len(raw) - sum(
        t.size_bytes for t in read_gguf(tmp_path / "x.gguf").tensors.values()
    )
    for keep in [*range(0, data_start, 3), data_start, len(raw) - 1000]:
        with pytest.raises(CheckpointError):
            load_all(write(tmp_path, raw[:keep]))


EXTREMES = [0, 1, 2, 3, 4, 8, 9, 31, 32, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62,
            2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """Return a scratch path, the bytes of a small model, and where its tensor data begin."""
    path = tiny_llama(tmp_path_factory.mktemp("fuzz") / "x.gguf")
    start = min(t.offset for t in read_gguf(path).tensors.values())
    return path, path.read_bytes(), start


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_mutated_file_raises_nothing_but_checkpoint_error(
    small_model: tuple[Path, bytes, int], data: st.DataObject
) -> None:
    path, original, start = small_model
    raw = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, start - 1))
        if data.draw(st.booleans()):
            raw[place] = data.draw(st.integers(0, 255))
        else:
            width = data.draw(st.sampled_from([4, 8]))
            value = data.draw(st.sampled_from(EXTREMES)) % 2 ** (8 * width)
            raw[place : place + width] = value.to_bytes(width, "little")
    path.write_bytes(raw)
    try:
        load_all(path)
    except CheckpointError:
        return


@settings(deadline=None, max_examples=200)
@given(raw=st.binary(max_size=300), num_tensors=st.integers(0, 3), num_entries=st.integers(0, 4))
def test_random_bytes_raise_nothing_but_checkpoint_error(
    small_model: tuple[Path, bytes, int], raw: bytes, num_tensors: int, num_entries: int
) -> None:
    path, *_ = small_model
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + raw)
    try:
        load_all(path)
    except CheckpointError:
        return


def test_folder_in_place_of_a_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_metadata(tmp_path)
