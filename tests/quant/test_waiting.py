"""Rows that wait in a file: rounded slice by slice into the codes of the whole matrix, never written plain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pagemill.checkpoint import open_checkpoint
from pagemill.errors import CheckpointError
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.linear import GatedLinear, Linear, QKVLinear
from pagemill.models.loader import load_model
from pagemill.ops import reference
from pagemill.quant import waiting
from pagemill.quant.base import QuantMethod
from pagemill.quant.int4 import TABLE, Int4, quantize
from pagemill.quant.int8 import Int8
from pagemill.quant.int8_torch import TorchInt8Store
from pagemill.quant.packed import pack
from pagemill.quant.waiting import WaitingRows
from tests.models.tiny import model_config
from tests.ops.conftest import needs_extension

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
METHODS = {"int8": Int8, "int8 in torch": lambda: Int8(TorchInt8Store()), "int4": Int4}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(name: str, dtype: torch.dtype) -> Build:
    method: QuantMethod = METHODS[name]()
    return Build(dtype, CPU, method)


def fill(layer: Linear, parts: str, stored: torch.dtype, *, waits: bool) -> dict[str, Tensor]:
    """Fill the parts in the given order and finish the layer; return their rows."""
    rows = {}
    for i, part in enumerate(parts.split()):
        for suffix, target in layer.targets(part).items():
            values = draw(*target.shape, dtype=stored, seed=i)
            if suffix == "weight":
                assert isinstance(target, WaitingRows)
                rows[part] = values
                target = target if waits else target.written()
            target.fill(values)
    layer.finish()
    return rows


def kept(layer: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in layer.named_parameters() if name != "bias"}


@pytest.fixture(autouse=True)
def a_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_SLICE_ELEMENTS", 33 * 16)
    monkeypatch.setattr(waiting, "_READ_ELEMENTS", 33 * 16)


@pytest.mark.parametrize("stored", [*DTYPES, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 8), (4, 1, 8), (4, 2, 7), (3, 1, 16)])
@pytest.mark.parametrize("name", METHODS)
def test_rows_that_wait_become_the_codes_of_rows_that_are_written(
    name: str, heads: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype
) -> None:
    layers = []
    for waits in (True, False):
        layers.append(QKVLinear(33, heads, made(name, dtype), bias=True))
        fill(layers[-1], "v q k", stored, waits=waits)
    waited, written = map(kept, layers)
    assert waited.keys() == written.keys() and waited
    assert all(torch.equal(waited[key], written[key]) for key in waited)
    x = draw(3, 33, dtype=dtype, seed=7)
    assert torch.equal(layers[0].forward(x), layers[1].forward(x))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("size", [21, 48])
@pytest.mark.parametrize("name", METHODS)
def test_tiles_of_a_gate_and_its_up_lie_where_they_did(
    name: str, size: int, activation: str
) -> None:
    layers = []
    for waits in (True, False):
        made_of = made(name, torch.bfloat16)
        layers.append(GatedLinear(33, size, activation, made_of, bias=False))
        fill(layers[-1], "up gate", torch.float32, waits=waits)
    waited, written = map(kept, layers)
    assert all(torch.equal(waited[key], written[key]) for key in waited)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_slices_become_what_the_whole_matrix_would(name: str, dtype: torch.dtype) -> None:
    layer = Linear(33, {"all": 101}, made(name, dtype))
    rows = fill(layer, "all", dtype, waits=True)["all"]
    ids = torch.arange(101)
    if name == "int4":
        expected = pack(*quantize(rows), codec="int4", group=32, table=TABLE).dequantize()
    else:
        codes, scales, _ = reference.int8_codes(rows)
        expected = codes.float() * scales
    assert torch.equal(layer.quant.rows(layer, ids), expected.to(dtype))


@pytest.mark.parametrize("name", METHODS)
def test_rows_that_wait_are_never_written_to_the_matrix(name: str) -> None:
    layer = GatedLinear(64, 48, "silu", made(name, torch.bfloat16), bias=False)
    matrix = layer.weight
    fill(layer, "gate up", torch.bfloat16, waits=True)
    assert not matrix.any() and layer.weight is None


@pytest.mark.parametrize("name", METHODS)
def test_an_embedding_that_no_head_shares_is_filled_with_its_rows(name: str) -> None:
    build = made(name, torch.bfloat16)
    embedding = TokenEmbedding(37, 33, build)
    head = Head(embedding, build, tied=False)
    rows = draw(37, 33, dtype=torch.float32)
    embedding.targets("")["weight"].fill(rows)
    head.targets("")["weight"].fill(rows)
    head.finish()
    ids = torch.tensor([36, 0, 16, 5])
    assert torch.equal(embedding.forward(ids), rows.bfloat16()[ids])


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_number_that_is_not_finite_in_the_last_slice_is_refused_by_its_tensors_name(
    quantization: str, wrong: float, tmp_path: Path
) -> None:
    save_llama(tmp_path / "model", 64, 1)
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name][-1, -1] = wrong
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "model")
    config = model_config(checkpoint.config, dtype="bfloat16", quantization=quantization)
    with pytest.raises(
        CheckpointError, match=r"down_proj.weight: .*\(1024, 4096\) holds NaN or inf"
    ):
        load_model(config, device=CPU, checkpoint=checkpoint)


# ---------------------------------------------------------------- memory

VOCAB, SIZE, INNER, LAYERS = 32000, 1024, 4096, 2

_LOADING = """
import sys, torch
from pathlib import Path
from pagemill import native
from pagemill.checkpoint import open_checkpoint
from pagemill.models.loader import load_model
from pagemill.worker.memory import weight_bytes
from tests.models.tiny import model_config

def most_resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10

torch.set_num_threads(1)
native.required().set_num_threads(1)
for folder in sys.argv[2:]:  # a small one first, for what libraries keep
    checkpoint = open_checkpoint(Path(folder))
    config = model_config(checkpoint.config, dtype="bfloat16", quantization=sys.argv[1])
    before = most_resident()
    model = load_model(config, device=torch.device("cpu"), checkpoint=checkpoint, dense="native")
print(most_resident() - before, weight_bytes(model))
"""


def save_llama(folder: Path, vocab: int, layers: int) -> None:
    """Save a model of which the tied embedding is the largest matrix, in bfloat16."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab,
        "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocab, SIZE), "norm": (SIZE,)}
    for i in range(layers):
        one = {
            "input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,),
            "self_attn.q_proj": (SIZE, SIZE), "self_attn.k_proj": (SIZE // 2, SIZE),
            "self_attn.v_proj": (SIZE // 2, SIZE), "self_attn.o_proj": (SIZE, SIZE),
            "mlp.gate_proj": (INNER, SIZE), "mlp.up_proj": (INNER, SIZE),
            "mlp.down_proj": (SIZE, INNER),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}": shape for name, shape in one.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {
            f"model.{name}.weight": torch.full(shape, 0.01, dtype=torch.bfloat16)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("models")
    save_llama(path / "small", 64, 1)
    save_llama(path / "large", VOCAB, LAYERS)
    return [path / "small", path / "large"]


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantization", ["int8", "int4", "none"])
def test_loading_takes_the_packed_weights_and_a_slice(
    quantization: str, folders: list[Path]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOADING, quantization, *map(str, folders)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    taken, packed = map(int, done.stdout.split())
    # The embedding alone is 62 MiB, a layer's largest matrix 16 MiB.
    assert packed * 0.8 < taken < packed + (20 << 20)
