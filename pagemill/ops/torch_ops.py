"""The native operations as torch custom operators, `torch.ops.pagemill.*`: for compile and profilers.

Serving calls the extension directly (`ops.cpu`, `attention.cpu`): a custom operator costs tens of microseconds
a call. Whoever wants a profile to show these operations, or torch.compile to keep them whole, calls
`register()` once; importing pagemill and starting an engine do not. An operator is a schema, a function that
computes and one that gives the result's shape and dtype without data. They follow torch's rules: what is
written to is marked in the schema, and a result is never one of the arguments. Before an operator
computes, `operator_rules` looks at every argument: the kernels believe what they are told. What is written
to must lie apart from all other arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill import native
from pagemill.errors import NotSupportedError
from pagemill.ops.operator_checks import Given
from pagemill.ops.operator_rules import MAY_BE_ONE, RULES

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of `torch.ops.pagemill`."""

    schema: str  # its name first
    compute: Callable[..., Any]
    fake: Callable[..., Any]  # the same arguments; an empty result

    @property
    def name(self) -> str:
        """Return the operator's name."""
        return self.schema.partition("(")[0]


def register() -> tuple[str, ...]:
    """Make `torch.ops.pagemill.*` known to torch; return the names. Further calls do nothing more.

    Raises NotSupportedError where the extension is not built.
    """
    if native.extension() is None:
        raise NotSupportedError(f"torch.ops.pagemill needs the native kernels, but {native.LOST}")
    return _registered()[1]


@functools.cache
def _registered() -> tuple[Any, tuple[str, ...]]:
    """Register once; the library must live as long as its operators."""
    make: Any = torch.library.Library  # it has no types
    library = make("pagemill", "DEF")
    operators = _operators()
    for operator in operators:
        library.define(operator.schema)
        library.impl(operator.name, _checked(operator), "CPU")
        torch.library.register_fake(f"pagemill::{operator.name}", operator.fake, lib=library)
    return library, tuple(operator.name for operator in operators)


def _checked(operator: Operator) -> Callable[..., Any]:
    """Return the operator's function behind its rules, with the schema's defaults filled in.

    Torch leaves out trailing arguments that have their defaults. A wrong argument ends in a TypeError or a
    ValueError before a kernel sees it.
    """
    arguments = torch._C.parse_schema(f"pagemill::{operator.schema}").arguments
    names = [argument.name for argument in arguments]
    defaults = [argument.default_value for argument in arguments]
    written = [argument.name for argument in arguments if _is_written(argument)]
    rule = RULES[operator.name]

    def call(*given: Any) -> Any:
        complete = (*given, *defaults[len(given) :])
        by_name = Given(operator.name, dict(zip(names, complete, strict=True)))
        rule(by_name)
        for name in written:
            for other in names:
                if other != name:
                    one = (operator.name, name, other) in MAY_BE_ONE
                    by_name.apart(name, other, or_one=one)
        return operator.compute(*complete)

    return call


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _operators() -> tuple[Operator, ...]:
    return (*_dense(), *_int8(), *_packed(), *_small(), *_sampling(), _attention_operator())


def _dense() -> tuple[Operator, ...]:
    from pagemill.ops import cpu  # needs the extension, as all modules of native operations

    return (
        Operator(
            "pack_linear(Tensor weight, Tensor(a!) packed, int tile_first=0, int tile_step=1) -> ()",
            _with_keywords(cpu.pack_linear, 2, "tile_first", "tile_step"),
            _nothing,
        ),
        Operator(
            "linear_rows(Tensor ids, Tensor packed, SymInt out_features, SymInt in_features) -> Tensor",
            cpu.linear_rows,
            lambda ids, packed, _, k: packed.new_empty(ids.shape[0], k),
        ),
        Operator(
            "linear(Tensor x, Tensor packed, SymInt out_features, Tensor? bias=None, "
            "str? gate=None, ScalarType? out_dtype=None) -> Tensor",
            _with_keywords(cpu.linear, 4, "gate", "out_dtype"),
            _empty_linear,
        ),
        Operator(
            "linear_add_(Tensor(a!) stream, Tensor x, Tensor packed, SymInt out_features, "
            "Tensor? bias=None) -> ()",
            lambda stream, *more: _dropped(cpu.linear(*more, residual=stream)),
            _nothing,
        ),
    )


