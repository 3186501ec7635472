"""Builds a model and fills it from a checkpoint, or with made-up weights.

Everything that can be wrong about the names and shapes is found before data is read; then each tensor
is cast and copied from the file into its place, and a layer is brought into the form that its
weight format computes with as soon as it is complete. So there is never more than one copy of the
weights plus one layer. Called by the worker (`load_model`) and the memory plan
(`build_meta_model`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from pagemill.checkpoint.base import Checkpoint
from pagemill.config import ModelConfig
from pagemill.device.host_memory import give_back_freed
from pagemill.errors import CheckpointError
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.linear import Linear
from pagemill.log import get_logger
from pagemill.models import MODELS
from pagemill.models.blocks import DecoderLM
from pagemill.models.load_progress import LoadProgress
from pagemill.models.weight_map import match
from pagemill.ops import LAYER_OPS
from pagemill.quant import (
    CHECKPOINT_SCHEMES,
    DENSE_METHODS,
    QUANT_METHODS,
    stored_settings,
)
from pagemill.quant.base import AnyTarget, Loadable, NotFiniteError, QuantMethod, RandomWeights
from pagemill.quant.stored import StoredWeights
from pagemill.quant.waiting import WaitingRows

logger = get_logger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Of the weights of load_format="dummy": every start has the same ones.
_DUMMY_SEED = 0


def load_model(
    config: ModelConfig,
    *,
    device: torch.device,
    checkpoint: Checkpoint | None,
    dense: str = "torch",
) -> DecoderLM:
    """Return the model in eval mode, in config.dtype, its parameters filled and without gradients.

    `checkpoint` may be None with load_format="dummy" only; `dense` names the device's kernels (its
    `dense_weights`): the format of weights that are not quantized, and what the other layers compute
    with. Raises CheckpointError when the files do not fit the architecture, UnknownNameError for an
    unknown architecture or weight format.
    """
    if config.load_format == "dummy":
        wants_tied = MODELS.load(config.model_type).ties_head(config.hf_config)
        model = _build(config, device, dense, tied=wants_tied)
        _randomize(model)
    else:
        assert checkpoint is not None, "a checkpoint is needed unless load_format is dummy"
        model = _build_from(config, device, checkpoint, dense)
    give_back_freed()
    return model.eval()


def build_meta_model(config: ModelConfig, *, dense: str = "torch") -> DecoderLM:
    """Return the model without memory: for parameter sizes, attention specs and peak_bytes."""
    tied = MODELS.load(config.model_type).ties_head(config.hf_config)
    model = _build(config, torch.device("meta"), dense, tied=tied)
    for module in model.modules():
        _finish(module)
    model.head.finish()
    return model


def _build(config: ModelConfig, device: torch.device, dense: str, *, tied: bool) -> DecoderLM:
    model_class = MODELS.load(config.model_type)
    model_class.read_shape(config.hf_config)
    build = Build(
        _DTYPES[config.dtype], device, _quant_method(config, dense), LAYER_OPS.load(dense)()
    )
    model = model_class(config, build, tied=tied)
    for module, names in model.weight_map.names(model, len(model.layers)):
        if isinstance(module, (Linear, TokenEmbedding, Head)):
            module.adopt(names, build)
    return model


def _quant_method(config: ModelConfig, dense: str) -> QuantMethod:
    """Return the weight format: of a quantized checkpoint, made while loading, or dense."""
    asked = config.quantization
    plain = DENSE_METHODS.load(dense)()
    if asked is not None and asked in CHECKPOINT_SCHEMES:
        return StoredWeights(
            CHECKPOINT_SCHEMES.load(asked)(stored_settings(config.hf_config)), plain
        )
    return plain if asked in (None, "none") else QUANT_METHODS.load(asked)()


def _build_from(
    config: ModelConfig, device: torch.device, checkpoint: Checkpoint, dense: str
) -> DecoderLM:
    infos = checkpoint.infos()
    wants_tied = MODELS.load(config.model_type).ties_head(config.hf_config)
    weight_map = MODELS.load(config.model_type).weight_map
    plain = {weight_map.normalize(name) for name in infos}
    embedding, head = f"{weight_map.embedding}.weight", f"{weight_map.head}.weight"
    # A file may bring a head although the configuration ties it: both are loaded and then compared.
    both = wants_tied and embedding in plain and head in plain
    tied = wants_tied and not both
    head_alone = wants_tied and embedding not in plain and head in plain
    # Without memory first: sizes that belong to no file must not take any.
    _match(_build(config, torch.device("meta"), dense, tied=tied), checkpoint, head_alone)
    model = _build(config, device, dense, tied=tied)
    # From here on a target is held once: the rows of a packed layer go with its last one.
    targets = _match(model, checkpoint, head_alone)
    if both:
        targets = {name: _written(target) for name, target in targets.items()}
    with LoadProgress(config.model, sum(info.size_bytes for info in infos.values())) as progress:
        _fill(checkpoint, targets, progress)
        if both:
            _settle_head(model)
        with _named(embedding if tied else head):
            model.head.finish()
    return model


def _match(model: DecoderLM, checkpoint: Checkpoint, head_alone: bool) -> dict[str, AnyTarget]:
    """Return the target of each tensor in the files; `head_alone`: a tied matrix is called the head."""
    expected, names = model.expected_tensors(), model.weight_map
    if head_alone:
        expected[f"{names.head}.weight"] = expected.pop(f"{names.embedding}.weight")
    quant = model.build.quant
    ignored = quant.scheme.ignored if isinstance(quant, StoredWeights) else ()
    return match(names, expected, checkpoint.infos(), str(checkpoint.path), ignored=ignored)


def _fill(checkpoint: Checkpoint, targets: dict[str, AnyTarget], progress: LoadProgress) -> None:
    """Copy every tensor into its place, using up `targets`; finish each layer with its last one."""
    filled: set[str] = set()
    sizes = {name: info.size_bytes for name, info in checkpoint.infos().items()}
    waiting = Counter(id(target.owner) for target in targets.values())
    with torch.no_grad():
        for name, tensor in checkpoint.tensors():
            assert name not in filled, f"the checkpoint yields {name} twice"
            target = targets.pop(name, None)
            if target is None:
                progress.add(sizes[name])
                continue
            owner = target.owner
            waiting[id(owner)] -= 1
            with _named(name):
                target.fill(tensor)
                filled.add(name)
                del target
                if not waiting[id(owner)]:
                    _finish(owner)
            progress.add(sizes[name])
    if targets:
        raise CheckpointError(
            f"{checkpoint.path} lists tensors that it did not give: {', '.join(sorted(targets))}; "
            "the files may have changed while they were read. Start again"
        )


@contextmanager
def _named(tensor: str) -> Iterator[None]:
    """Say which layer has the matrix that cannot be rounded: that of this tensor, its last one."""
    try:
        yield
    except NotFiniteError as error:
        raise CheckpointError(f"in the layer of {tensor}: {error}") from error


def _finish(module: object) -> None:
    """Finish a linear layer; the head, and an embedding that it shares, wait for each other."""
    if isinstance(module, Linear):
        module.finish()


def _written(target: AnyTarget) -> AnyTarget:
    """Return a target that writes a head or an embedding at once, for they are yet to be compared."""
    if isinstance(target, WaitingRows) and not isinstance(target.owner, Linear):
        return target.written()
    return target


def _settle_head(model: DecoderLM) -> None:
    """Tie a head that was loaded on its own although the configuration ties it, if it is equal."""
    head = model.head
    if head.weight is None or model.embedding.weight is None:
        return  # one of them is quantized, so they are not one matrix
    if torch.equal(cast(Tensor, head.weight), cast(Tensor, model.embedding.weight)):
        head.tie()
        return
    logger.warning(
        "config.json ties the output head to the embedding, but the files hold a head that differs: "
        "it is used as it is. Set tie_word_embeddings to false to silence this line"
    )


def _randomize(model: DecoderLM) -> None:
    weights = RandomWeights(_DUMMY_SEED, model.build.dtype, model.build.device)
    with torch.no_grad():
        for module in list(_with_weights(model)):
            _as_loadable(module).randomize(weights)
            _finish(module)
    model.head.finish()


def _with_weights(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that have weights; what a weight format keeps inside one is its own."""
    in_format = isinstance(module, (Linear, TokenEmbedding, Head))
    if in_format or next(module.parameters(recurse=False), None) is not None:
        yield module
    if not in_format:
        for child in module.children():
            yield from _with_weights(child)


def _as_loadable(module: torch.nn.Module) -> Loadable:
    # Every module with parameters of its own comes from `layers` and is one.
    return module  # type: ignore[return-value]
