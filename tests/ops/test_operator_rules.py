"""Wrong arguments of torch.ops.pagemill raise before a kernel reads or writes what is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagemill import native
from pagemill.ops import torch_ops
from tests.ops import test_torch_ops as right
from tests.ops.conftest import needs_extension
from tests.ops.test_torch_ops import draw, operator

if native.extension() is not None:
    from pagemill.ops import cpu, cpu_int8, cpu_layers
    from pagemill.ops.cpu_quant import NativeProduct

NAMES = sorted(right.calls(torch.float32)) if native.extension() is not None else []


def changed(name: str, **values: Any) -> tuple[Any, ...]:
    """Return right arguments of an operator, some replaced by name."""
    given = list(right.calls(torch.float32)[name])
    names = [argument.name for argument in schema(name)]
    defaults = [argument.default_value for argument in schema(name)]
    given += defaults[len(given) :]
    for key, value in values.items():
        given[names.index(key)] = value(given[names.index(key)]) if callable(value) else value
    return tuple(given)


def schema(name: str) -> list[Any]:
    return operator(name)._schema.arguments  # type: ignore[attr-defined, no-any-return]


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def strided(tensor: Tensor) -> Tensor:
    """Return the tensor's numbers with gaps between them."""
    wide = torch.stack((tensor, tensor), -1)
    return wide[..., 0]


