"""Types and ranges of single engine arguments. Called by `engine.resolve` before anything is read."""

from __future__ import annotations

import dataclasses
import math
import re
import typing

from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError
from pagemill.path_names import check_path

BLOCK_SIZES = tuple(2**power for power in range(9))

# Field -> (lowest, highest or None). None as a value is "auto" where the field allows it.
_WHOLE_NUMBERS: dict[str, tuple[int, int | None]] = {
    "max_model_len": (1, None),
    "seed": (-(2**63), 2**63 - 1),
    "max_logprobs": (-1, None),
    "kv_cache_memory_bytes": (1, None),
    "max_num_seqs": (1, None),
    "max_num_batched_tokens": (1, None),
    "max_context_len_to_capture": (1, None),
    "num_threads": (1, 4096),
}
_TEXTS = (
    "model", "served_model_name", "tokenizer", "revision", "tokenizer_revision", "download_dir",
    "generation_config", "scheduling_policy", "device", "metrics_prefix",
    "distributed_executor_backend", "swap_dir", "kv_cache_file",
)  # fmt: skip
_PATHS = (
    "model", "tokenizer", "download_dir", "generation_config", "swap_dir", "kv_cache_file",
)  # fmt: skip


def check_arguments(args: EngineArgs) -> None:
    """Raise ConfigError (NotSupportedError) naming the field, its value and its range."""
    args.refuse_unsupported()
    for name, (low, high) in _WHOLE_NUMBERS.items():
        _check_whole_number(args, name, low, high)
    for f in dataclasses.fields(args):
        choices = f.metadata.get("choices")
        value = getattr(args, f.name)
        if choices and value not in choices:
            raise _bad(f.name, value, f"one of {', '.join(choices)}")
    for name in _TEXTS:
        _check_text(args, name)
    _check_switches(args)
    ahead = args.async_scheduling
    if ahead and args.distributed_executor_backend not in ("mp", "multi_process"):
        raise ConfigError(
            "async_scheduling plans a step while another process computes the one before: it needs "
            "distributed_executor_backend='mp'. Set that, or leave async_scheduling out"
        )
    if ahead and args.speculative_config is not None:
        raise ConfigError(
            "async_scheduling plans ahead by one token a sequence, and with speculative_config nobody knows "
            "how many there will be; leave one of them out"
        )
    size = args.block_size
    if size is not None and (type(size) is not int or size not in BLOCK_SIZES):
        raise _bad("block_size", size, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    _check_number(args, "gpu_memory_utilization", 0.0, 1.0)
    _check_number(args, "log_stats_interval_s", 0.0, math.inf)
    _check_tier(args)
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", args.metrics_prefix):
        raise _bad("metrics_prefix", args.metrics_prefix, "letters, digits and _")
    for name in ("hf_overrides", "override_generation_config"):
        if not isinstance(getattr(args, name), dict):
            raise _bad(name, getattr(args, name), "a dict")
    _check_tenant_weights(args)
    processors = args.logits_processors
    if not isinstance(processors, (list, tuple)) or not all(
        isinstance(p, str) and re.fullmatch(r"[\w.]+:[\w.]+", p) for p in processors
    ):
        raise _bad("logits_processors", processors, "a list of 'module:attribute' strings")


def _check_switches(args: EngineArgs) -> None:
    """Check every field that is declared `bool` or `bool | None`: in Python 1 and "no" are true as well."""
    for name, hint in typing.get_type_hints(type(args)).items():
        kinds = {hint, *typing.get_args(hint)}
        if bool not in kinds:
            continue
        value = getattr(args, name)
        is_optional = type(None) in kinds
        if isinstance(value, bool) or (value is None and is_optional):
            continue
        wanted = "True, False, or None for the default" if is_optional else "True or False"
        if name == "enable_chunked_prefill":
            wanted = "True, or None for the same"
        raise _bad(name, value, wanted)


def _check_tenant_weights(args: EngineArgs) -> None:
    weights = args.tenant_weights
    wanted = "a dict from tenant to a number greater than 0"
    if not isinstance(weights, dict):
        raise _bad("tenant_weights", weights, wanted)
    for tenant, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not isinstance(tenant, str) or not is_number or not 0 < weight < math.inf:
            raise _bad("tenant_weights", weights, wanted)
    if weights and args.scheduling_policy != "fair":
        raise ConfigError(
            f"tenant_weights is given, but scheduling_policy {args.scheduling_policy!r} does not look at "
            "it; leave it out, or set scheduling_policy to 'fair'"
        )


def _check_whole_number(args: EngineArgs, name: str, low: int, high: int | None) -> None:
    value = getattr(args, name)
    if value is None and name != "max_logprobs":
        return
    wanted = f"a whole number of at least {low}"
    if high is not None:
        wanted = f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, value, wanted)
    if value < low or (high is not None and value > high):
        raise _bad(name, value, wanted)


def _check_number(args: EngineArgs, name: str, above: float, high: float) -> None:
    value = getattr(args, name)
    if value is None and name == "gpu_memory_utilization":
        return
    wanted = f"a number above {above:g}" + ("" if high == math.inf else f", at most {high:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(name, value, wanted)
    if not (math.isfinite(value) and above < value <= high):
        raise _bad(name, value, wanted)


_MOST_SWAP_GIB = 1 << 20


def _check_tier(args: EngineArgs) -> None:
    space = args.swap_space
    is_number = isinstance(space, (int, float)) and not isinstance(space, bool)
    if not is_number or not (0 <= space <= _MOST_SWAP_GIB):
        raise _bad("swap_space", space, f"a number of GiB from 0 to {_MOST_SWAP_GIB}")
    if space:
        if args.kv_cache_file is not None and args.enable_prefix_caching is False:
            raise ConfigError(
                "kv_cache_file keeps prefixes, and enable_prefix_caching is False; leave one of them out"
            )
        return
    if args.kv_cache_file is not None:
        raise ConfigError("kv_cache_file needs room: swap_space is 0; raise it (GiB)")
    if args.preemption_mode == "swap":
        raise ConfigError(
            "preemption_mode is 'swap', but swap_space is 0; raise swap_space (GiB), or choose "
            "'auto' or 'recompute'"
        )


def _check_text(args: EngineArgs, name: str) -> None:
    value = getattr(args, name)
    default = next(f.default for f in dataclasses.fields(args) if f.name == name)
    if value is None and default is None:
        return
    if not isinstance(value, str) or not value:
        raise _bad(name, value, "a non-empty string")
    if name in _PATHS:
        check_path(name, value)


def _bad(name: str, value: object, wanted: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 100 else shown[:97] + "..."
    return ConfigError(f"{name} is {shown}; it must be {wanted}")
