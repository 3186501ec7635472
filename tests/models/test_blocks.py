"""The peak that a model states is the peak that its forward has."""

from __future__ import annotations

import pytest
import torch

from pagemill import native
from pagemill.models.loader import build_meta_model, load_model
from tests.models.peak_memory import PeakMemory
from tests.models.test_loader import _model_type
from tests.models.tiny import TINY, model_config


def no_attention(layer, q, k, v, sinks=None):
    """Stand in for attention: its result and nothing else."""
    return torch.empty(q.shape, dtype=q.dtype)


def measured_peak(model, num_tokens: int, num_rows: int, *, picked_late: bool = True) -> int:
    """Return the peak where hidden states of all tokens are made, as prompt scores need them, or not."""
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    positions = torch.arange(num_tokens)
    with torch.inference_mode(), PeakMemory() as memory:
        if picked_late:
            hidden = model.forward(ids, positions, no_attention)[:num_rows]
        else:
            hidden = model.forward(ids, positions, no_attention, torch.arange(num_rows))
        model.logits(hidden)
    return memory.peak_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 100], ids=["few-logits", "many-logits"])
@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", TINY)
def test_peak_bytes_is_what_forward_and_logits_take(name, kernels, rows, dtype) -> None:
    if kernels == "native" and native.extension() is None:
        pytest.skip("pagemill._C is not built: run `make build`")
    sizes = {**TINY[name].sizes, "num_hidden_layers": 2, "layer_types": None}
    if rows == 100:
        sizes["vocab_size"] = 3000
    config = model_config(
        {"model_type": _model_type(name), **sizes}, load_format="dummy", dtype=dtype
    )
    model = load_model(config, device=torch.device("cpu"), checkpoint=None, dense=kernels)
    stated = model.peak_bytes(100, rows)
    measured = measured_peak(model, 100, rows)
    # The native linear layer adds to the stream and makes float32 logits without a copy in between; what
    # is stated counts one, which other weight formats may make.
    assert measured <= stated <= (1.1 if kernels == "torch" else 2.0) * measured
    assert measured_peak(model, 100, rows, picked_late=False) <= stated
    assert build_meta_model(config, dense=kernels).peak_bytes(100, rows) == stated


def test_the_residual_stream_is_added_to_in_place() -> None:
    """One more layer takes no more memory."""
    peaks = []
    for num_layers in (1, 5):
        sizes = {**TINY["llama"].sizes, "num_hidden_layers": num_layers}
        config = model_config({"model_type": "llama", **sizes}, load_format="dummy")
        model = load_model(config, device=torch.device("cpu"), checkpoint=None)
        peaks.append(measured_peak(model, 64, 1))
    assert peaks[0] == peaks[1]
