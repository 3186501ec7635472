"""What `speculative_config` means: its keys, their ranges, and whether a draft model fits the target.

    {"method": "ngram", "num_speculative_tokens": 8, "adaptive_length": true, <options of the method>}
    {"method": "draft_model", "model": NAME, "revision": ..., "quantization": ..., ...}

As in vLLM, "method" may be left out where "model" names the draft model, and the model "[ngram]" is the
method ngram. Options belong to the methods (`speculation.base.Proposer.options`). Called by
`engine.resolve`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagemill.config import ModelConfig, SpeculativeConfig
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError, UnknownNameError
from pagemill.path_names import check_path
from pagemill.speculation import PROPOSERS
from pagemill.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from pagemill.speculation.base import Option

DRAFT_MODEL = "draft_model"
MOST_TOKENS = 64
_KEYS = ("method", "num_speculative_tokens", "adaptive_length")
_MODEL_KEYS = ("model", "revision", "quantization", "draft_tensor_parallel_size")
_LISTED = 5  # ids of tokens that differ, in an error


@dataclass(frozen=True, slots=True)
class SpeculativeSettings:
    """A checked `speculative_config`; what concerns a draft model is not looked up yet."""

    config: SpeculativeConfig
    needs_model: bool
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None


def read_speculative_config(raw: Mapping[str, Any] | None) -> SpeculativeSettings | None:
    """Return the settings; None is off. Raises ConfigError naming the key, its value and its range."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"speculative_config is {raw!r}; it must be a dict such as "
            '{"method": "ngram", "num_speculative_tokens": 8}, or None'
        )
    method, model = _method(raw)
    proposer = PROPOSERS.load(method)
    allowed = (*_KEYS, *(_MODEL_KEYS if proposer.needs_model else ()), *proposer.options)
    for key in raw:
        if key not in allowed and (key, raw[key]) != ("model", model):
            raise _unknown_key(key, method, allowed)
    options = {
        name: _number(name, raw.get(name), option) for name, option in proposer.options.items()
    }
    for name, option in proposer.options.items():
        if raw.get(name) is None and option.follows is not None:
            options[name] = options[option.follows]
    proposer.check(options)
    adaptive = raw.get("adaptive_length", True)
    if not isinstance(adaptive, bool):
        raise _bad("adaptive_length", adaptive, "True or False")
    if proposer.needs_model and not (isinstance(model, str) and model):
        raise ConfigError(
            f"speculative_config has method {method!r} and model {model!r}; give the draft model's "
            "folder, file or name as its model"
        )
    if isinstance(model, str):
        check_path("speculative_config: model", model)
    if raw.get("draft_tensor_parallel_size") not in (None, 1):
        raise _bad(
            "draft_tensor_parallel_size",
            raw["draft_tensor_parallel_size"],
            "1: this version runs on one rank",
        )
    for key in ("revision", "quantization"):
        if raw.get(key) is not None and not isinstance(raw[key], str):
            raise _bad(key, raw[key], "a string, or None")
    length = raw.get("num_speculative_tokens")
    return SpeculativeSettings(
        SpeculativeConfig(
            method=method,
            num_speculative_tokens=_whole(
                "num_speculative_tokens",
                proposer.default_length if length is None else length,
                1,
                MOST_TOKENS,
            ),
            adaptive_length=adaptive,
            options=options,
            max_drafts=MOST_TOKENS,
        ),
        proposer.needs_model,
        model,
        raw.get("revision"),
        raw.get("quantization"),
    )


def draft_arguments(args: EngineArgs, settings: SpeculativeSettings, dtype: str) -> EngineArgs:
    """Return the arguments that the draft model's configuration is settled from."""
    assert settings.model is not None
    return dataclasses.replace(
        args,
        model=settings.model,
        revision=settings.revision,
        tokenizer=None,
        tokenizer_revision=None,
        served_model_name=None,
        load_format="dummy" if args.load_format == "dummy" else "auto",
        dtype=dtype,
        quantization=settings.quantization,
        max_model_len=None,
        hf_overrides={},
        generation_config="pagemill",
        override_generation_config={},
        speculative_config=None,
    )


def check_draft(
    draft: ModelConfig,
    draft_tokenizer: Tokenizer | None,
    target: ModelConfig,
    target_tokenizer: Tokenizer | None,
) -> None:
    """Raise ConfigError when a draft model's tokens are not the target's."""
    if draft.shape.vocab_size != target.shape.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {draft.model} has a vocabulary of "
            f"{draft.shape.vocab_size} tokens, the model {target.model} one of "
            f"{target.shape.vocab_size}; choose a draft model of the same family, or method ngram or "
            "suffix, which need none"
        )
    if draft_tokenizer is None or draft_tokenizer is target_tokenizer or target_tokenizer is None:
        return
    count = min(draft_tokenizer.vocab_size, target_tokenizer.vocab_size)
    different = [
        i for i in range(count) if draft_tokenizer.token_text(i) != target_tokenizer.token_text(i)
    ]
    if different:
        shown = ", ".join(map(str, different[:_LISTED]))
        raise ConfigError(
            f"speculative_config: {len(different)} of {count} token ids mean something else to the "
            f"draft model {draft.model} than to {target.model} ({shown}, ...); choose a draft model "
            "with the same tokenizer"
        )


def _method(raw: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the method that is named or meant, and the draft model's name."""
    method, model = raw.get("method"), raw.get("model")
    if method is None and model in ("ngram", "[ngram]"):
        return "ngram", model
    if method is None and model is not None:
        return DRAFT_MODEL, model
    if method == "ngram" and model in ("ngram", "[ngram]"):
        return method, model
    if not isinstance(method, str):
        raise ConfigError(
            f"speculative_config names no method (method is {method!r}); known: "
            f"{', '.join(PROPOSERS.names())}"
        )
    if method not in PROPOSERS:
        raise UnknownNameError(
            f"speculative_config has the unknown method {method!r}; known: "
            f"{', '.join(PROPOSERS.names())}"
        )
    return method, model if PROPOSERS.load(method).needs_model else None


def _unknown_key(key: object, method: str, allowed: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(str(key), allowed, n=1)
    return ConfigError(
        f"speculative_config has the key {key!r}, which method {method!r} does not know"
        + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(allowed)}")
    )


def _number(name: str, value: object, option: Option) -> int | float:
    """Return an option's value: None is its default."""
    if value is None:
        return option.default
    if isinstance(option.default, int):
        return _whole(name, value, int(option.low), int(option.high))
    wanted = f"a number from {option.low:g} to {option.high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(name, value, wanted)
    if not option.low <= value <= option.high:
        raise _bad(name, value, wanted)
    return float(value)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(name, value, f"a whole number from {low} to {high}")
    return value


def _bad(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"speculative_config: {name} is {value!r}; it must be {wanted}")
