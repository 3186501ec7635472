"""Folders of safetensors files: what opens, and what is refused with which words."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagemill.checkpoint import open_checkpoint, read_configs
from pagemill.checkpoint.plain_rows import PlainRows
from pagemill.checkpoint.safetensors_files import read_header
from pagemill.errors import CheckpointError

WEIGHTS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "c.bias": torch.zeros(0, dtype=torch.float16),
}


def make_folder(folder: Path, *, config: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    return folder


def single(folder: Path) -> Path:
    save_file(WEIGHTS, make_folder(folder) / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    make_folder(folder)
    weight_map = {}
    for number, (name, tensor) in enumerate(WEIGHTS.items(), 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    index = {"metadata": {"total_size": 32}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def raw_file(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("build", [single, sharded])
def test_every_tensor_is_yielded_once_with_shape_dtype_and_values(
    tmp_path: Path, build: Any
) -> None:
    checkpoint = open_checkpoint(build(tmp_path / "m"))
    found = list(checkpoint.tensors())
    assert sorted(name for name, _ in found) == sorted(WEIGHTS)
    for name, tensor in found:
        assert torch.equal(tensor, WEIGHTS[name])
        assert tensor.dtype == WEIGHTS[name].dtype
        info = checkpoint.infos()[name]
        assert info.shape == tuple(tensor.shape)
        assert info.size_bytes == tensor.numel() * tensor.element_size()
    assert checkpoint.infos()["b.weight"].dtype == "BF16"
    assert checkpoint.format == "safetensors"


def test_large_matrices_come_as_rows_that_are_read_when_they_are_wanted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    weight = torch.arange(1 << 19, dtype=torch.int32).view(torch.float32).view(-1, 512)
    save_file({"w": weight, "long": weight.view(-1).clone()}, folder / "model.safetensors")
    read = dict(open_checkpoint(folder).tensors())
    rows = read["w"]
    assert isinstance(rows, PlainRows)
    assert (rows.rows, rows.columns, rows.dtype) == (1024, 512, torch.float32)
    assert torch.equal(rows.values(1000, 1024).view(torch.int32), weight[1000:].view(torch.int32))
    assert torch.equal(rows.whole().view(torch.int32), weight.view(torch.int32))
    assert isinstance(read["long"], torch.Tensor)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    ],
)  # fmt: skip
def test_dtypes_are_those_that_the_writer_had(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_folder(tmp_path / "m")
    original = {"w": torch.ones(3, 2).to(dtype), "scalar": torch.ones(()).to(dtype)}
    save_file(original, folder / "model.safetensors")
    for name, tensor in open_checkpoint(folder).tensors():
        assert isinstance(tensor, torch.Tensor)
        assert (tensor.dtype, tensor.shape) == (dtype, original[name].shape)
        assert torch.equal(tensor.double(), original[name].double())


def test_configs_are_read_without_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", config={"hidden_size": 8})
    assert read_configs(folder) == ({"hidden_size": 8}, {})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_configs(folder)[1] == {"eos_token_id": [1, 2]}


def test_numbered_shards_work_without_an_index_and_a_gap_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    assert set(open_checkpoint(folder).infos()) == set(WEIGHTS)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 3 shards: model-00002-of-00003"):
        open_checkpoint(folder)


def test_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 shards.*model-00003-of-00003.safetensors"):
        open_checkpoint(folder)


def test_index_that_names_an_absent_tensor_is_refused_by_name(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lost.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.*lost\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", 7, ""])
def test_index_may_name_only_files_of_its_folder(tmp_path: Path, target: Any) -> None:
    folder = make_folder(tmp_path / "m")
    index = {"weight_map": {"a": target}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must name a file in the same folder"):
        open_checkpoint(folder)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    save_file(
        {"b.weight": torch.ones(4), "a.weight": torch.ones(1)},
        folder / "model-00002-of-00003.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"'a\.weight' is in two files.*00001.*00002"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = single(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(cut short|not a whole)"):
        open_checkpoint(tmp_path / "m")


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    file = single(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="too long"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "needs 8 bytes"),
        ({"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, "dtype 'F99'"),
        ({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "dtype"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, r"shape \[-1\]"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "shape"),
        ({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "shape"),
        ({"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, "shape 1"),
        ({"w": {"dtype": "F32", "shape": [1] * 99, "data_offsets": [0, 4]}}, "shape"),
        ({"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, "needs"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "data_offsets"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "data_offsets"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": None}}, "data_offsets"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}, "begins at byte 2"),
        ({"w": [1]}, "list for a header entry"),
        (
            {
                "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "v": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]},
            },
            "'v' begins at byte 2, but 'w' ends at 4",
        ),
        ([1, 2], "holds a JSON list"),
        (b"{", "line 1, column 2"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON"),
    ],
)
def test_header_lies_are_refused_with_file_and_tensor(
    tmp_path: Path, header: Any, words: str
) -> None:
    file = raw_file(tmp_path / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(file)
    assert "model.safetensors" in str(caught.value)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_mutated_file_raises_nothing_but_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    file = folder / "model.safetensors"
    save_file(WEIGHTS, file)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    make_folder(folder)
    try:
        checkpoint = open_checkpoint(folder)
        for name, tensor in checkpoint.tensors():
            assert isinstance(tensor, torch.Tensor)
            assert tuple(tensor.shape) == checkpoint.infos()[name].shape
    except CheckpointError:
        return


def test_folder_with_only_pickled_weights_says_what_to_do(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        open_checkpoint(folder)


def test_folder_without_weights_or_with_ambiguous_ones_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        open_checkpoint(folder)
    save_file(WEIGHTS, folder / "one.safetensors")
    assert set(open_checkpoint(folder).infos()) == set(WEIGHTS)
    save_file(WEIGHTS, folder / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"several safetensors files \(one.*two"):
        open_checkpoint(folder)


def test_adapter_folder_is_refused_as_an_adapter(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    save_file(WEIGHTS, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="adapter.*base model"):
        open_checkpoint(folder)


def test_file_without_tensors_is_refused(tmp_path: Path) -> None:
    raw_file(make_folder(tmp_path / "m") / "model.safetensors", {}, b"")
    with pytest.raises(CheckpointError, match="no tensor at all"):
        open_checkpoint(tmp_path / "m")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_wrong_json_names_file_line_and_column(tmp_path: Path, name: str) -> None:
    folder = single(tmp_path / "m")
    (folder / name).write_text('{"a": 1,\n "b": }')
    with pytest.raises(CheckpointError, match=rf"{name}.*line 2, column 7"):
        open_checkpoint(folder)


def test_wrong_json_in_the_index_names_file_line_and_column(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')
    with pytest.raises(CheckpointError, match=r"index\.json.*line 1, column 17"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map object"):
        open_checkpoint(folder)
