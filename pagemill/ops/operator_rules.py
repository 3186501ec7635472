"""What each operator of `torch.ops.pagemill` demands of its arguments: one function an operator.

Called by `torch_ops` before an operator computes, with all arguments, defaults filled in. Sizes that the kernels
cannot see (tiles, pools, lists of ids) are compared here with those that the caller claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from pagemill.config import int8_token_bytes
from pagemill.ops.operator_checks import ANY, FLOAT32, FLOATS, INT64, ROWS, WHOLE, Given
from pagemill.ops.packed import CODECS, DEPTH, LINE, OFFSETS, num_groups
from pagemill.ops.reference import ACTIVATIONS
from pagemill.sampling_params import GREEDY_BELOW

_TILE = 16
_TILE_ROW_BYTES = 64
_GATES = (None, "silu", "swish", "gelu_pytorch_tanh")
_OUT_DTYPES = (None, *FLOATS)
_MOST_INT8_INPUTS = 65536
_INT32 = (torch.int32,)


def _tiles(given: Given, parts: int = 1) -> int:
    """Return the tiles of `out_features`, gate and up counted apart."""
    return -(-given.whole("out_features", 1) // _TILE) * parts


def _weights(given: Given, inputs: int, tiles: int) -> None:
    """Demand packed float tiles of a matrix with so many inputs and tiles of outputs."""
    dtype = given["packed"].dtype
    depth = _TILE_ROW_BYTES // dtype.itemsize
    sizes = (tiles, -(-inputs // depth), _TILE, depth)
    given.tensor("packed", FLOATS, sizes, WHOLE)


def _finish(given: Given, rows: int, dtype: torch.dtype) -> int:
    """Check stream or gate and out_dtype, and bias; return the number of matrices in the tiles."""
    features = given.whole("out_features", 1)
    parts = 1
    if "stream" in given.values:
        given.tensor("stream", FLOATS, (rows, features), ROWS)
    else:
        given.choice("gate", _GATES)
        given.choice("out_dtype", _OUT_DTYPES)
        parts = 1 if given["gate"] is None else 2
    given.tensor("bias", (dtype,), (parts * features,), WHOLE)
    return parts


def _linear(given: Given) -> None:
    rows, inputs = given.tensor("x", FLOATS, ("tokens", "in_features"))
    parts = _finish(given, rows, given["x"].dtype)
    given.tensor("packed", (given["x"].dtype,), ("tiles", "in_tiles", _TILE, "depth"), WHOLE)
    _weights(given, inputs, _tiles(given, parts))


def _linear_rows(given: Given) -> None:
    given.tensor("packed", FLOATS, ("tiles", "in_tiles", _TILE, "depth"), WHOLE)
    _weights(given, given.whole("in_features", 1), _tiles(given))
    given.ids("ids", given["out_features"])


def _room(given: Given, name: str, inputs_tiles: int, depth: int) -> None:
    """Demand tiles in `packed` for every row of the matrix `name`, from tile_first by tile_step."""
    tiles = -(-len(given[name]) // _TILE)
    first, step = given.whole("tile_first", 0), given.whole("tile_step", 1)
    given.tensor("packed", (), ("tiles", inputs_tiles, _TILE, depth), WHOLE)
    last = first + (tiles - 1) * step
    if tiles and last >= len(given["packed"]):
        wanted = f"of at least {last + 1}, for {len(given[name])} rows of {name}"
        given.refuse("packed", f"of {len(given['packed'])} tiles", wanted, ValueError)


def _pack_linear(given: Given) -> None:
    _, inputs = given.tensor("weight", FLOATS, ("rows", "in_features"), ROWS)
    dtype = given["weight"].dtype
    given.tensor("packed", (dtype,), ("tiles", "in_tiles", _TILE, "depth"))
    depth = _TILE_ROW_BYTES // dtype.itemsize
    _room(given, "weight", -(-inputs // depth), depth)


def _int8_room(given: Given, name: str) -> None:
    inputs = given[name].shape[1]
    if inputs > _MOST_INT8_INPUTS:
        given.refuse(name, f"{inputs} inputs wide", f"at most {_MOST_INT8_INPUTS}", ValueError)
    given.tensor("packed", (torch.uint8,), ("tiles", "in_tiles", _TILE, _TILE_ROW_BYTES))
    _room(given, name, -(-inputs // _TILE_ROW_BYTES), _TILE_ROW_BYTES)
    rows = len(given["packed"]) * _TILE
    given.tensor("packed_scales", FLOAT32, (rows,), WHOLE)


def _pack_int8(given: Given) -> None:
    rows, _ = given.tensor("codes", (torch.int8,), ("rows", "in_features"), ROWS)
    given.tensor("scales", FLOAT32, (rows,), WHOLE)
    _int8_room(given, "codes")
    given.tensor("sums", _INT32, (len(given["packed"]) * _TILE,), WHOLE)


def _quantize_int8(given: Given) -> None:
    given.tensor("weight", FLOATS, ("rows", "in_features"), ROWS)
    _int8_room(given, "weight")


def _int8_weights(given: Given, inputs: int, tiles: int) -> None:
    sizes = (tiles, -(-inputs // _TILE_ROW_BYTES), _TILE, _TILE_ROW_BYTES)
    given.tensor("packed", (torch.uint8,), sizes, WHOLE)
    given.tensor("scales", FLOAT32, (tiles * _TILE,), WHOLE)


def _linear_int8_rows(given: Given) -> None:
    inputs = given.whole("in_features", 1, _MOST_INT8_INPUTS)
    _int8_weights(given, inputs, _tiles(given))
    given.choice("dtype", FLOATS)
    given.ids("ids", given["out_features"])


def _linear_int8(given: Given) -> None:
    rows, inputs = given.tensor("x", FLOATS, ("tokens", "in_features"))
    parts = _finish(given, rows, given["x"].dtype)
    tiles = _tiles(given, parts)
    _int8_weights(given, inputs, tiles)
    given.tensor("sums", _INT32, (tiles * _TILE,), WHOLE)
    given.whole("zero_point", -128, 127)
    scale = given["scale"]
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        given.refuse("scale", str(scale), "positive and finite, or left out", ValueError)
    zeros = given["row_zero_points"] if scale is None else given["zero_point"] != 0
    if zeros and given["sums"] is None:
        given.refuse("sums", "left out", "given where activations have zero points", ValueError)


def _matrix(given: Given, inputs: int, parts: int) -> None:
    """Check the arguments that stand for a matrix of `ops.packed`."""
    given.choice("codec", CODECS)
    given.choice("offset", OFFSETS)
    bits, group = CODECS[given["codec"]], given.whole("group", 16)
    if group != 16 and group % 32 and group < inputs:
        wanted = f"16, a multiple of 32, or {inputs} or more"
        given.refuse("group", str(group), wanted, ValueError)
    table = list(given["table"])
    entries = 16 if given["codec"] == "int4" else 0
    if len(table) != entries or not all(-128 <= value <= 127 for value in table):
        wanted = f"{entries} whole numbers from -128 to 127 for codec {given['codec']!r}"
        given.refuse("table", str(table), wanted, ValueError)
    tiles = _tiles(given, parts)
    lines = DEPTH * _TILE * bits // 8 // LINE
    given.tensor("codes", (torch.uint8,), (tiles, -(-inputs // DEPTH), lines, LINE), WHOLE)
    numbers = (tiles, num_groups(group, inputs), _TILE)
    given.tensor("scales", (torch.float16,), numbers, WHOLE)
    given.tensor("offsets", (torch.float16,), numbers, WHOLE)
    if (given["offsets"] is None) != (given["offset"] == "none"):
        found = "left out" if given["offsets"] is None else "given"
        given.refuse("offsets", found, f"as offset {given['offset']!r} says", ValueError)
    given.tensor("multipliers", FLOAT32, (tiles, _TILE), WHOLE)


def _qlinear(given: Given) -> None:
    rows, inputs = given.tensor("x", FLOATS, ("tokens", "in_features"))
    if inputs < 1:
        given.refuse("x", f"of shape {[rows, inputs]}", "at least one input wide", ValueError)
    _matrix(given, inputs, _finish(given, rows, given["x"].dtype))


def _qlinear_rows(given: Given) -> None:
    _matrix(given, given.whole("in_features", 1), 1)
    given.choice("dtype", FLOATS)
    given.ids("ids", given["out_features"])


def _rms_norm(given: Given) -> None:
    sizes = given.tensor("x", FLOATS, ("tokens", "size"))
    dtype = (given["x"].dtype,)
    given.tensor("weight", dtype, (sizes[1],), WHOLE)
    if "stream" in given.values:
        given.tensor("stream", dtype, sizes, ROWS)


def _layer_norm(given: Given) -> None:
    _, size = given.tensor("x", FLOATS, ("tokens", "size"))
    for name in ("weight", "bias"):
        given.tensor(name, (given["x"].dtype,), (size,), WHOLE)


def _rotate_heads(given: Given) -> None:
    tokens, heads, head_dim = given.tensor("heads", FLOATS, ("tokens", "heads", "head_dim"), ROWS)
    num_heads = given.whole("num_heads", 1, heads)
    dtype = (given["heads"].dtype,)
    given.tensor("weight", dtype, (num_heads, head_dim), WHOLE)
    given.together("cos", "sin")
    given.choice("style", ("neox", "interleaved"))
    if given["cos"] is None:
        return
    sizes = given.tensor("cos", dtype, (tokens, "half"), WHOLE)
    if 2 * sizes[1] > head_dim:
        wanted = f"at most {head_dim // 2} wide, half of head_dim"
        given.refuse("cos", f"{sizes[1]} wide", wanted, ValueError)
    given.tensor("sin", dtype, sizes, WHOLE)


def _embedding(given: Given) -> None:
    rows, _ = given.tensor("table", (), ("rows", "size"), WHOLE)
    given.ids("ids", rows)


def _rope_angles(given: Given) -> None:
    given.tensor("positions", INT64, ("tokens",), WHOLE)
    given.tensor("inv_freq", FLOAT32, ("half",), WHOLE)
    given.choice("dtype", FLOATS)


def _in_place(given: Given) -> None:
    given.tensor("x", FLOATS, tuple(given["x"].shape), WHOLE)


def _soft_cap(given: Given) -> None:
    given.tensor("x", FLOAT32, tuple(given["x"].shape), WHOLE)
    if not given["cap"] > 0:
        given.refuse("cap", str(given["cap"]), "positive", ValueError)


def _activate(given: Given) -> None:
    _in_place(given)
    given.choice("activation", ACTIVATIONS)


def _add(given: Given) -> None:
    _in_place(given)
    given.tensor("y", (given["x"].dtype,), tuple(given["x"].shape), WHOLE)


def _add_rows(given: Given) -> None:
    rows, size = given.tensor("table", FLOATS, ("rows", "size"), WHOLE)
    count = given.ids("ids", rows, offset=given["offset"], layout=WHOLE)
    given.tensor("x", (given["table"].dtype,), (count, size), WHOLE)


def _gather_columns(given: Given) -> None:
    _, size = given.tensor("x", FLOATS, ("rows", "size"))
    given.ids("order", size, layout=WHOLE)


def _logits(given: Given) -> tuple[int, int]:
    rows, vocab = given.tensor("logits", FLOAT32, ("rows", "vocabulary"), ROWS)
    if vocab < 1:
        found = f"of shape {[rows, vocab]}"
        given.refuse("logits", found, "of a vocabulary of 1 or more", ValueError)
    return rows, vocab


def _best_rows(given: Given) -> None:
    _logits(given)


def _draw_rows(given: Given) -> None:
    rows, _ = _logits(given)
    (count,) = given.tensor("highest", FLOAT32, ("count",), WHOLE)
    given.tensor("numbers", (torch.float64,), (count, 3), WHOLE)
    given.tensor("wholes", INT64, (count, 6), WHOLE)
    given.entries("wholes[:, 0] (rows)", given["wholes"][:, 0], rows)
    _total(given, "wholes[:, 5] (draws)", given["wholes"][:, 5], "num_draws")
    tops = _finite_tops(given)[given["wholes"][:, 0]]
    if not torch.equal(given["highest"], tops):
        found, wanted = given["highest"].tolist(), f"the highest of each row, {tops.tolist()}"
        given.refuse("highest", str(found), wanted, ValueError)
    temperatures, top_p, min_p = given["numbers"].unbind(1)
    # Under this a row has one weight that is no zero, or none: what is greedy is not drawn.
    _each(given, "numbers[:, 0] (temperatures)", temperatures, GREEDY_BELOW, math.inf)
    _each(given, "numbers[:, 1] (top_p)", top_p, torch.finfo(torch.float64).tiny, 1.0)
    _each(given, "numbers[:, 2] (min_p)", min_p, 0.0, 1.0)


def _finite_tops(given: Given) -> torch.Tensor:
    """Return the largest logit of each row; demand that it is finite, and no logit NaN."""
    tops: torch.Tensor = given["logits"].amax(1)
    if not bool(tops.isfinite().all()):
        row = int((~tops.isfinite()).nonzero()[0])
        found = f"of a largest number {float(tops[row])} in row {row}"
        given.refuse("logits", found, "finite there, and NaN nowhere", ValueError)
    return tops


def _each(given: Given, name: str, numbers: torch.Tensor, lowest: float, highest: float) -> None:
    """Demand that each number is in a range; NaN is in none."""
    wrong = ~((numbers >= lowest) & (numbers <= highest))
    if bool(wrong.any()):
        found = float(numbers[wrong][0])
        given.refuse(name, str(found), f"from {lowest} to {highest}", ValueError)


def _total(given: Given, name: str, counts: torch.Tensor, total: str) -> None:
    """Demand counts of 0 or more whose sum is the argument `total`."""
    numbers = counts.tolist()  # whole numbers of Python do not overflow
    if any(number < 0 for number in numbers):
        given.refuse(name, f"{min(numbers)} at the lowest", "0 or more each", ValueError)
    given.equal(total, sum(numbers), f"the sum of {name}")


def _score_rows(given: Given) -> None:
    rows, vocab = _logits(given)
    chosen = given.ids("chosen", vocab, layout=WHOLE)
    given.tensor("starts", INT64, (rows + 1,), WHOLE)
    given.tensor("counts", INT64, (rows,), WHOLE)
    _rising(given, "starts", given["starts"].tolist(), chosen)
    given.entries("counts", given["counts"], vocab + 1)
    _total(given, "counts", given["counts"], "num_top")
    _finite_tops(given)


def _rising(given: Given, name: str, starts: list[int], last: int) -> None:
    """Demand starts from 0 to `last` that do not fall."""
    falls = any(after < before for before, after in zip(starts, starts[1:], strict=False))
    if not starts or starts[0] != 0 or starts[-1] != last or falls:
        given.refuse(name, str(starts), f"from 0 to {last} without falling", ValueError)


def _penalize_row(given: Given) -> None:
    (vocab,) = given.tensor("logits", FLOAT32, ("vocabulary",), ROWS)
    (count,) = given.tensor("tokens", _INT32, ("count",), ANY)
    given.entries("tokens", given["tokens"], vocab)
    given.whole("num_prompt_tokens", 0, count)


def _attention(given: Given) -> None:
    tokens, heads, head_dim = given.tensor("q", FLOATS, ("tokens", "heads", "head_dim"))
    dtype = (given["q"].dtype,)
    _, kv_heads, _ = sizes = given.tensor("k", dtype, (tokens, "kv_heads", head_dim))
    given.tensor("v", dtype, sizes)
    if kv_heads < 1 or heads < 1 or heads % kv_heads or head_dim < 1:
        wanted = f"[tokens, a multiple of k's {kv_heads} heads, 1 or more]"
        given.refuse("q", f"of shape {[tokens, heads, head_dim]}", wanted, ValueError)
    block_size = given.whole("block_size", 1)
    pool = given["k_pool"].dtype
    width = int8_token_bytes(head_dim) if pool == torch.int8 else head_dim
    pools = ("blocks", kv_heads, block_size, width)
    blocks = given.tensor("k_pool", (*FLOATS, torch.int8), pools, WHOLE)[0]
    given.tensor("v_pool", (pool,), (blocks, kv_heads, block_size, width), WHOLE)
    _sequences(given, tokens, block_size, blocks)
    given.whole("window", 0)
    for name, lowest in (("scale", -math.inf), ("softcap", 0.0)):
        if not (math.isfinite(given[name]) and given[name] >= lowest):
            wanted = "finite" if name == "scale" else "0 or more, and finite"
            given.refuse(name, str(given[name]), wanted, ValueError)
    given.tensor("sinks", (*FLOATS, torch.float16, torch.float64), (heads,))


def _sequences(given: Given, tokens: int, block_size: int, blocks: int) -> None:
    """Check the sequences of an attention step, and where their tokens lie in the pools."""
    starts, computed = list(given["query_starts"]), list(given["num_computed"])
    _rising(given, "query_starts", starts, tokens)
    if len(computed) != len(starts) - 1 or any(number < 0 for number in computed):
        wanted = f"{len(starts) - 1} numbers of 0 or more, one a sequence"
        given.refuse("num_computed", str(computed), wanted, ValueError)
    _, width = given.tensor("block_tables", INT64, (len(computed), "blocks"))
    given.tensor("slots", INT64, (tokens,))
    given.entries("slots", given["slots"], blocks * block_size)
    for sequence, done in enumerate(computed):
        queries = starts[sequence + 1] - starts[sequence]
        needed = -(-(done + queries) // block_size) if queries else 0
        if needed > width:
            wanted = f"at least {needed}, for {done + queries} tokens of sequence {sequence}"
            given.refuse("block_tables", f"{width} blocks wide", wanted, ValueError)
        given.entries("block_tables", given["block_tables"][sequence, :needed], blocks)


# (operator, what it writes to, other argument) that may be one and the same tensor: of each number once.
MAY_BE_ONE = {("add_", "x", "y")}

RULES: dict[str, Callable[[Given], None]] = {
    "pack_linear": _pack_linear,
    "linear_rows": _linear_rows,
    "linear": _linear,
    "linear_add_": _linear,
    "pack_int8": _pack_int8,
    "quantize_int8": _quantize_int8,
    "linear_int8_rows": _linear_int8_rows,
    "linear_int8": _linear_int8,
    "linear_int8_add_": _linear_int8,
    "qlinear": _qlinear,
    "qlinear_add_": _qlinear,
    "qlinear_rows": _qlinear_rows,
    "rms_norm": _rms_norm,
    "rms_norm_add_": _rms_norm,
    "layer_norm": _layer_norm,
    "rotate_heads_": _rotate_heads,
    "embedding": _embedding,
    "rope_angles": _rope_angles,
    "scale_": _in_place,
    "soft_cap_": _soft_cap,
    "activate_": _activate,
    "add_": _add,
    "add_rows_": _add_rows,
    "gather_columns": _gather_columns,
    "best_rows": _best_rows,
    "draw_rows": _draw_rows,
    "score_rows": _score_rows,
    "penalize_row_": _penalize_row,
    "attention": _attention,
}
