"""What a model's own files say about sampling: defaults, and the tokens that end an answer.

Called by `engine.resolve`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagemill.checkpoint.json_files import read_json_object
from pagemill.engine_args import EngineArgs
from pagemill.errors import CheckpointError, ConfigError
from pagemill.sampling_params import SamplingParams
from pagemill.tokenizer.base import Tokenizer

# Keys of generation_config.json that mean a sampling parameter -> that parameter.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_OWN = ("pagemill", "vllm")  # generation_config values that mean the engine's own defaults


def sampling_defaults(args: EngineArgs, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of `SamplingParams` that the model, or the caller, sets.

    `override_generation_config` replaces single ones and keeps the others. Raises ConfigError.
    """
    if args.generation_config in _OWN:
        source: Mapping[str, Any] = {}
    elif args.generation_config == "auto":
        source = generation
    else:
        source = _read_folder(args.generation_config)
    found = {
        parameter: source[key]
        for key, parameter in _PARAMETERS.items()
        if source.get(key) is not None
    }
    found |= _overrides(args.override_generation_config)
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ConfigError(
            f"the sampling defaults of the model are wrong: {error}; correct "
            "generation_config.json, or replace the value with override_generation_config"
        ) from error
    return found


def _read_folder(name: str) -> Mapping[str, Any]:
    file = Path(name).expanduser() / "generation_config.json"
    if not file.is_file():
        raise ConfigError(
            f"generation_config is {name!r}, but there is no {file}; use auto, pagemill, or a folder "
            "that holds a generation_config.json"
        )
    return read_json_object(file)


def _overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(SamplingParams)} - {"output_kind"}
    found = {}
    for key, value in overrides.items():
        parameter = _PARAMETERS.get(key, key)
        if parameter not in known:
            raise ConfigError(
                f"override_generation_config has the key {key!r}, which is no sampling default; "
                f"known: {', '.join(sorted(known | {'max_new_tokens'}))}"
            )
        found[parameter] = value
    return found


def end_token_ids(
    hf_config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> tuple[int, ...]:
    """Return every id that ends an answer: of the tokenizer, config and generation_config together."""
    found: set[int] = set()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    text = hf_config.get("text_config")
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("config.json", hf_config),
        ("config.json", text if isinstance(text, Mapping) else {}),
        ("generation_config.json", generation),
    ]
    for file, source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise CheckpointError(
                    f"{file} has eos_token_id {value!r}; it must be a token id or a list of them"
                )
            found.add(token_id)
    # An id that the model cannot say (some configurations carry -1, or an added token without a row)
    # ends nothing; masks are made of these ids, so it must not stay.
    return tuple(sorted(i for i in found if 0 <= i < vocab_size))
