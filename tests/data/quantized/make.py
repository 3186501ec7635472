"""Writes the quantized checkpoints beside this file with the packers that models in the wild come from.

    python -m venv packers
    packers/bin/pip install gptqmodel==7.7.0 auto-round==0.16.1 compressed-tensors==0.20.1 accelerate
    GPTQMODEL_CPU_WORKERS=2 packers/bin/python tests/data/quantized/make.py [NAME ...]

(`versions.json` has the versions it was last run with.) Every checkpoint is packed by one of those packages, or by transformers. Beside it `expected.safetensors`
has logits of one prompt in float32: transformers' own model over weights that the same packages
dequantize from the saved file. Nothing of pagemill is used. The models are tiny and random.

With `PACK_MODEL=FOLDER PACK_TO=FOLDER` the checkpoints are of that model instead, in bfloat16, for measuring what a format costs; no logits are
computed then. Weights are rounded to the nearest value, except in `gptq-*-act-order-*` and `gptq-v2-*`, which run GPTQ. What is calibrated
(GPTQ, and fixed scales of activations) is so on random tokens, or on text that PACK_MODEL itself makes.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor

HERE = Path(__file__).parent
PACKAGES = ("torch", "transformers", "gptqmodel", "auto-round", "compressed-tensors")
PROMPT = [1, 17, 101, 60, 33, 90, 5, 44, 7, 77, 120, 99, 64, 12, 50, 28]
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
State = dict[str, Tensor]
MODEL = os.environ.get("PACK_MODEL")  # a folder; else a tiny random model
TO = Path(os.environ.get("PACK_TO", HERE))


def base(kind: str = "Llama") -> Any:
    """Return a random model whose weights are large enough to matter, in float32; or the one to pack."""
    if MODEL:
        return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.3 * noise
            elif parameter.dim() == 1:
                noise = 0.3 * noise
            elif "embed" not in name:
                # Not centred, so that zero points differ, and some columns larger than others.
                noise = (noise + 0.2) * 2.0 / parameter.shape[1] ** 0.5
                noise *= 1 + torch.arange(parameter.shape[1]) % 7
            parameter.copy_(noise)
    return model


def tokenizer() -> Any:
    """Return a tokenizer for packages that will not work without one."""
    if MODEL:
        return transformers.AutoTokenizer.from_pretrained(MODEL)
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", pad_token="w0"
    )


def calibration_tokens() -> Tensor:
    """Return rows of tokens: random ones, or what the model to pack says when it begins with nothing."""
    if not MODEL:
        generator = torch.Generator().manual_seed(5)
        return torch.randint(3, SIZES["vocab_size"], (24, 64), generator=generator)
    model = base()
    torch.manual_seed(5)
    start = torch.full((48, 1), model.config.bos_token_id)
    return model.generate(start, do_sample=True, min_new_tokens=127, max_new_tokens=127, top_k=0)


def largest_inputs(model: Any) -> dict[str, float]:
    """Return the largest absolute input of each linear module, over the tokens to calibrate with."""
    found: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[Tensor]) -> None:
            found[name] = max(found.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    hooks = [
        module.register_forward_pre_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        for rows in calibration_tokens().split(8):
            model(rows)
    for hook in hooks:
        hook.remove()
    return found


# ---------------------------------------------------------------- packing


def by_auto_round(folder: Path, format: str, kind: str = "Llama", **scheme: Any) -> None:
    """Round to nearest and export."""
    from auto_round import AutoRound

    model = base(kind).to(torch.bfloat16)
    packer = AutoRound(
        model, tokenizer(), iters=0, disable_opt_rtn=True, device_map="cpu", **scheme
    )
    packer.quantize_and_save(str(folder), format=format)


def by_gptqmodel(folder: Path, kind: str = "Llama", **settings: Any) -> None:
    """Run GPTQ itself on random tokens."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    rows = calibration_tokens().tolist()
    calibration = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    with tempfile.TemporaryDirectory() as plain:
        base(kind).to(torch.bfloat16).save_pretrained(plain)
        tokenizer().save_pretrained(plain)
        config = QuantizeConfig(device="cpu", **settings)
        model = GPTQModel.load(plain, config, backend=BACKEND.TORCH, dtype=torch.bfloat16)
        model.quantize(calibration, batch_size=1, backend=BACKEND.TORCH)
        model.save(str(folder))