def first(tensor: Tensor) -> Tensor:
    return tensor[:1].clone()


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("linear", {"out_features": 10**6, "bias": None}, "packed is of shape"),
    ("linear", {"out_features": 10**8, "bias": None}, "packed is of shape"),
    ("linear", {"out_features": -1}, "out_features is -1; it must be 1 or more"),
    ("linear", {"bias": first}, r"bias is of shape \[1\]; it must be of shape \[33\]"),
    ("linear", {"x": lambda x: x[0]}, "x is of shape"),
    ("linear", {"x": lambda x: x.double()}, "x is torch.float64; it must be torch.float32 or"),
    ("linear", {"x": lambda x: x.bfloat16(), "bias": None}, "packed is torch.float32"),
    ("linear", {"x": draw(5, 90)}, "packed is of shape"),
    ("linear", {"packed": strided}, "packed is of shape .* with strides .* contiguous"),
    ("linear", {"gate": "foo"}, "gate is 'foo'; it must be None or 'silu'"),
    ("linear", {"gate": "silu", "bias": None}, "packed is of shape"),
    ("linear", {"out_dtype": torch.int64}, "out_dtype is torch.int64"),
    ("linear_add_", {"stream": torch.zeros(5, 10)}, "stream is of shape"),
    ("linear_add_", {"stream": lambda x: x.long()}, "stream is torch.int64"),
    ("linear_add_", {"stream": torch.zeros(1, 33).expand(5, 33)}, "stream is .* do not overlap"),
    (
        "linear_add_",
        {"stream": torch.zeros(5, 4000), "out_features": 4000, "bias": None},
        "packed is of shape",
    ),
    ("linear_rows", {"ids": ids(10**8), "out_features": 10**9}, "packed is of shape"),
    ("linear_rows", {"in_features": 10**7}, "packed is of shape"),
    ("linear_rows", {"ids": ids(1).int()}, "ids is torch.int32; it must be torch.int64"),
    ("linear_rows", {"ids": ids(33)}, "ids is from 33 to 33; it must be from 0 to 32"),
    ("linear_rows", {"ids": ids(-1)}, "ids is from -1"),
    ("linear_rows", {"packed": strided}, "packed is of shape"),
    ("pack_linear", {"tile_first": -5_000_000}, "tile_first is -5000000"),
    ("pack_linear", {"tile_step": 0}, "tile_step is 0"),
    ("pack_linear", {"tile_first": 1}, "packed is of 3 tiles; it must be of at least 4"),
    ("pack_linear", {"weight": draw(33, 400)}, "packed is of shape"),
    ("linear_int8", {"out_features": 10**7, "bias": None}, "packed is of shape"),
    ("linear_int8", {"scales": first}, "scales is of shape"),
    ("linear_int8", {"sums": first}, "sums is of shape"),
    ("linear_int8", {"sums": None}, "sums is left out"),
    ("linear_int8", {"scale": 0.0}, "scale is 0.0"),
    ("linear_int8", {"zero_point": 10**6}, "zero_point is 1000000"),
    ("linear_int8", {"x": draw(5, 7000)}, "packed is of shape"),
    ("linear_int8_rows", {"out_features": 10**9}, "packed is of shape"),
    ("pack_int8", {"scales": first}, "scales is of shape"),
    ("pack_int8", {"packed_scales": first}, "packed_scales is of shape"),
    ("qlinear", {"out_features": 10**7}, "codes is of shape"),
    ("qlinear", {"codec": "foo"}, "codec is 'foo'"),
    ("qlinear", {"group": 17}, "group is 17"),
    ("qlinear", {"table": [1000] * 16}, "table is"),
    ("qlinear", {"offset": "none"}, "offsets is given"),
    ("qlinear_rows", {"in_features": 10**7}, "codes is of shape"),
    ("qlinear_rows", {"ids": ids(33)}, "ids is from 33"),
    ("rms_norm", {"weight": first}, "weight is of shape"),
    ("layer_norm", {"weight": strided}, "weight is of shape .* with strides"),
    ("rotate_heads_", {"sin": None}, "sin is left out; it must be given, as cos is"),
    ("rotate_heads_", {"cos": draw(5, 800)}, "cos is 800 wide; it must be at most 8 wide"),
    ("rotate_heads_", {"num_heads": 10**6}, "num_heads is 1000000"),
    ("rotate_heads_", {"style": "x"}, "style is 'x'"),
    ("activate_", {"activation": "foo"}, "activation is 'foo'"),
    ("soft_cap_", {"cap": 0.0}, "cap is 0.0"),
    ("scale_", {"x": strided}, "x is of shape"),
    ("add_", {"y": first}, "y is of shape"),
    ("add_rows_", {"offset": 10**9}, "ids is from 0 to 2"),
    ("gather_columns", {"order": ids(70)}, "order is from 70"),
    ("best_rows", {"logits": lambda x: x.bfloat16()}, "logits is torch.bfloat16"),
    ("best_rows", {"logits": torch.zeros(3, 0)}, "logits is of shape"),
    ("draw_rows", {"num_draws": 4}, "num_draws is 4; it must be 5"),
    ("draw_rows", {"wholes": strided}, "wholes is of shape .* with strides"),
    ("score_rows", {"starts": ids(0, -9, 1, 2)}, "starts is"),
    ("score_rows", {"chosen": ids(1, 400)}, "chosen is from 1 to 400"),
    ("score_rows", {"counts": ids(10**9, 0, 0)}, "counts is"),
    ("penalize_row_", {"tokens": ids(10**9).int()}, "tokens is"),
    ("penalize_row_", {"num_prompt_tokens": 10**9}, "num_prompt_tokens is"),
    (
        "attention",
        {"k_pool": torch.zeros(1, 1, 1, 1), "v_pool": torch.zeros(1, 1, 1, 1)},
        "k_pool is of shape",
    ),
    ("attention", {"k": first, "v": first}, "k is of shape"),
    ("attention", {"sinks": torch.zeros(0)}, "sinks is of shape"),
    ("attention", {"block_size": 10**9}, "k_pool is of shape"),
    ("attention", {"k_pool": strided}, "k_pool is of shape"),
    ("attention", {"block_tables": lambda x: x.int()}, "block_tables is torch.int32"),
    ("attention", {"block_tables": ids(3, 10**8)[None]}, "block_tables is from 3"),
    ("attention", {"slots": ids(10**9).repeat(20)}, "slots is from"),
    ("attention", {"slots": first}, "slots is of shape"),
    ("attention", {"num_computed": [10**6]}, "block_tables is 2 blocks wide"),
    ("attention", {"num_computed": [-5]}, "num_computed is"),
    ("attention", {"query_starts": [0, 10**6]}, "query_starts is"),
    ("attention", {"query_starts": [], "num_computed": []}, "query_starts is"),
]