def _int8() -> tuple[Operator, ...]:
    from pagemill.ops import cpu_int8
    from pagemill.ops.reference import Int8Rounding

    def linear_int8(
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        out_features: int,
        bias: Tensor | None = None,
        sums: Tensor | None = None,
        scale: float | None = None,
        zero_point: int = 0,
        row_zero_points: bool = False,
        **more: Any,
    ) -> Tensor:
        how = Int8Rounding(scale, zero_point, row_zero_points)
        return cpu_int8.linear_int8(
            x, packed, scales, out_features, bias, sums=sums, how=how, **more
        )

    arguments = (
        "Tensor x, Tensor packed, Tensor scales, SymInt out_features, Tensor? bias=None, "
        "Tensor? sums=None, float? scale=None, int zero_point=0, bool row_zero_points=False"
    )
    return (
        Operator(
            "pack_int8(Tensor codes, Tensor scales, Tensor(a!) packed, Tensor(b!) packed_scales, "
            "Tensor(c!)? sums=None, int tile_first=0, int tile_step=1) -> ()",
            _with_keywords(cpu_int8.pack, 5, "tile_first", "tile_step"),
            _nothing,
        ),
        Operator(
            "quantize_int8(Tensor weight, Tensor(a!) packed, Tensor(b!) packed_scales, "
            "int tile_first=0, int tile_step=1) -> ()",
            _with_keywords(cpu_int8.quantize, 3, "tile_first", "tile_step"),
            _nothing,
        ),
        Operator(
            "linear_int8_rows(Tensor ids, Tensor packed, Tensor scales, SymInt out_features, "
            "SymInt in_features, ScalarType dtype) -> Tensor",
            lambda ids, packed, scales, n, k, dtype: cpu_int8.linear_int8_rows(
                ids, packed, scales, (n, k), dtype
            ),
            lambda ids, packed, scales, n, k, dtype: scales.new_empty(ids.shape[0], k, dtype=dtype),
        ),
        Operator(
            f"linear_int8({arguments}, str? gate=None, ScalarType? out_dtype=None) -> Tensor",
            _with_keywords(linear_int8, 9, "gate", "out_dtype"),
            lambda x, packed, scales, n, *more: x.new_empty(
                x.shape[0], n, dtype=(more[6] if len(more) > 6 else None) or x.dtype
            ),
        ),
        Operator(
            f"linear_int8_add_(Tensor(a!) stream, {arguments}) -> ()",
            lambda stream, *more: _dropped(linear_int8(*more, residual=stream)),
            _nothing,
        ),
    )