def by_compressed_tensors(folder: Path, **config: Any) -> None:
    """Compress with the library alone; scales from the largest numbers (made up where there is no text)."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = base()
    largest = largest_inputs(model) if MODEL else {}
    model = model.to(torch.bfloat16)
    settings = QuantizationConfig(ignore=["lm_head"], **config)
    apply_quantization_config(model, settings)
    generator = torch.Generator().manual_seed(9)
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        low, high = _bounds(module.weight.float(), scheme.weights)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if not scheme.weights.symmetric:
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            made_up = 0.05 + 0.01 * float(torch.rand((), generator=generator))
            limit = 127 if scheme.input_activations.type == "int" else 448
            module.input_scale.data.fill_(largest[name] / limit if MODEL else made_up)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _bounds(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    if args.strategy == "group":
        groups = weight.reshape(len(weight), -1, args.group_size)
        return groups.amin(-1), groups.amax(-1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.reshape(len(weight) // rows, rows, -1, columns)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    return weight.min().reshape(1), weight.max().reshape(1)


def by_transformers_fp8(folder: Path, blocks: list[int] | None) -> None:
    """Round to float8 with transformers' own operation."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Holder:
        quantization_config = transformers.FineGrainedFP8Config(weight_block_size=blocks)

    model = base().to(torch.bfloat16)
    state: State = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        quantized = ".layers." in name and name.endswith("_proj.weight")
        state.update(Fp8Quantize(Holder()).convert({name: tensor}) if quantized else {name: tensor})
    model.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if blocks is not None:
        settings["weight_block_size"] = blocks  # type: ignore[assignment]
    else:  # as other writers name one scale a matrix
        settings["ignored_layers"] = ["lm_head"]  # type: ignore[assignment]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


# ---------------------------------------------------------------- dequantizing, by others


def dequantized_words(config: dict[str, Any], part: State, name: str) -> Tensor:
    """Return the weight of GPTQ or AWQ tensors, [out, in] float32, by GPTQModel's torch kernels."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    awq = config["quant_method"] == "awq"
    rows = part["scales"].shape[1]
    columns = part["qweight"].shape[0] * (1 if awq else 32 // config["bits"])
    module = (AwqTorchLinear if awq else TorchLinear)(
        bits=config["bits"], group_size=config["group_size"], sym=config["sym"],
        desc_act=config.get("desc_act", False), in_features=columns, out_features=rows,
        bias=False, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    for word, tensor in part.items():
        getattr(module, word).resize_(tensor.shape).copy_(tensor)
    if not awq and config.get("checkpoint_format", "gptq") == "gptq":
        convert_gptq_v1_to_v2_format_module(module, config["bits"], torch.int32)
    module.scales = module.scales.float()
    if awq:
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        return dequantize_gemm(
            module.qweight, module.qzeros, module.scales, config["bits"], config["group_size"]
        ).t()
    module.post_init()
    return module.dequantize_weight().float().t()


def dequantized_tensors(config: dict[str, Any], part: State, name: str) -> Tensor:
    """Return the weight of compressed tensors, float32, by the library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = next(iter(config["config_groups"].values()))
    scheme = QuantizationScheme.model_validate({**group, "targets": ["Linear"]})
    format = group.get("format") or config["format"]
    compressor = BaseCompressor.get_value_from_registry(format)
    wide = {k: v.float() if k == "weight_scale" else v for k, v in part.items()}
    return compressor.decompress(wide, scheme)["weight"].float()


def dequantized_fp8(config: dict[str, Any], part: State, name: str) -> Tensor:
    """Return the weight of float8 tensors, float32, by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(
        part["weight"], part["weight_scale_inv"].float(), torch.float32
    )


DEQUANTIZERS: dict[str, Callable[[dict[str, Any], State, str], Tensor]] = {
    "gptq": dequantized_words,
    "awq": dequantized_words,
    "compressed-tensors": dequantized_tensors,
    "fp8": dequantized_fp8,
}


def expected(folder: Path) -> State:
    """Return logits of the prompt over dequantized weights, and over rounded activations if any."""
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    modules: dict[str, State] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, word = name.rpartition(".")
        modules.setdefault(module, {})[word] = tensor
    state: State = {}
    for module, part in modules.items():
        packed = {k: v for k, v in part.items() if k != "bias" and not k.startswith("input_")}
        if set(packed) - {"weight"}:
            weight = DEQUANTIZERS[settings["quant_method"]](settings, packed, module)
            state[f"{module}.weight"] = weight
        else:
            state[f"{module}.weight"] = part["weight"].float()
        if "bias" in part:
            state[f"{module}.bias"] = part["bias"].float()
    plain = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.load_state_dict(state)
    ids = torch.tensor([PROMPT])
    found = {"tokens": ids[0], "logits": model(ids).logits[0]}
    inner = next(iter(settings.get("config_groups", {}).values()), {}).get("input_activations")
    if inner is not None and inner["type"] == "int":
        round_activations(model, inner, modules)
        found["logits_of_rounded_activations"] = model(ids).logits[0]
    return found


def round_activations(model: Any, args: dict[str, Any], modules: dict[str, State]) -> None:
    """Round what goes into each quantized module, by the compressed-tensors library."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    settings = QuantizationArgs.model_validate(args)
    for name, module in model.named_modules():
        part = modules.get(name, {})
        if "weight_scale" not in part:
            continue

        def hook(module: Any, inputs: tuple[Tensor], part: State = part) -> tuple[Tensor]:
            (x,) = inputs
            if settings.dynamic:
                scale, zero = compute_dynamic_scales_and_zp(x, settings, module)
            else:
                scale = part["input_scale"].float()
                zero = part.get("input_zero_point", torch.zeros_like(scale, dtype=torch.int8))
            return (fake_quantize(x, scale, zero, settings),)

        module.register_forward_pre_hook(hook)


