"""Builds a model and fills it from a checkpoint, or with made-up weights.

Everything that can be wrong about the names and shapes is found before data is read; then each tensor
is cast and copied from the mapped file into its place, so that there is never more than one copy of
the weights plus one tensor. Called by the worker (`load_model`) and the memory plan
(`build_meta_model`).
"""

from __future__ import annotations

import torch

from pagemill.checkpoint.base import Checkpoint
from pagemill.config import ModelConfig
from pagemill.errors import CheckpointError
from pagemill.layers.base import Build
from pagemill.log import get_logger
from pagemill.models import MODELS
from pagemill.models.blocks import DecoderLM
from pagemill.models.weight_map import match
from pagemill.quant import QUANT_METHODS
from pagemill.quant.base import Loadable, RandomWeights

logger = get_logger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Of the weights of load_format="dummy": every start has the same ones.
_DUMMY_SEED = 0


def load_model(
    config: ModelConfig, *, device: torch.device, checkpoint: Checkpoint | None
) -> DecoderLM:
    """Return the model in eval mode, in config.dtype, its parameters filled and without gradients.

    `checkpoint` may be None with load_format="dummy" only. Raises CheckpointError when the files do
    not fit the architecture, UnknownNameError for an unknown architecture or weight format.
    """
    wants_tied = MODELS.load(config.model_type).ties_head(config.hf_config)
    if config.load_format == "dummy":
        model = _build(config, device, tied=wants_tied)
        _randomize(model)
    else:
        assert checkpoint is not None, "a checkpoint is needed unless load_format is dummy"
        model = _load(config, device, checkpoint, wants_tied)
    return model.eval()


def build_meta_model(config: ModelConfig) -> DecoderLM:
    """Return the model without memory: for parameter sizes, attention specs and peak_bytes."""
    tied = MODELS.load(config.model_type).ties_head(config.hf_config)
    return _build(config, torch.device("meta"), tied=tied)


def _build(config: ModelConfig, device: torch.device, *, tied: bool) -> DecoderLM:
    quant = QUANT_METHODS.load(config.quantization or "none")()
    model_class = MODELS.load(config.model_type)
    model_class.read_shape(config.hf_config)
    return model_class(config, Build(_DTYPES[config.dtype], device, quant), tied=tied)


def _load(
    config: ModelConfig, device: torch.device, checkpoint: Checkpoint, wants_tied: bool
) -> DecoderLM:
    infos = checkpoint.infos()
    weight_map = MODELS.load(config.model_type).weight_map
    plain = {weight_map.normalize(name) for name in infos}
    embedding, head = f"{weight_map.embedding}.weight", f"{weight_map.head}.weight"
    # A file may bring a head although the configuration ties it: both are loaded and then compared.
    both = wants_tied and embedding in plain and head in plain
    model = _build(config, device, tied=wants_tied and not both)
    expected = model.expected_tensors()
    if wants_tied and embedding not in plain and head in plain:
        expected[head] = expected.pop(embedding)
    targets = match(weight_map, expected, infos, str(checkpoint.path))
    filled: set[str] = set()
    with torch.no_grad():
        for name, tensor in checkpoint.tensors():
            target = targets.get(name)
            if target is None:
                continue
            assert name not in filled, f"the checkpoint yields {name} twice"
            target.fill(tensor)
            filled.add(name)
    unread = targets.keys() - filled
    if unread:
        raise CheckpointError(
            f"{checkpoint.path} lists tensors that it did not give: {', '.join(sorted(unread))}; "
            "the files may have changed while they were read. Start again"
        )
    if both:
        _settle_head(model)
    return model


def _settle_head(model: DecoderLM) -> None:
    """Tie a head that was loaded on its own although the configuration ties it, if it is equal."""
    head = model.head
    if head.weight is not None and torch.equal(head.weight, model.embedding.weight):
        head.tie()
        return
    logger.warning(
        "config.json ties the output head to the embedding, but the files hold a head that differs: "
        "it is used as it is. Set tie_word_embeddings to false to silence this line"
    )


def _randomize(model: DecoderLM) -> None:
    weights = RandomWeights(_DUMMY_SEED, model.build.dtype, model.build.device)
    with torch.no_grad():
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                _as_loadable(module).randomize(weights)


def _as_loadable(module: torch.nn.Module) -> Loadable:
    # Every module with parameters of its own comes from `layers` and is one.
    return module  # type: ignore[return-value]
