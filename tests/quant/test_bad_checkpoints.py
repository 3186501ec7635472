"""Quantized checkpoints that are wrong: each is refused with what is wrong, where, and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.errors import CheckpointError
from pagemill.quant import CHECKPOINT_SCHEMES
from pagemill.quant.base import LayerPart, ModuleName
from tests.quant.changing import change_settings, change_tensors, copied
from tests.quant.test_stored import load_folder

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}

# A scale that is not finite would make every answer of the model an error that names no tensor.
NAN = float("nan")
NOT_FINITE = r"layers\.0\.self_attn\.q_proj: the scales of rows 0 to .* hold NaN or infinity"


def tensors_of(weights: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """Return a compressed-tensors configuration with one group."""
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **(weights or {})}}
    for key in ("input_activations", "output_activations"):
        if key in keys:
            group[key] = keys.pop(key)
    whole = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {**whole, "config_groups": {"group_0": group}, **keys}


def with_nan(weight: Tensor) -> Tensor:
    """Return float8 numbers of which one is NaN."""
    codes = weight.view(torch.uint8).clone()
    codes[3, 5] = 0xFF
    return codes.view(weight.dtype)


def scheme(config: dict[str, Any]) -> Any:
    return CHECKPOINT_SCHEMES.load(config["quant_method"])(config)


def part(rows: int = 64, name: str = "layers.0.mlp.up_proj") -> LayerPart:
    return LayerPart(ModuleName(name, (name, f"model.{name}")), 0, rows)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GPTQ, "bits": 3}, r"\(gptq\): bits is 3; supported: 4, 8"),
        ({**GPTQ, "bits": "4"}, r"bits is '4'"),
        ({**GPTQ, "bits": None}, r"bits is None"),
        ({**GPTQ, "bits": 0}, r"bits is 0; supported: 4, 8"),
        ({**AWQ, "bits": -4}, r"bits is -4; supported: 4"),
        (tensors_of({"num_bits": 0}), r"num_bits is 0; supported: 4, 8"),
        ({**GPTQ, "group_size": 48}, r"group_size is 48; it must be 16, a multiple of 32, or -1"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**AWQ, "group_size": -32}, "group_size is -32; it must be 16"),
        (tensors_of({"group_size": -2}), "group_size is -2; it must be 16"),
        ({**GPTQ, "group_size": 2.5}, "group_size is 2.5"),
        ({**GPTQ, "sym": "yes"}, "sym is 'yes'; supported: True, False"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: 'gptq'"),
        ({**GPTQ, "dynamic": {"+:q_proj": {"bits": 8}}}, "dynamic is '\\+:q_proj'; only rules that leave"),
        ({**GPTQ, "modules_to_not_convert": "lm_head"}, "it must be a list of module names"),
        ({**AWQ, "bits": 8}, r"\(awq\): bits is 8; supported: 4"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; supported: 'gemm'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; supported: 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two"),
        ({"quant_method": "fp8", "weight_block_size": [8, 40]}, r"weight_block_size\[1\] is 40"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]; it must be two"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        (tensors_of(format="marlin-24"), "format is 'marlin-24'; supported: pack-quantized"),
        (tensors_of({"num_bits": 3}), r"config_groups.group_0.weights\): num_bits is 3; supported: 4, 8"),
        (tensors_of({"strategy": "tensor_group"}), "strategy is 'tensor_group'; supported: 'tensor'"),
        (tensors_of({"strategy": "block"}), "strategy is 'block'; blocks are supported for float8"),
        (tensors_of({"group_size": None}), "group_size is None"),
        (tensors_of(config_groups={}), "config_groups is {}"),
        (tensors_of(config_groups={"a": 1}), "config_groups.a is 1"),
        (tensors_of(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is 'sparse-24"),
        (tensors_of(transform_config={"config_groups": {}}), "transforms are not supported"),
        (tensors_of(ignore=["re:("]), "no regular expression"),
        (tensors_of(output_activations={"num_bits": 8}), "output_activations is .*; supported: null"),
        (
            tensors_of({"num_bits": 8, "strategy": "channel"}, format="int-quantized",
                       input_activations={"num_bits": 8, "dynamic": True, "strategy": "tensor"}),
            "strategy is 'tensor'; supported: 'token'; scales are fixed, or of one token each",
        ),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_supported_is_refused_by_name(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        scheme(config).matrix(part(), 128)


@pytest.mark.parametrize(
    ("config", "rows", "columns", "words"),
    [
        (GPTQ, 64, 96, "layers.0.mlp.up_proj has 96 inputs, which group_size 64"),
        (AWQ, 64, 96, "has 96 inputs, which group_size 64"),
        (tensors_of(), 64, 96, "has 96 inputs, which group_size 64"),
        (GPTQ, 60, 64, "has 60 outputs; 8 codes"),
        (AWQ, 60, 64, "has 60 outputs; AWQ puts 8 into a word"),
    ],
)
def test_sizes_that_groups_or_words_do_not_divide_are_refused(
    config: dict[str, Any], rows: int, columns: int, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        scheme(config).matrix(part(rows), columns)


def test_modules_are_left_out_as_their_writers_mean_it() -> None:
    name = "layers.0.mlp.up_proj"
    for left_out in (["up_proj"], ["model.layers.0"], ["layers.0.mlp"], [f"model.{name}"]):
        assert scheme({**AWQ, "modules_to_not_convert": left_out}).matrix(part(), 64) is None
    for left_out in (["proj"], ["layers.0.m"], ["layers.1"]):
        assert scheme({**AWQ, "modules_to_not_convert": left_out}).matrix(part(), 64) is not None
    assert scheme({**GPTQ, "dynamic": {r"-:.*\.up_proj": {}}}).matrix(part(), 64) is None
    for left_out in (["re:.*up_proj$"], [f"model.{name}"]):
        assert scheme(tensors_of(ignore=left_out)).matrix(part(), 64) is None
    assert scheme(tensors_of(ignore=["up_proj"])).matrix(part(), 64) is not None
    head = part(name="lm_head")
    assert scheme(GPTQ).matrix(head, 64) is None
    assert scheme({**GPTQ, "lm_head": True}).matrix(head, 64) is not None
    assert scheme(tensors_of()).matrix(head, 64) is not None


@pytest.mark.parametrize("pattern", ["(", "(" * 5000, "a{99999999999999999999}", "[z-a]", "\\"])
def test_a_pattern_that_is_no_regular_expression_is_refused_by_name(pattern: str) -> None:
    for config in (
        {**AWQ, "modules_to_not_convert": [f"re:{pattern}"]},
        {**GPTQ, "dynamic": {f"-:{pattern}": {}}},
        tensors_of(ignore=[f"re:{pattern}"]),
    ):
        with pytest.raises(CheckpointError, match="which is no regular expression"):
            scheme(config).matrix(part(), 64)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "words"),
    [
        ("gptq-4-asym-g32", "qweight", lambda t: t[:-1], r"qweight is \[15, 128\], needed \[16, 128\]"),
        ("gptq-4-asym-g32", "scales", lambda t: None, "missing: 1 .*q_proj.scales"),
        ("gptq-4-asym-g32", "qzeros", lambda t: t.float(), "qzeros is F32, needed I32"),
        ("gptq-8-sym-g64", "qzeros", lambda t: t + 1, "zero point 129, but .* says sym, which means 128"),
        ("gptq-4-asym-g32", "g_idx", lambda t: t + 1, "names the groups 1 to 4 in g_idx"),
        ("gptq-4-asym-g32", "g_idx", lambda t: t * 0, "has 128 inputs of group 0 in g_idx; each"),
        ("gptq-4-act-order-g32", "g_idx", lambda t: None, r"missing: 1 .*q_proj\.g_idx"),
        ("gptq-4-act-order-g32", "g_idx", lambda t: t[:-1], r"g_idx is \[127\], needed \[128\]"),
        ("gptq-4-act-order-g32", "g_idx", lambda t: t - 1, "names the groups -1 to 2 in g_idx"),
        ("gptq-4-act-order-g32", "g_idx", lambda t: t + 2**30, "names the groups 1073741824 to 1073741827"),
        ("gptq-4-act-order-g32", "scales", lambda t: t[:-1], r"scales is \[3, 128\], needed \[4, 128\]"),
        ("awq-4-g32", "qzeros", lambda t: None, "missing: 1 .*q_proj.qzeros"),
        ("awq-4-g32", "scales", lambda t: t[:, 1:], "scales is .*, needed"),
        ("awq-4-sym-g64", "qzeros", lambda t: t * 0, "zero point 0, but .* zero_point false"),
        ("ct-w4a16-sym-g64", "weight_shape", lambda t: t + 1, r"weight_shape is \[129, 129\], needed"),
        ("ct-w4a16-sym-g64", "weight_packed", lambda t: t.to(torch.int8), "is I8, needed I32"),
        ("ct-w4a16-sym-g64", "weight_scale", lambda t: None, "missing: 1 .*weight_scale"),
        ("ct-w4a16-sym-g64", "weight_scale", lambda t: t[:, :-1], r"is \[128, 1\], needed \[128, 2\]"),
        ("ct-w8a8-static", "input_scale", lambda t: t * 0, "scale of activations is 0.0"),
        ("fp8-block", "weight_scale_inv", lambda t: None, "neither weight_scale nor weight_scale_inv"),
        ("fp8-block", "weight_scale_inv", lambda t: t[:, :-1], r"is \[2, 3\], needed \[2, 4\]"),
        ("fp8-block", "weight", lambda t: t.to(torch.int8), "is I8, needed F8_E4M3"),
        ("gptq-4-asym-g32", "scales", lambda t: t * NAN, NOT_FINITE),
        ("awq-4-g32", "scales", lambda t: t / 0, NOT_FINITE),
        ("ct-w4a16-sym-g64", "weight_scale", lambda t: t * NAN, NOT_FINITE),
        ("ct-w8a8-dynamic", "weight_scale", lambda t: t / 0, NOT_FINITE),
        ("fp8-block", "weight_scale_inv", lambda t: t * NAN, NOT_FINITE),
        ("fp8-block", "weight", with_nan, r"q_proj: the float8 weights of rows 0 to 127 hold NaN"),
        ("ct-fp8-channel", "weight", with_nan, r"q_proj: the float8 weights of rows 0 to 127 hold NaN"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_wrong_is_refused_by_name(
    name: str, tensor: str, change: Any, words: str, tmp_path: Path
) -> None:
    folder, key = copied(name, tmp_path), f"model.layers.0.self_attn.q_proj.{tensor}"

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        new = change(tensors.pop(key))
        return tensors if new is None else {**tensors, key: new}

    change_tensors(folder, spoil)
    with pytest.raises(CheckpointError, match=words):
        load_folder(folder)


@pytest.mark.parametrize(
    ("in_order", "reordered"),
    [
        (GPTQ, {**GPTQ, "desc_act": True}),
        (tensors_of({"actorder": "weight"}), tensors_of({"actorder": "group"})),
    ],
)
def test_the_order_of_columns_may_be_missing_only_where_it_says_nothing(
    in_order: dict[str, Any], reordered: dict[str, Any]
) -> None:
    def needs_order(config: dict[str, Any], columns: int) -> bool:
        wanted = scheme(config).matrix(part(), columns).wanted()
        return any(word.endswith("g_idx") and not one.optional for word, one in wanted.items())

    assert needs_order(reordered, 128)
    assert not needs_order(reordered, 64)  # one group
    assert not needs_order(in_order, 128)


def test_a_checkpoint_read_by_another_format_s_name_is_refused_with_its_tensors(
    tmp_path: Path,
) -> None:
    folder = copied("awq-4-g32", tmp_path)
    change_settings(folder, quant_method="gptq")
    with pytest.raises(CheckpointError, match=r"qweight is \[128, 16\], needed \[16, 128\]"):
        load_folder(folder)


@settings(deadline=None, max_examples=60)
@given(
    method=st.sampled_from(sorted(CHECKPOINT_SCHEMES)),
    config=st.dictionaries(
        st.sampled_from(
            ["bits", "group_size", "sym", "desc_act", "config_groups", "format", "ignore", "types",
             "weight_block_size", "modules_to_not_convert", "dynamic", "version", "zero_point"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["weights", "targets", "num_bits", "a"]), inner),
            max_leaves=6,
        ),
    ),
)  # fmt: skip
def test_any_settings_are_read_or_refused(method: str, config: dict[str, Any]) -> None:
    try:
        scheme({**config, "quant_method": method}).matrix(part(), 128)
    except CheckpointError as error:
        assert len(str(error)) > 20
