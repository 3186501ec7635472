"""What changes a row of logits before a token is chosen, in the one order there is.

    allowed_token_ids, bad_words, min_tokens, logit_bias, the request's logits processors, the engine's
    logits processors, then the penalties

Called by the sampler for rows that ask for any of it; other rows pay nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import ConfigError
from pagemill.messages import SamplingSpec
from pagemill.sampling.penalties import apply_penalties, wants_penalties

_MASKED = np.float32(-np.inf)

# apply_penalties, or what does the same.
Penalize = Callable[[NDArray[np.float32], SamplingSpec, NDArray[np.int32], int], None]


class LogitsProcessor(Protocol):
    """A pure function of one sequence's tokens and its next-token logits.

    It takes (output_ids, logits), or (prompt_ids, output_ids, logits) when it has three parameters
    without a default: the tokens generated so far, and those of the prompt. `logits` is float32 [vocab];
    it may be changed in place. The return value is the logits to go on with, a float32 [vocab] tensor on the
    same device: anything else is an error, not converted. The result must depend on the arguments alone, or the
    same request may answer differently in another batch. An exception ends that one sequence with an error.
    """

    def __call__(self, *args: Any) -> Tensor: ...


def load_logits_processors(names: Sequence[str]) -> tuple[LogitsProcessor, ...]:
    """Import engine-level processors, "module:attribute" each; a class is called to make one."""
    loaded = []
    for name in names:
        module_name, colon, attribute = name.partition(":")
        if not colon or not module_name or not attribute:
            raise ConfigError(
                f"logits_processors has {name!r}; each must be of the form module:attribute"
            )
        try:
            target = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"logits_processors: {name!r} cannot be imported: {error}; check the spelling and "
                "that the module is on the Python path"
            ) from error
        if isinstance(target, type):
            target = target()
        if not callable(target):
            raise ConfigError(f"logits_processors: {name!r} is not callable")
        loaded.append(cast(LogitsProcessor, target))
    return tuple(loaded)


def wants_processing(spec: SamplingSpec, num_output_tokens: int) -> bool:
    """Return whether the request changes its logits in this step."""
    return bool(
        spec.allowed_token_ids is not None
        or spec.bad_words
        or (num_output_tokens < spec.min_tokens and spec.stop_token_ids)
        or spec.logit_bias
        or spec.logits_processors
        or wants_penalties(spec)
    )


def process(
    logits: NDArray[np.float32],
    spec: SamplingSpec,
    token_ids: NDArray[np.int32],
    num_prompt_tokens: int,
    engine_processors: Sequence[LogitsProcessor],
    penalize: Penalize = apply_penalties,
) -> None:
    """Change one row [vocab] in place, in the order of this module."""
    if spec.allowed_token_ids is not None:
        _allow_only(logits, spec.allowed_token_ids)
    output = token_ids[num_prompt_tokens:]
    for word in spec.bad_words:
        if _ends_with(output, word[:-1]):
            logits[word[-1]] = _MASKED
    if len(output) < spec.min_tokens and spec.stop_token_ids:
        logits[list(spec.stop_token_ids)] = _MASKED
    for token_id, bias in spec.logit_bias:
        logits[token_id] += np.float32(bias)
    if spec.logits_processors or engine_processors:
        prompt_ids, output_ids = token_ids[:num_prompt_tokens].tolist(), output.tolist()
        for processor in (*spec.logits_processors, *engine_processors):
            _run(processor, prompt_ids, output_ids, logits)
    if wants_penalties(spec):
        penalize(logits, spec, token_ids, num_prompt_tokens)


def _wants_prompt(processor: Callable[..., Any]) -> bool:
    """Return whether a custom processor has a place for the prompt's tokens too."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have none
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in places and p.default is p.empty for p in parameters) == 3


def _allow_only(logits: NDArray[np.float32], allowed: Sequence[int]) -> None:
    ids = np.asarray(allowed, np.int64)
    kept = logits[ids]
    logits.fill(_MASKED)
    logits[ids] = kept


def _ends_with(output: NDArray[np.int32], prefix: Sequence[int]) -> bool:
    """Return whether the output ends with all tokens of a bad word but the last."""
    count = len(prefix)
    return count <= len(output) and output[len(output) - count :].tolist() == list(prefix)


def _run(
    processor: Callable[..., Any],
    prompt_ids: list[int],
    output_ids: list[int],
    logits: NDArray[np.float32],
) -> None:
    """Call one custom processor and write what it returns back into the row."""
    args: list[Any] = [list(output_ids), torch.from_numpy(logits)]
    if _wants_prompt(processor):
        args.insert(0, list(prompt_ids))
    result = processor(*args)
    _check(result, args[-1])
    logits[:] = result.detach().numpy()


def _check(result: object, logits: Tensor) -> None:
    """Raise for what is not float32 logits of this row: converted in silence, it would mean something else."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"a logits processor returned {type(result).__name__}; it must return the logits tensor"
        )
    if result.shape != logits.shape:
        raise ValueError(
            f"a logits processor returned shape {tuple(result.shape)}; it must be {tuple(logits.shape)}"
        )
    for name, found, wanted in (
        ("dtype", result.dtype, logits.dtype),
        ("device", result.device, logits.device),
        ("layout", result.layout, logits.layout),
    ):
        if found != wanted:
            raise TypeError(
                f"a logits processor returned a tensor with {name} {found}; it must be {wanted}, as that "
                "of the logits it was given"
            )
