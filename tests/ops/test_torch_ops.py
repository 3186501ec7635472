"""The operators of torch.ops.pagemill: the direct call's bits, and torch's own rules for operators."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagemill import native
from pagemill.errors import NotSupportedError
from pagemill.ops import torch_ops
from pagemill.ops.reference import Int8Rounding
from tests.ops.conftest import needs_extension

if native.extension() is not None:
    from pagemill.attention.base import AttentionBatch, AttentionSpec
    from pagemill.attention.cpu import CPUAttention
    from pagemill.ops import cpu as ops
    from pagemill.ops import cpu_int8 as int8_ops
    from pagemill.ops import cpu_layers, cpu_sampling
    from pagemill.ops import packed as packed_weights
    from pagemill.ops.base import HeadNorm, Rotation
    from pagemill.ops.cpu_quant import NativeProduct

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight: Tensor) -> Tensor:
    rows, k = weight.shape
    made = torch.zeros(ops.packed_shape(rows, k, weight.dtype), dtype=weight.dtype)
    ops.pack_linear(weight, made)
    return made


def linear_arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    weight = packed(draw(33, 40, seed=1, dtype=dtype))
    return draw(5, 40, dtype=dtype), weight, 33, draw(33, seed=2, dtype=dtype)


def int8_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, scales and sums of a matrix [33, 70]."""
    codes = (draw(33, 70, seed=1) * 40).clamp(-128, 127).to(torch.int8)
    made = torch.zeros(int8_ops.packed_shape(33, 70), dtype=torch.uint8)
    scales, sums = torch.zeros(48), torch.zeros(48, dtype=torch.int32)
    int8_ops.pack(codes, draw(33, seed=2).abs(), made, scales, sums)
    return made, scales, sums