@needs_extension
@pytest.mark.parametrize(("name", "values", "words"), CASES)
def test_a_wrong_argument_is_named(name: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {words}"):
        operator(name)(*changed(name, **values))


WRONG_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x.to(torch.complex64),
    "rank": lambda x: x[None],
}
FREE_DTYPE = {("embedding", "table")}


@needs_extension
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_every_operator_is_checked(name: str) -> None:
    """Each tensor in turn gets a wrong dtype, rank, or an end; the call must say so and name it."""
    for argument in schema(name):
        right_one = dict(zip([a.name for a in schema(name)], changed(name), strict=True))
        if not isinstance(right_one[argument.name], Tensor):
            continue
        for kind, wrong in WRONG_TENSORS.items():
            if kind == "dtype" and (name, argument.name) in FREE_DTYPE:
                continue
            if kind == "rank" and name in ("scale_", "soft_cap_", "activate_"):
                continue  # of any rank
            with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                operator(name)(*changed(name, **{argument.name: wrong}))


# Of these an argument of other sizes is no mistake: nothing else says what they must be.
FREE_SIZES = {
    "embedding": ("ids", "table"),
    "rope_angles": ("positions", "inv_freq"),
    "scale_": ("x",),
    "soft_cap_": ("x",),
    "activate_": ("x",),
    "best_rows": ("logits",),
    "gather_columns": ("x", "order"),
    "linear": ("x",),
    "linear_int8": ("x",),
    "linear_rows": ("ids",),
    "linear_int8_rows": ("ids",),
    "qlinear": ("x",),
    "qlinear_rows": ("ids",),
    "layer_norm": ("x",),
    "rms_norm": ("x",),
    "add_rows_": ("table",),
    "draw_rows": ("logits",),
    "pack_linear": ("weight",),
    "quantize_int8": ("weight",),
    "penalize_row_": ("tokens", "logits"),
    "attention": ("k_pool",),
}


@needs_extension
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_ends_early_is_refused(name: str) -> None:
    """Each tensor whose sizes others decide loses its last entry of the first dimension."""
    for argument, value in zip(schema(name), changed(name), strict=True):
        if isinstance(value, Tensor) and argument.name not in FREE_SIZES.get(name, ()):
            with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                operator(name)(*changed(name, **{argument.name: lambda x: x[:-1].clone()}))


@needs_extension
@pytest.mark.parametrize("name", NAMES)
def test_every_size_of_every_operator_is_checked(name: str) -> None:
    sizes = {"out_features", "in_features", "num_heads", "block_size", "num_draws", "num_top"}
    for argument in schema(name):
        if argument.name in sizes:
            for wrong in (-1, 0, 10**12):
                with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                    operator(name)(*changed(name, **{argument.name: wrong}))


@needs_extension
@pytest.mark.parametrize("name", NAMES)
def test_every_operator_can_be_called_with_all_its_defaults(name: str) -> None:
    required = sum(not argument.has_default_value() for argument in schema(name))
    given = right.calls(torch.float32)[name]
    operator(name)(*given[:required])
    filled = [argument.default_value for argument in schema(name)][required:]
    operator(name)(*right.calls(torch.float32)[name][:required], *filled)


def in_one_place(*tensors: Tensor) -> list[Tensor]:
    """Return zeros of the tensors' shapes and dtypes that all lie at one address."""
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    return [memory.view(t.dtype)[: t.numel()].view(t.shape) for t in tensors]


@needs_extension
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_to_lies_apart_from_every_other_argument(name: str) -> None:
    """Else ids and tables that were looked at could change under the kernel, and it read anywhere."""
    values = dict(zip([a.name for a in schema(name)], changed(name), strict=True))
    tensors = [argument for argument, value in values.items() if isinstance(value, Tensor)]
    for argument in schema(name):
        if argument.name not in tensors or argument.alias_info is None:
            continue
        for other in tensors:
            if other == argument.name or (name, argument.name, other) == ("add_", "x", "y"):
                continue
            # Zeros are right ids, counts and numbers of any of these operators.
            shared = in_one_place(values[argument.name], values[other])
            both = dict(zip((argument.name, other), shared, strict=True))
            with pytest.raises(ValueError, match=f"^{name}: .* is in the memory of .* apart"):
                operator(name)(*changed(name, **both))