def _packed() -> tuple[Operator, ...]:
    """Operators on packed matrices (ops.packed), which are given as their tensors and format."""
    from pagemill.ops.cpu_quant import NativeProduct
    from pagemill.ops.packed import PackedFormat, PackedMatrix

    def product(*given: Any) -> NativeProduct:
        codes, scales, offsets, multipliers, codec, group, offset, table, n, k, parts = given
        form = PackedFormat(codec, group, offset, tuple(table))
        return NativeProduct(
            PackedMatrix(form, n * parts, k, parts, codes, scales, offsets, multipliers)
        )

    def qlinear(
        x: Tensor,
        *given: Any,
        bias: Tensor | None = None,
        gate: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        matrix = product(*given[:9], x.shape[1], 1 if gate is None else 2)
        return matrix.apply(x, bias, gate=gate, out_dtype=out_dtype)

    matrix = (
        "Tensor codes, Tensor scales, Tensor? offsets, Tensor multipliers, str codec, int group, "
        "str offset, int[] table, SymInt out_features"
    )
    return (
        Operator(
            f"qlinear(Tensor x, {matrix}, Tensor? bias=None, str? gate=None, "
            "ScalarType? out_dtype=None) -> Tensor",
            _with_keywords(qlinear, 10, "bias", "gate", "out_dtype"),
            lambda x, *more: x.new_empty(
                x.shape[0], more[8], dtype=(more[11] if len(more) > 11 else None) or x.dtype
            ),
        ),
        Operator(
            f"qlinear_add_(Tensor(a!) stream, Tensor x, {matrix}, Tensor? bias=None) -> ()",
            lambda stream, x, *more: _dropped(
                product(*more[:9], x.shape[1], 1).apply(x, *more[9:], residual=stream)
            ),
            _nothing,
        ),
        Operator(
            f"qlinear_rows(Tensor ids, {matrix}, SymInt in_features, ScalarType dtype) -> Tensor",
            lambda ids, *more: product(*more[:10], 1).rows(ids, more[10]),
            lambda ids, *more: more[3].new_empty(ids.shape[0], more[9], dtype=more[10]),
        ),
    )


def _small() -> tuple[Operator, ...]:
    from pagemill.ops import cpu_layers
    from pagemill.ops.base import HeadNorm, Rotation

    def rotate_heads(
        heads: Tensor,
        num_heads: int,
        weight: Tensor | None = None,
        eps: float = 0.0,
        offset: float = 0.0,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        style: str = "neox",
    ) -> None:
        norm = None if weight is None else HeadNorm(weight, eps, offset)
        turn = None if cos is None or sin is None else Rotation(cos, sin, style)
        cpu_layers.rotate_heads(heads, num_heads, norm, turn)

    return (
        Operator(
            "rms_norm(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor",
            _with_keywords(cpu_layers.rms_norm, 3, "offset"),
            _like_rows,
        ),
        Operator(
            "rms_norm_add_(Tensor(a!) stream, Tensor x, Tensor weight, float eps, "
            "float offset=0.0) -> ()",
            lambda stream, x, weight, eps, offset=0.0: _dropped(
                cpu_layers.rms_norm(x, weight, eps, offset=offset, residual=stream)
            ),
            _nothing,
        ),
        Operator(
            "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
            cpu_layers.layer_norm,
            _like_rows,
        ),
        Operator(
            "rotate_heads_(Tensor(a!) heads, int num_heads, Tensor? weight=None, float eps=0.0, "
            'float offset=0.0, Tensor? cos=None, Tensor? sin=None, str style="neox") -> ()',
            rotate_heads,
            _nothing,
        ),
        Operator(
            "embedding(Tensor ids, Tensor table) -> Tensor",
            cpu_layers.embedding,
            lambda ids, table: table.new_empty(ids.shape[0], table.shape[1]),
        ),
        Operator(
            "rope_angles(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype) "
            "-> (Tensor, Tensor)",
            cpu_layers.angles,
            lambda positions, inv_freq, scaling, dtype: tuple(
                inv_freq.new_empty(len(positions), len(inv_freq), dtype=dtype) for _ in range(2)
            ),
        ),
        Operator(
            "scale_(Tensor(a!) x, float factor) -> ()",
            lambda x, factor: _dropped(cpu_layers.scale(x, factor)),
            _nothing,
        ),
        Operator(
            "soft_cap_(Tensor(a!) x, float cap) -> ()",
            lambda x, cap: _dropped(cpu_layers.soft_cap(x, cap)),
            _nothing,
        ),
        Operator(
            "activate_(Tensor(a!) x, str activation) -> ()",
            lambda x, activation: _dropped(cpu_layers.activate(x, activation)),
            _nothing,
        ),
        Operator(
            "add_(Tensor(a!) x, Tensor y) -> ()",
            lambda x, y: _dropped(cpu_layers.add(x, y)),
            _nothing,
        ),
        Operator(
            "add_rows_(Tensor(a!) x, Tensor ids, int offset, Tensor table) -> ()",
            lambda x, ids, offset, table: _dropped(cpu_layers.add_rows(x, ids, offset, table)),
            _nothing,
        ),
        Operator(
            "gather_columns(Tensor x, Tensor order) -> Tensor",
            cpu_layers.gather_columns,
            lambda x, order: x.new_empty(x.shape[0], order.shape[0]),
        ),
    )


def _sampling() -> tuple[Operator, ...]:
    """Operators that choose tokens. Sizes that hang on data are arguments: num_draws, num_top."""
    from pagemill.ops import cpu_sampling

    def on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            arrays = [a.numpy() if isinstance(a, Tensor) else a for a in arguments]
            result = function(*arrays)
            if isinstance(result, tuple):
                return tuple(torch.from_numpy(array) for array in result)
            return None if result is None else torch.from_numpy(result)

        return call

    return (
        Operator(
            "best_rows(Tensor logits) -> (Tensor, Tensor)",
            on_arrays(cpu_sampling.best_rows),
            lambda logits: (
                logits.new_empty(logits.shape[0], dtype=torch.int64),
                logits.new_empty(logits.shape[0]),
            ),
        ),
        Operator(
            "draw_rows(Tensor logits, Tensor highest, Tensor numbers, Tensor wholes, "
            "SymInt num_draws) -> Tensor",
            on_arrays(lambda *arguments: cpu_sampling.draw_rows(*arguments[:4])),
            lambda logits, highest, numbers, wholes, count: wholes.new_empty(count),
        ),
        Operator(
            "score_rows(Tensor logits, Tensor chosen, Tensor starts, Tensor counts, "
            "SymInt num_top) -> (Tensor, Tensor, Tensor)",
            on_arrays(lambda *arguments: cpu_sampling.score_rows(*arguments[:4])),
            lambda logits, chosen, starts, counts, num_top: (
                logits.new_empty(logits.shape[0], dtype=torch.float64),
                torch.empty_like(chosen),
                chosen.new_empty(num_top),
            ),
        ),
        Operator(
            "penalize_row_(Tensor(a!) logits, Tensor tokens, int num_prompt_tokens, "
            "float repetition=1.0, float frequency=0.0, float presence=0.0) -> ()",
            on_arrays(
                _with_keywords(cpu_sampling.penalize_row, 3, "repetition", "frequency", "presence")
            ),
            _nothing,
        ),
    )


def _like_rows(x: Tensor, *_: Any) -> Tensor:
    """Give the result of an operator whose rows are x's."""
    return x.new_empty(x.shape)


def _attention_operator() -> Operator:
    return Operator(
        "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, "
        "int[] query_starts, int[] num_computed, Tensor block_tables, Tensor slots, "
        "int block_size, float scale, float softcap=0.0, int window=0, Tensor? sinks=None) "
        "-> Tensor",
        _attention,
        lambda q, *_: q.new_empty(q.shape),
    )


def _dropped(_: Tensor) -> None:
    """Give no result: an operator's may not be one of its arguments."""


def _with_keywords(function: Callable[..., Any], count: int, *names: str) -> Callable[..., Any]:
    """Return the function with the arguments after the first `count` taken by place."""

    def call(*arguments: Any) -> Any:
        return function(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))

    return call