def rotate_arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    angles = draw(5, 4, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return draw(5, 3, 16, dtype=dtype), 2, draw(2, 16, dtype=dtype), 1e-5, 1.0, cos, sin, "neox"


def draw_arguments(logits: Tensor) -> tuple[Tensor, ...]:
    """Return logits, the highest of each row, temperatures and so on, and five draws in all."""
    numbers = torch.tensor([[0.7, 0.9, 0.0], [1.0, 1.0, 0.05], [2.0, 1.0, 0.0]]).double()
    wholes = torch.tensor([[0, 0, 1, 0, 4, 2], [1, 9, 2, 0, 4, 2], [2, 0, 3, 1, 4, 1]])
    return logits, logits.amax(-1), numbers, wholes


def packed_matrix() -> tuple[Any, ...]:
    """Return the arguments that stand for a packed matrix [33, 70]."""
    made = four_bits()
    form = made.format
    numbers = (made.codes, made.scales, made.offsets, made.multipliers)
    return *numbers, form.codec, form.group, form.offset, list(form.table), 33


def four_bits() -> Any:
    codes = torch.randint(0, 16, (33, 70), generator=torch.Generator().manual_seed(1)).byte()
    scales, mins = draw(33, 3, seed=2).abs(), draw(33, 3, seed=3)
    return packed_weights.pack(codes, scales, codec="int4", group=32, mins=mins)


SPEC_SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def attention_arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    tokens, block_size = 20, 16
    q = draw(tokens, 4, 16, dtype=dtype)
    k, v = (draw(tokens, 2, 16, seed=i, dtype=dtype) for i in (1, 2))
    pools = [torch.zeros(4, 2, block_size, 16, dtype=dtype) for _ in range(2)]
    tables, slots = torch.tensor([[3, 1]]), torch.tensor([*range(48, 64), *range(16, 20)])
    return q, k, v, *pools, [0, tokens], [0], tables, slots, block_size, 0.25, 5.0, 7, draw(4)


def calls(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Return arguments for every operator."""
    x, weight, n, bias = linear_arguments(dtype)
    made, scales, sums = int8_weights()
    wide = draw(5, 70, dtype=dtype)
    logits = draw(3, 400, seed=5)
    row_counts = torch.tensor([2, 0, 3])
    return {
        "rms_norm": (wide, draw(70, dtype=dtype), 1e-5, 1.0),
        "rms_norm_add_": (wide.clone(), wide, draw(70, dtype=dtype), 1e-5),
        "layer_norm": (wide, draw(70, dtype=dtype), None, 1e-5),
        "rotate_heads_": rotate_arguments(dtype),
        "soft_cap_": (draw(3, 40), 0.5),
        "activate_": (wide.clone(), "gelu"),
        "gather_columns": (wide, torch.tensor([4, 0, 4])),
        "add_": (wide.clone(), wide),
        "add_rows_": (draw(2, 70, dtype=dtype), torch.tensor([2, 0]), 2, wide),
        "scale_": (wide.clone(), 0.5),
        "embedding": (torch.tensor([4, 0]), wide),
        "rope_angles": (torch.tensor([4, 0, 9]), draw(8).abs(), 1.5, dtype),
        "qlinear": (wide, *packed_matrix(), None, None, torch.float32),
        "qlinear_add_": (draw(5, 33, dtype=dtype), wide, *packed_matrix(), draw(33, dtype=dtype)),
        "qlinear_rows": (torch.tensor([3, 32]), *packed_matrix(), 70, dtype),
        "best_rows": (logits,),
        "draw_rows": (*draw_arguments(logits), 5),
        "score_rows": (logits, torch.tensor([1, 5]), torch.tensor([0, 1, 1, 2]), row_counts, 5),
        "penalize_row_": (draw(400), torch.tensor([1, 2, 2]).int(), 1, 1.5, 0.5, 0.25),
        "pack_int8": (torch.ones(33, 70).char(), torch.ones(33), made.clone(), scales.clone()),
        "quantize_int8": (draw(33, 70, dtype=dtype), made.clone(), scales.clone()),
        "linear_int8_rows": (torch.tensor([3, 0, 32]), made, scales, n, 70, dtype),
        "linear_int8": (wide, made, scales, n, bias, sums, 0.02, 3, False, None, torch.float32),
        "linear_int8_add_": (draw(5, n, dtype=dtype), wide, made, scales, n, bias),
        "pack_linear": (draw(33, 40, dtype=dtype), torch.zeros_like(weight)),
        "linear_rows": (torch.tensor([3, 0, 32]), weight, n, 40),
        "linear": (x, weight, n, bias, None, torch.float32),
        "linear_add_": (draw(5, n, dtype=dtype), x, weight, n, bias),
        "attention": attention_arguments(dtype),
    }


def operator(name: str) -> Callable[..., Any]:
    torch_ops.register()
    return getattr(torch.ops.pagemill, name).default  # type: ignore[no-any-return]


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_keeps_torchs_rules(dtype: torch.dtype) -> None:
    arguments = calls(dtype)
    assert set(arguments) == set(torch_ops.register())
    for name, given in arguments.items():
        torch.library.opcheck(operator(name), given)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_operators_give_the_direct_calls_bits(dtype: torch.dtype) -> None:
    x, weight, n, bias = linear_arguments(dtype)
    assert torch.equal(operator("linear")(x, weight, n, bias), ops.linear(x, weight, n, bias))
    both = [packed(draw(16, 40, seed=i, dtype=dtype)) for i in (1, 2)]
    pairs = torch.cat(both)
    assert torch.equal(
        operator("linear")(x, pairs, 16, None, "silu"), ops.linear(x, pairs, 16, gate="silu")
    )
    streams = [draw(5, n, seed=4, dtype=dtype) for _ in range(2)]
    assert operator("linear_add_")(streams[0], x, weight, n, bias) is None
    ops.linear(x, weight, n, bias, residual=streams[1])
    assert torch.equal(*streams)
    ids = torch.tensor([1, 1, 30])
    assert torch.equal(
        operator("linear_rows")(ids, weight, n, 40), ops.linear_rows(ids, weight, n, 40)
    )
    empty = torch.zeros_like(weight)
    operator("pack_linear")(draw(n, 40, seed=1, dtype=dtype), empty)
    assert torch.equal(empty, weight)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_operators_give_the_direct_calls_bits(dtype: torch.dtype) -> None:
    made, scales, sums = int8_weights()
    x, n = draw(5, 70, dtype=dtype), 33
    direct = int8_ops.linear_int8(x, made, scales, n)
    assert torch.equal(operator("linear_int8")(x, made, scales, n), direct)
    how = Int8Rounding(row_zero_points=True)
    zeros = int8_ops.linear_int8(x, made, scales, n, sums=sums, how=how)
    assert torch.equal(
        operator("linear_int8")(x, made, scales, n, None, sums, None, 0, True), zeros
    )
    streams = [draw(5, n, seed=4, dtype=dtype) for _ in range(2)]
    operator("linear_int8_add_")(streams[0], x, made, scales, n)
    int8_ops.linear_int8(x, made, scales, n, residual=streams[1])
    assert torch.equal(*streams)
    ids = torch.tensor([1, 1, 30])
    assert torch.equal(
        operator("linear_int8_rows")(ids, made, scales, n, 70, dtype),
        int8_ops.linear_int8_rows(ids, made, scales, (n, 70), dtype),
    )
    weight, empty = draw(n, 70, dtype=dtype), [torch.zeros_like(made) for _ in range(2)]
    operator("quantize_int8")(weight, empty[0], torch.zeros(48))
    int8_ops.quantize(weight, empty[1], torch.zeros(48))
    assert torch.equal(*empty)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operators_give_the_direct_calls_bits(dtype: torch.dtype) -> None:
    x, weight = draw(5, 70, dtype=dtype), draw(70, seed=1, dtype=dtype)
    normed = cpu_layers.rms_norm(x, weight, 1e-5, offset=1.0)
    assert torch.equal(operator("rms_norm")(x, weight, 1e-5, 1.0), normed)
    streams = [x.clone(), x.clone()]
    operator("rms_norm_add_")(streams[0], x, weight, 1e-5)
    cpu_layers.rms_norm(x, weight, 1e-5, residual=streams[1])
    assert torch.equal(*streams)
    layered = cpu_layers.layer_norm(x, weight, None, 1e-5)
    assert torch.equal(operator("layer_norm")(x, weight, None, 1e-5), layered)
    given = rotate_arguments(dtype)
    direct = given[0].clone()
    cpu_layers.rotate_heads(direct, 2, HeadNorm(*given[2:5]), Rotation(*given[5:]))
    operator("rotate_heads_")(*given)
    assert torch.equal(given[0], direct)
    capped = draw(7)
    operator("soft_cap_")(capped, 0.5)
    assert torch.equal(capped, cpu_layers.soft_cap(draw(7), 0.5))
    scaled = x.clone()
    operator("scale_")(scaled, 0.3)
    assert torch.equal(scaled, cpu_layers.scale(x.clone(), 0.3))
    positions, frequencies = torch.tensor([4, 0, 9]), draw(8).abs()
    turned = cpu_layers.angles(positions, frequencies, 1.5, dtype)
    for one, two in zip(
        operator("rope_angles")(positions, frequencies, 1.5, dtype), turned, strict=True
    ):
        assert torch.equal(one, two)
    assert torch.equal(operator("embedding")(positions[:2], x), x[positions[:2]])


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_operators_give_the_direct_calls_bits(dtype: torch.dtype) -> None:
    product, given = NativeProduct(four_bits()), packed_matrix()
    x, ids = draw(5, 70, dtype=dtype), torch.tensor([1, 1, 30])
    assert torch.equal(operator("qlinear")(x, *given), product.apply(x))
    streams = [draw(5, 33, seed=4, dtype=dtype) for _ in range(2)]
    operator("qlinear_add_")(streams[0], x, *given)
    product.apply(x, residual=streams[1])
    assert torch.equal(*streams)
    rows = operator("qlinear_rows")(ids, *given, 70, dtype)
    assert torch.equal(rows, product.rows(ids, dtype))


@needs_extension
def test_sampling_operators_give_the_direct_calls_tokens() -> None:
    given = draw_arguments(draw(3, 400, seed=5))
    arrays = [tensor.numpy() for tensor in given]
    best, highest = operator("best_rows")(given[0])
    assert (best.tolist(), highest.tolist()) == (
        given[0].argmax(-1).tolist(),
        given[0].amax(-1).tolist(),
    )
    assert operator("draw_rows")(*given, 5).tolist() == cpu_sampling.draw_rows(*arrays).tolist()
    rest = [torch.tensor(x) for x in ([1, 5], [0, 1, 1, 2], [2, 0, 3])]
    scores = operator("score_rows")(given[0], *rest, 5)
    direct = cpu_sampling.score_rows(arrays[0], *(tensor.numpy() for tensor in rest))
    assert [part.tolist() for part in scores] == [part.tolist() for part in direct]
    rows, tokens = [draw(400), draw(400)], torch.tensor([1, 2, 2]).int()
    operator("penalize_row_")(rows[0], tokens, 1, 1.5, 0.5, 0.25)
    cpu_sampling.penalize_row(
        rows[1].numpy(), tokens.numpy(), 1, repetition=1.5, frequency=0.5, presence=0.25
    )
    assert torch.equal(*rows) and not torch.equal(rows[0], draw(400))


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_attention_operator_gives_the_direct_calls_bits(dtype: torch.dtype) -> None:
    given = attention_arguments(dtype)
    result = operator("attention")(*given)
    again = attention_arguments(dtype)
    q, k, v, *pools = again[:5]
    batch = AttentionBatch(
        query_starts=tuple(again[5]),
        num_computed=tuple(again[6]),
        block_tables=again[7],
        slot_mapping=again[8],
        block_size=again[9],
    )
    spec = AttentionSpec(**SPEC_SIZES, scale=0.25, logit_softcap=5.0, sliding_window=7)
    backend = CPUAttention()
    direct = backend.forward(
        spec, q, k, v, (pools[0], pools[1]), backend.prepare(batch), sinks=again[13]
    )
    assert torch.equal(result, direct)
    for ours, theirs in zip(given[3:5], pools, strict=True):
        assert torch.equal(ours, theirs) and bool(ours.any())


@needs_extension
def test_a_compiled_function_keeps_the_operators_whole() -> None:
    x, weight, n, bias = linear_arguments(torch.float32)
    linear, add = operator("linear"), operator("linear_add_")

    def layer(x: Tensor, stream: Tensor) -> Tensor:
        add(stream, x, weight, n, bias)
        return linear(x * 2, weight, n, bias) + stream  # type: ignore[no-any-return]

    # The graph alone: generating code would ask for a compiler.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = layer(x, torch.ones(5, n))
    stream = torch.ones(5, n)
    assert torch.equal(compiled(x, stream), expected)
    assert not torch.equal(stream, torch.ones(5, n))


@needs_extension
def test_a_profile_names_the_operators() -> None:
    call = operator("linear")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(*linear_arguments(torch.float32))
    assert "pagemill::linear" in {event.key for event in profile.key_averages()}


def test_nothing_is_registered_before_it_is_asked_for() -> None:
    code = (
        "import torch, pagemill, pagemill.ops.torch_ops; from pagemill import native;"
        "assert not hasattr(torch.ops.pagemill, 'linear');"
        "native.extension() and pagemill.ops.torch_ops.register();"
        "assert hasattr(torch.ops.pagemill, 'linear') == (native.extension() is not None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_extension_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    with pytest.raises(NotSupportedError, match="torch.ops.pagemill needs the native kernels"):
        torch_ops.register()