@needs_extension
def test_numbers_are_added_to_themselves_but_not_to_their_neighbours() -> None:
    memory = torch.arange(100.0)
    operator("add_")(memory, memory)
    assert torch.equal(memory, 2 * torch.arange(100.0))
    with pytest.raises(ValueError, match="^add_: x is in the memory of y"):
        operator("add_")(memory[1:], memory[:-1])


@needs_extension
def test_columns_of_one_matrix_lie_apart() -> None:
    x, weight, features, _ = right.linear_arguments(torch.float32)
    together = torch.cat((x, draw(5, features, seed=4)), 1)
    apart = together[:, 40:].clone()
    operator("linear_add_")(together[:, 40:], together[:, :40], weight, features)
    operator("linear_add_")(apart, x, weight, features)
    assert torch.equal(together[:, 40:], apart)
    with pytest.raises(ValueError, match="^linear_add_: stream is in the memory of x"):
        operator("linear_add_")(together[:, 39:-1], together[:, :40], weight, features)


@needs_extension
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_of_logits_that_are_not_finite_are_not_drawn_from(value: float) -> None:
    for name in ("draw_rows", "score_rows"):
        for row in (slice(None), 1):
            logits = changed(name)[0].clone()
            logits[row, 7] = value
            with pytest.raises(ValueError, match=f"^{name}: logits is of a largest number"):
                operator(name)(*changed(name, logits=logits))
        with pytest.raises(ValueError, match=f"^{name}: logits is of a largest number -inf"):
            operator(name)(*changed(name, logits=lambda x: torch.full_like(x, -torch.inf)))


@needs_extension
@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (0, 1e-300, "temperatures"),
        (0, torch.nan, "temperatures"),
        (1, 0.0, "top_p"),
        (1, torch.nan, "top_p"),
        (2, 2.0, "min_p"),
        (2, torch.nan, "min_p"),
    ],
)
def test_numbers_that_keep_no_token_are_refused(column: int, value: float, words: str) -> None:
    def spoil(numbers: Tensor) -> Tensor:
        numbers = numbers.clone()
        numbers[1, column] = value
        return numbers

    with pytest.raises(ValueError, match=rf"^draw_rows: numbers.* \({words}\) is {value}"):
        operator("draw_rows")(*changed("draw_rows", numbers=spoil))


@needs_extension
def test_the_highest_of_a_row_must_be_that_of_the_row() -> None:
    for wrong in (-100.0, 1e30, torch.nan):
        with pytest.raises(ValueError, match="^draw_rows: highest is .* the highest of each row"):
            operator("draw_rows")(
                *changed("draw_rows", highest=lambda x, wrong=wrong: torch.full_like(x, wrong))
            )


@needs_extension
def test_penalties_left_out_change_nothing() -> None:
    row = draw(400)
    operator("penalize_row_")(row, torch.tensor([1, 2, 2]).int(), 1)
    assert torch.equal(row, draw(400))


@needs_extension
def test_ids_with_gaps_between_them_are_read_whole() -> None:
    count = 300_000  # memory of this size goes back to the system at once when it is freed
    gaps = torch.arange(2 * count).remainder(33)[::2]
    weight = right.linear_arguments(torch.float32)[1]
    assert torch.equal(
        cpu.linear_rows(gaps, weight, 33, 4), cpu.linear_rows(gaps.clone(), weight, 33, 4)
    )
    made, scales, _ = right.int8_weights()
    rows = [
        cpu_int8.linear_int8_rows(i, made, scales, (33, 4), torch.float32)
        for i in (gaps, gaps.clone())
    ]
    assert torch.equal(*rows)
    table = draw(33, 4)
    assert torch.equal(cpu_layers.embedding(gaps, table), table[gaps])
    product, few = NativeProduct(right.four_bits()), gaps[:1000]
    assert torch.equal(product.rows(few, torch.float32), product.rows(few.clone(), torch.float32))


def test_every_operator_has_rules() -> None:
    if native.extension() is not None:
        assert set(torch_ops.RULES) == set(torch_ops.register())