def _nothing(*_: Any) -> None:
    """Give the result of an operator that writes into its arguments."""


def _empty_linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=out_dtype or x.dtype)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    query_starts: Sequence[int],
    num_computed: Sequence[int],
    block_tables: Tensor,
    slots: Tensor,
    block_size: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write k and v [num_tokens, kv_heads, head_dim] to the pools, then attend; see csrc/attention."""
    extension = native.required()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    block_tables, slots = block_tables.contiguous(), slots.contiguous()
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    plan = extension.AttentionPlan(
        query_starts,
        num_computed,
        block_tables.data_ptr(),
        block_tables.shape[1],
        slots.data_ptr(),
        block_size,
        0,
    )
    out = torch.empty(q.shape, dtype=q.dtype)
    scratch = torch.empty(0, dtype=torch.uint8)
    while True:
        needed = extension.attention(
            plan, q.shape[1], k.shape[1], q.shape[2], scale, softcap, window,
            _DTYPES[q.dtype], _DTYPES[k_pool.dtype],
            q.data_ptr(), *q.stride()[:2], k.data_ptr(), *k.stride()[:2],
            v.data_ptr(), *v.stride()[:2], k_pool.data_ptr(), v_pool.data_ptr(), k_pool.shape[0],
            0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
            scratch.data_ptr(), scratch.numel(),
        )  # fmt: skip
        if not needed:
            return out
        scratch = torch.empty(needed, dtype=torch.uint8)
