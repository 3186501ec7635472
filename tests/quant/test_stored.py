"""Checkpoints that public packers quantized: the logits that other software computes from them.

`tests/data/quantized/make.py` packed them and computed the logits, with those packers' own dequantizing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pagemill import native
from pagemill.checkpoint import open_checkpoint
from pagemill.errors import CheckpointError
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import build_meta_model, load_model
from pagemill.worker.memory import weight_bytes
from tests.models.driver import generate, prompt_logits
from tests.models.tiny import model_config
from tests.quant.changing import CHECKPOINTS, change_settings, change_tensors, copied

# Name -> the largest difference of logits, in their standard deviations.
TOLERANCES = {
    "awq-4-g32": 5e-4,
    "awq-4-sym-g64": 5e-4,
    "ct-fp8-block": 5e-4,
    "ct-fp8-channel": 5e-4,
    "ct-fp8-static": 5e-4,
    "ct-w4a16-asym-g32": 5e-4,
    "ct-w4a16-channel": 5e-4,
    "ct-w4a16-sym-g64": 5e-4,
    "ct-w8a16-asym-channel": 5e-4,
    # The library divides the largest activation of a row by 127.5, this engine by 127.
    "ct-w8a8-dynamic": 0.4,
    "ct-w8a8-static": 5e-4,
    "ct-w8a8-static-channel": 5e-4,
    # One float32 scale a block of 64 x 32 weights, rounded to float16.
    "fp8-block": 0.1,
    "fp8-tensor": 5e-4,
    "gptq-4-act-order-g32": 5e-4,
    "gptq-4-asym-g32": 5e-4,
    "gptq-8-act-order-row": 5e-4,
    "gptq-8-sym-g64": 5e-4,
    "gptq-v2-4-asym-g64": 5e-4,
}
CPU = torch.device("cpu")
NATIVE = native.extension() is not None


def load(name: str, dtype: str = "float32") -> DecoderLM:
    """Return the model of a checkpoint of this folder."""
    checkpoint = open_checkpoint(CHECKPOINTS / name)
    method = checkpoint.config["quantization_config"]["quant_method"]
    config = model_config(checkpoint.config, quantization=method, dtype=dtype)
    dense = "native" if native.extension() is not None else "torch"
    return load_model(config, device=CPU, checkpoint=checkpoint, dense=dense)


def load_folder(folder: Path) -> DecoderLM:
    """Return the model of a changed copy."""
    checkpoint = open_checkpoint(folder)
    method = checkpoint.config["quantization_config"]["quant_method"]
    config = model_config(checkpoint.config, quantization=method)
    return load_model(config, device=CPU, checkpoint=checkpoint)


def expected(name: str) -> tuple[list[int], Tensor]:
    """Return the prompt and its logits."""
    found = load_file(CHECKPOINTS / name / "expected.safetensors")
    logits = found.get("logits_of_rounded_activations", found["logits"])
    return found["tokens"].tolist(), logits


def test_every_checkpoint_is_tested() -> None:
    assert set(TOLERANCES) == {file.parent.name for file in CHECKPOINTS.glob("*/config.json")}


@pytest.mark.parametrize("name", TOLERANCES)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_logits_are_those_of_the_packer_s_own_weights(
    name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(native, "extension", lambda: None)
    elif not NATIVE:
        pytest.skip("the native extension is not built")
    tokens, theirs = expected(name)
    ours = prompt_logits(load(name), tokens)
    assert float((ours - theirs).abs().max() / theirs.std()) < TOLERANCES[name]


@pytest.mark.skipif(not NATIVE, reason="the native extension is not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TOLERANCES)
def test_tokens_and_logprobs_do_not_depend_on_company_or_chunks(name: str, dtype: str) -> None:
    tokens, _ = expected(name)
    prompts = [tokens, tokens[3:8], [5], [*tokens[::-1], *tokens]]
    model = load(name, dtype)
    whole = generate(model, prompts, 6, attention="cpu")
    for prompt, run in zip(prompts, whole, strict=True):
        (alone,) = generate(model, [prompt], 6, chunk=1, attention="cpu")
        assert (alone.new_ids, alone.logprobs) == (run.new_ids, run.logprobs)


@pytest.mark.parametrize("name", TOLERANCES)
def test_the_plan_counts_what_is_resident_and_nothing_waits(name: str) -> None:
    checkpoint = open_checkpoint(CHECKPOINTS / name)
    method = checkpoint.config["quantization_config"]["quant_method"]
    config = model_config(checkpoint.config, quantization=method)
    model = load(name)
    dense = "native" if NATIVE else "torch"
    assert weight_bytes(build_meta_model(config, dense=dense)) == weight_bytes(model)
    plain = model_config({**checkpoint.config, "quantization_config": None})
    assert weight_bytes(model) < 0.75 * weight_bytes(build_meta_model(plain, dense=dense))
    made_up = model_config(checkpoint.config, quantization=method, load_format="dummy")
    dummy = load_model(made_up, device=CPU, checkpoint=None, dense=dense)
    logits = prompt_logits(dummy, [1, 2, 3])
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0.01


def test_columns_in_another_order_are_gathered_once_a_layer() -> None:
    layer: Any = load("gptq-4-act-order-g32").layers[0]
    for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
        order = linear.order.tolist()
        assert sorted(order) == list(range(len(order))) != order


def test_what_a_configuration_leaves_out_stays_plain(tmp_path: Path) -> None:
    """The up projection of one layer is plain beside a quantized gate."""
    folder = copied("ct-w8a16-asym-channel", tmp_path)
    name = "model.layers.0.mlp.up_proj"
    change_settings(folder, ignore=["lm_head", name])

    def widen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {n: t for n, t in tensors.items() if not n.startswith(f"{name}.")}
        return {**kept, f"{name}.weight": torch.zeros(192, 128, dtype=torch.bfloat16)}

    change_tensors(folder, widen)
    model = load_folder(folder)
    x = torch.randn(3, 128)
    mlp: Any = model.layers[0].mlp
    assert torch.equal(mlp.gate_up.forward(x), torch.zeros(3, 192))
    gate = mlp.gate_up.quant.apply(mlp.gate_up, x)[:, :192]
    assert float(gate.std()) > 0.1


def test_biases_of_zeros_for_layers_without_one_are_taken(tmp_path: Path) -> None:
    folder = copied("gptq-4-asym-g32", tmp_path)
    name = "model.layers.0.self_attn.o_proj.bias"
    change_tensors(folder, lambda tensors: {**tensors, name: torch.zeros(128)})
    load_folder(folder)
    change_tensors(folder, lambda tensors: {**tensors, name: torch.ones(128)})
    with pytest.raises(CheckpointError, match=r"o_proj\.bias holds numbers other than 0"):
        load_folder(folder)