# ---------------------------------------------------------------- the list


def _group(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": activations,
            }
        }
    }  # fmt: skip


INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "gptq-4-asym-g32": lambda f: by_auto_round(
        f, "auto_gptq", bits=4, group_size=32, sym=False
    ),
    "gptq-8-sym-g64": lambda f: by_auto_round(f, "auto_gptq", bits=8, group_size=64, sym=True),
    "gptq-4-act-order-g32": lambda f: by_gptqmodel(
        f, "Qwen2", bits=4, group_size=32, sym=True, desc_act=True, act_group_aware=False
    ),
    "gptq-v2-4-asym-g64": lambda f: by_gptqmodel(
        f, bits=4, group_size=64, sym=False, desc_act=False, format="gptq_v2"
    ),
    "gptq-8-act-order-row": lambda f: by_gptqmodel(
        f, bits=8, group_size=-1, sym=True, desc_act=True, act_group_aware=False
    ),
    "awq-4-g32": lambda f: by_auto_round(
        f, "auto_awq", "Qwen2", bits=4, group_size=32, sym=False
    ),
    "awq-4-sym-g64": lambda f: by_auto_round(f, "auto_awq", bits=4, group_size=64, sym=True),
    "ct-w4a16-sym-g64": lambda f: by_auto_round(
        f, "llm_compressor", scheme="W4A16", group_size=64
    ),
    "ct-w4a16-asym-g32": lambda f: by_compressed_tensors(
        f, format="pack-quantized",
        **_group({**INT4, "strategy": "group", "group_size": 32, "symmetric": False}),
    ),
    "ct-w4a16-channel": lambda f: by_compressed_tensors(
        f, format="pack-quantized", **_group({**INT4, "strategy": "channel"})
    ),
    "ct-w8a16-asym-channel": lambda f: by_compressed_tensors(
        f, format="pack-quantized",
        **_group({**INT8, "strategy": "channel", "symmetric": False}),
    ),
    "ct-w8a8-dynamic": lambda f: by_auto_round(f, "llm_compressor", scheme="INT8_W8A8"),
    "ct-w8a8-static": lambda f: by_compressed_tensors(
        f, format="int-quantized",
        **_group({**INT8, "strategy": "tensor"}, {**INT8, "strategy": "tensor"}),
    ),
    "ct-w8a8-static-channel": lambda f: by_compressed_tensors(
        f, format="int-quantized",
        **_group({**INT8, "strategy": "channel"}, {**INT8, "strategy": "tensor"}),
    ),
    "ct-fp8-channel": lambda f: by_compressed_tensors(
        f, format="float-quantized",
        **_group({**FLOAT8, "strategy": "channel"},
                 {**FLOAT8, "strategy": "token", "dynamic": True}),
    ),
    "ct-fp8-static": lambda f: by_compressed_tensors(
        f, format="float-quantized",
        **_group({**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "tensor"}),
    ),
    "ct-fp8-block": lambda f: by_compressed_tensors(
        f, format="float-quantized",
        **_group({**FLOAT8, "strategy": "block", "block_structure": [64, 64]},
                 {**FLOAT8, "strategy": "token", "dynamic": True}),
    ),
    "fp8-block": lambda f: by_transformers_fp8(f, [64, 32]),
    "fp8-tensor": lambda f: by_transformers_fp8(f, None),
}  # fmt: skip


def make(name: str) -> None:
    """Pack one checkpoint and keep what a loader needs of it, with what it should compute."""
    with tempfile.TemporaryDirectory() as scratch:
        CHECKPOINTS[name](Path(scratch))
        (weights,) = Path(scratch).rglob("model.safetensors")
        folder = TO / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copyfile(weights, folder / "model.safetensors")
        config = json.loads((weights.parent / "config.json").read_text())
        config["quantization_config"].pop("meta", None)  # how it was made, folders included
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if MODEL:
        shutil.copyfile(Path(MODEL, "tokenizer.json"), folder / "tokenizer.json")
        shutil.copyfile(Path(MODEL, "tokenizer_config.json"), folder / "tokenizer_config.json")
        return
    with torch.no_grad():
        found = expected(folder)
    save_file({k: v.contiguous() for k, v in found.items()}, folder / "expected.safetensors")


def main() -> None:
    """Make the checkpoints named on the command line, or all."""
    for name in sys.argv[1:] or CHECKPOINTS:
        make(copy.copy(name))
        print("made", name, flush=True)
    if MODEL:
        return
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
