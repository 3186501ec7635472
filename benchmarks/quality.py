"""What a weight format costs in quality, on a fixed text and on weights that were never quantized.

    python -m benchmarks.quality [--model PATH] [--formats bfloat16,int8,int4] [--stored PATH ...] [--encoder FOLDER]

The text is `benchmarks/texts/alice.txt`, the first chapter of Lewis Carroll's "Alice's Adventures in
Wonderland" (1865) less its last lines, in windows of 512 tokens that start anew. For each format: perplexity of the
text, and the mean Kullback-Leibler divergence of a format's next-token distribution from that of the same weights in
float32, over all positions. A format is DTYPE, QUANTIZATION (then in bfloat16) or QUANTIZATION/DTYPE, and may end in +int8kv for an
int8 KV cache. `--stored` takes checkpoints of the same model in other formats, which are kept as they are, activations in bfloat16
(`benchmarks.stored_formats` and `tests/data/quantized/make.py` write them). `--encoder` is a folder with a model.safetensors in float32, such as all-MiniLM-L6-v2's:
of its matrices, all together, the relative error of the weights and of products with normal activations. `--model "" --encoder-llama FOLDER --stored PATH ...`
is the same for checkpoints of such matrices in other formats (`benchmarks.encoder_as_llama` puts them in a Llama's places); products in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import smollm2_gguf
from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBatch, StepAttention
from pagemill.batch.kv_store import KVStore
from pagemill.checkpoint import open_checkpoint
from pagemill.checkpoint.safetensors_files import SafetensorsCheckpoint
from pagemill.config import EngineConfig
from pagemill.device import DEVICES
from pagemill.engine.resolve import resolve_engine
from pagemill.engine_args import EngineArgs
from pagemill.layers.base import Build
from pagemill.layers.linear import Linear
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import load_model
from pagemill.quant import QUANT_METHODS
from pagemill.tokenizer.base import Tokenizer

TEXT = Path(__file__).parent / "texts" / "alice.txt"
WINDOW = 512
_LOGIT_ROWS = 64  # at a time: a vocabulary may be large
_BLOCK = 16
_DTYPES = ("float32", "bfloat16")
_MATRICES = ("query", "key", "value", "dense")


@dataclass(frozen=True, slots=True)
class Setting:
    """One format to measure."""

    quantization: str
    dtype: str
    kv_cache_dtype: str

    @staticmethod
    def read(text: str) -> Setting:
        """Return what a word of --formats means."""
        word, _, cache = text.partition("+")
        weights, _, dtype = word.partition("/")
        if weights in _DTYPES:
            weights, dtype = "none", weights
        return Setting(weights, dtype or "bfloat16", "int8" if cache == "int8kv" else "auto")


_AS_STORED = Setting("auto", "bfloat16", "auto")


def load(
    model: str, setting: Setting, **further: Any
) -> tuple[EngineConfig, Tokenizer | None, DecoderLM]:
    """Return a loaded model, its configuration and its tokenizer; `further` engine arguments."""
    args = EngineArgs(
        model=model, quantization=setting.quantization, dtype=setting.dtype,
        kv_cache_dtype=setting.kv_cache_dtype, max_model_len=WINDOW,
        **further,
    )  # fmt: skip
    config, tokenizer = resolve_engine(args)
    device = DEVICES.load(config.device.device)()
    device.configure(config.device.num_threads)
    loaded = load_model(
        config.model,
        device=device.torch_device,
        checkpoint=open_checkpoint(config.model.path),
        dense=device.dense_weights,
    )
    return config, tokenizer, loaded


class Scored:
    """A loaded model and the hidden states of the text."""

    def __init__(self, model: str, setting: Setting, windows: list[list[int]] | None) -> None:
        config, tokenizer, self.model = load(model, setting)
        if windows is None:
            assert tokenizer is not None
            ids = list(tokenizer.encode(TEXT.read_text(encoding="utf-8")))
            windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)]
        self.windows = windows
        device = DEVICES.load(config.device.device)()
        self._backend = BACKENDS.load(device.attention_backend)()
        self._kv = KVStore(
            self._backend,
            self.model.attention_specs,
            num_blocks=WINDOW // _BLOCK,
            block_size=_BLOCK,
            dtype=getattr(torch, config.cache.dtype),
            device=device.torch_device,
        )

    def hidden(self, ids: list[int]) -> Tensor:
        """Return the hidden states [tokens, hidden] of a window."""
        batch = AttentionBatch(
            query_starts=(0, len(ids)),
            num_computed=(0,),
            block_tables=torch.arange(WINDOW // _BLOCK)[None],
            slot_mapping=torch.arange(len(ids)),
            block_size=_BLOCK,
        )
        attend = StepAttention(self._backend, self.model.attention_specs, self._kv.layers, batch)
        return self.model.forward(torch.tensor(ids), torch.arange(len(ids)), attend)


@dataclass(slots=True)
class Score:
    """Sums over the positions of a text."""

    loss: float = 0.0
    divergence: float = 0.0
    same_choice: int = 0
    count: int = 0


def compare(formats: list[Scored], reference: Scored) -> list[Score]:
    """Return the sums of each format. All models are in memory at once, the reference runs once."""
    totals = [Score() for _ in formats]
    for ids in reference.windows:
        theirs = reference.hidden(ids)
        ours = [scored.hidden(ids) for scored in formats]
        for start in range(0, len(ids) - 1, _LOGIT_ROWS):
            rows = slice(start, min(start + _LOGIT_ROWS, len(ids) - 1))
            p = reference.model.logits(theirs[rows]).log_softmax(-1)
            next_ids = torch.tensor(ids[rows.start + 1 : rows.stop + 1])
            for total, scored, hidden in zip(totals, formats, ours, strict=True):
                q = scored.model.logits(hidden[rows]).log_softmax(-1)
                total.loss -= float(q.gather(1, next_ids[:, None]).double().sum())
                total.divergence += float((p.exp() * (p - q)).double().sum())
                total.same_choice += int((p.argmax(1) == q.argmax(1)).sum())
                total.count += len(next_ids)
    return totals


def text_table(model: str, names: list[str], stored: list[str]) -> Iterator[str]:
    """Yield the lines of the table on the text: `names` are formats of the model, `stored` are paths."""
    reference = Scored(model, Setting("none", "float32", "auto"), None)
    formats = [Scored(model, Setting.read(name), reference.windows) for name in names]
    formats += [Scored(path, _AS_STORED, reference.windows) for path in stored]
    names = names + [Path(path).name for path in stored]
    tokens = sum(map(len, reference.windows))
    yield f"\n{Path(model).name}: {tokens} tokens of {TEXT.name} in windows of {WINDOW}\n"
    yield "| format | perplexity | mean KL from float32, nats | same first choice |"
    yield "|---|---|---|---|"
    for name, score in zip(names, compare(formats, reference), strict=True):
        yield (
            f"| {name} | {float(torch.tensor(score.loss / score.count).exp()):.3f} "
            f"| {score.divergence / score.count:.5f} | {score.same_choice / score.count:.1%} |"
        )


def error_table(folder: str, formats: list[str]) -> Iterator[str]:
    """Yield the lines of the table on single matrices."""
    matrices = [
        stored if isinstance(stored, torch.Tensor) else stored.whole()
        for name, stored in SafetensorsCheckpoint(Path(folder)).tensors()
        if name.endswith(".weight") and name.split(".")[-2] in _MATRICES
    ]
    generator = torch.Generator().manual_seed(0)
    yield f"\n{Path(folder).name}: {len(matrices)} matrices, float32\n"
    yield "| format | relative error of the weights | of products |"
    yield "|---|---|---|"
    for name in formats:
        setting = Setting.read(name)
        dtype: torch.dtype = getattr(torch, setting.dtype)
        sums = torch.zeros(4, dtype=torch.float64)
        for weight in matrices:
            rows, columns = weight.shape
            build = Build(dtype, torch.device("cpu"), QUANT_METHODS.load(setting.quantization)())
            layer = Linear(columns, rows, build)
            layer.targets("")["weight"].fill(weight)
            layer.finish()
            x = torch.randn(64, columns, generator=generator).to(dtype)
            exact = x.double() @ weight.double().t()
            kept = layer.quant.rows(layer, torch.arange(rows)).double()
            sums += torch.tensor([
                float((kept - weight.double()).square().sum()), float(weight.double().square().sum()),
                float((layer.forward(x).double() - exact).square().sum()), float(exact.square().sum()),
            ])  # fmt: skip
        errors = (sums[0::2] / sums[1::2]).sqrt().tolist()
        yield f"| {name} | {errors[0]:.5f} | {errors[1]:.5f} |"


def stored_error_table(model: str, stored: list[str]) -> Iterator[str]:
    """Yield the lines of the table on the matrices of checkpoints of `model`, whose own are float32."""
    exact = [
        _matrix(layer, torch.float32)
        for layer in _linears(model, Setting("none", "float32", "auto"))
    ]
    yield f"\n{Path(model).name}: {len(exact)} fused matrices, float32\n"
    yield "| checkpoint | relative error of the weights | of products |"
    yield "|---|---|---|"
    for path in stored:
        layers = _linears(path, _AS_STORED)
        generator = torch.Generator().manual_seed(0)
        sums = torch.zeros(4, dtype=torch.float64)
        for layer, weight in zip(layers, exact, strict=True):
            kept = _matrix(layer, torch.bfloat16)
            x = torch.randn(64, weight.shape[1], generator=generator).bfloat16()
            product = x.double() @ weight.double().t()
            found = layer.quant.apply(layer, x, out_dtype=torch.float32).double()
            sums += torch.tensor([
                float((kept - weight).double().square().sum()), float(weight.double().square().sum()),
                float((found - product).square().sum()), float(product.square().sum()),
            ])  # fmt: skip
        errors = (sums[0::2] / sums[1::2]).sqrt().tolist()
        yield f"| {Path(path).name} | {errors[0]:.5f} | {errors[1]:.5f} |"


def _linears(model: str, setting: Setting) -> list[Linear]:
    """Return the layers of a checkpoint, with a gate that no format fuses: outputs in the order of rows."""
    plain = {"skip_tokenizer_init": True, "hf_overrides": {"hidden_act": "gelu"}}
    loaded = load(model, setting, **plain)[2]
    return [module for module in loaded.modules() if isinstance(module, Linear)]


def _matrix(layer: Linear, dtype: torch.dtype) -> Tensor:
    """Return the weights [out, in] float32 as products show them: of each input alone."""
    ones = torch.eye(layer.shape.in_features, dtype=dtype)
    return layer.quant.apply(layer, ones, out_dtype=torch.float32).t()


@torch.inference_mode()
def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M-Instruct; empty: none")
    parser.add_argument("--formats", default="bfloat16,int8,int4")
    parser.add_argument("--stored", nargs="*", default=[], help="checkpoints of the same model")
    parser.add_argument("--encoder", default=None, help="a folder of float32 weights")
    parser.add_argument(
        "--encoder-llama",
        default=None,
        help="what benchmarks.encoder_as_llama wrote; --stored are of it",
    )
    arguments = parser.parse_args()
    formats = [name for name in arguments.formats.split(",") if name]
    if arguments.model != "":
        model = arguments.model or str(smollm2_gguf())
        for line in text_table(model, formats, arguments.stored):
            print(line, flush=True)
    if arguments.encoder_llama:
        for line in stored_error_table(arguments.encoder_llama, arguments.stored):
            print(line, flush=True)
    if arguments.encoder:
        for line in error_table(arguments.encoder, [f for f in formats if "+" not in f]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
