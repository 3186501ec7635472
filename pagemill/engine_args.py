"""`EngineArgs`, the one flat list of engine arguments.

The keywords of `LLM`, the flags of the command line and the keys of the YAML file all derive from these
fields: name, type, default, help and group are said here and nowhere else. `engine.resolve` turns
an `EngineArgs` into an `EngineConfig`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pagemill.errors import NotSupportedError
from pagemill.flags import add_flag

A = TypeVar("A", bound="EngineArgs")
P = TypeVar("P", bound="argparse.ArgumentParser | argparse._ArgumentGroup")

DEMO_MODEL = "smollm2-135m-instruct"


def arg(
    default: Any,
    group: str,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    unsupported: str | None = None,
    off: tuple[Any, ...] = (),
) -> Any:
    """Describe one argument.

    `unsupported` refuses every value, with that reason, but the default and those in `off`, which say
    that the feature is not wanted.
    """
    meta = {
        "group": group, "help": help, "choices": choices, "unsupported": unsupported, "off": off
    }  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


_ADAPTERS = "this version serves no LoRA adapters"
_ONE_RANK = "this version runs on one rank"


def _is_same(value: object, other: object) -> bool:
    """Return whether two values agree, type and all (4 is 4.0, but True is not 1)."""
    same_type = type(value) is type(other) or (type(value) is int and type(other) is float)
    return same_type and value == other


@dataclass
class EngineArgs:
    """Arguments of an engine; "auto" and None are settled by `engine.resolve`."""

    # -- model
    model: str = arg(DEMO_MODEL, "model", "folder, .gguf file, hub id, or name of a pulled model")
    served_model_name: str | None = arg(None, "model", "name in the API; default: --model")
    tokenizer: str | None = arg(None, "model", "folder, tokenizer.json or .gguf; default: --model")
    tokenizer_mode: str = arg(
        "auto", "model", "auto: the fast tokenizer; slow: transformers' slow one",
        choices=("auto", "slow"),
    )  # fmt: skip
    skip_tokenizer_init: bool = arg(False, "model", "token ids in and out, no text")
    trust_remote_code: bool = arg(
        False, "model", "run code that comes with a checkpoint",
        unsupported="pagemill never runs code that comes with a checkpoint",
    )  # fmt: skip
    revision: str | None = arg(None, "model", "branch, tag or commit on the hub")
    tokenizer_revision: str | None = arg(None, "model", "the same for the tokenizer")
    download_dir: str | None = arg(None, "model", "where hub downloads are kept")
    load_format: str = arg(
        "auto", "model", "auto: by what the files are; dummy: random weights, for benchmarks",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )  # fmt: skip
    dtype: str = arg(
        "auto", "model", "auto: what the checkpoint says, float16 becoming bfloat16 on CPU",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
    )  # fmt: skip
    quantization: str | None = arg(
        None,
        "model",
        "weight format; default: the checkpoint's own. int8, int4: plain weights are brought to it "
        "while they are loaded; none: plain weights, also of a .gguf file",
    )
    max_model_len: int | None = arg(
        None, "model", "longest context in tokens; default: the checkpoint's"
    )
    seed: int | None = arg(
        None, "model", "seed of unseeded requests; default: 0 in Python, system in serve"
    )
    hf_overrides: dict[str, Any] = arg({}, "model", "keys that replace those of config.json (JSON)")
    generation_config: str = arg(
        "auto", "model", "auto: sampling defaults of the model's generation_config.json; pagemill: "
        "pagemill's own; else a folder that holds one",
    )  # fmt: skip
    override_generation_config: dict[str, Any] = arg({}, "model", "single sampling defaults (JSON)")
    max_logprobs: int = arg(20, "model", "most alternatives a request may ask for; -1: no limit")
    logprobs_mode: str = arg(
        "raw_logprobs", "model", "what logprobs are taken of",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )  # fmt: skip
    logits_processors: list[str] = arg([], "model", "engine-level processors, module:attribute")
    enforce_eager: bool = arg(
        False, "model", "no recorded steps: the model's code runs in every one"
    )
    max_context_len_to_capture: int | None = arg(None, "model", "accepted for vLLM scripts; no graphs are captured")  # fmt: skip
    # -- KV cache
    block_size: int | None = arg(
        None, "cache", "tokens a KV block: a power of two from 1 to 256; default: 16"
    )
    gpu_memory_utilization: float | None = arg(
        None,
        "cache",
        "share of the device memory to use; on CPU of the memory available at start (0.5)",
    )
    kv_cache_memory_bytes: int | None = arg(
        None, "cache", "bytes of the KV pool, outright (as a flag: 2GiB too)"
    )
    kv_cache_dtype: str = arg(
        "auto",
        "cache",
        "auto: the model's; int8: nearly half of bfloat16's memory, K and V rounded a token and head",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    swap_space: float = arg(
        4.0, "cache", "GiB of the host tier: swapped sequences and evicted prefixes; 0: none"
    )
    swap_dir: str | None = arg(
        None, "cache", "folder of the host tier's temporary file; default: swap in the cache folder"
    )
    kv_cache_file: str | None = arg(
        None,
        "cache",
        "keep the host tier in this file, so that a restarted engine finds its prefixes",
    )
    enable_prefix_caching: bool | None = arg(
        None, "cache", "find computed prefixes again; default: on"
    )
    # -- scheduler
    max_num_seqs: int | None = arg(None, "scheduler", "most sequences in a step; default: 256")
    max_num_batched_tokens: int | None = arg(
        None, "scheduler", "most tokens in a step; default: 2048"
    )
    enable_chunked_prefill: bool | None = arg(
        None, "scheduler", "long prompts are computed over several steps",
    )  # fmt: skip
    scheduling_policy: str = arg(
        "fcfs", "scheduler", "order of service: fcfs, priority (lower first, with ageing), fair (by "
        "tenant: API key or user), prefix (what is cached first)",
    )  # fmt: skip
    tenant_weights: dict[str, float] = arg(
        {}, "scheduler", "shares of tenants under policy fair, by API key or user (JSON); others: 1"
    )
    async_scheduling: bool | None = arg(
        None, "scheduler", "plan a step while the one before it computes; needs "
        "--distributed-executor-backend mp; default: there, if a processor is left beside the threads"
    )  # fmt: skip
    preemption_mode: str = arg(
        "auto", "scheduler", "what becomes of a preempted sequence's blocks; auto: what is cheaper, by "
        "costs measured at start", choices=("auto", "swap", "recompute"),
    )  # fmt: skip
    # -- parallel
    tensor_parallel_size: int = arg(
        1, "parallel", "ranks that share each layer", unsupported=_ONE_RANK
    )
    pipeline_parallel_size: int = arg(
        1, "parallel", "ranks that share the layers", unsupported=_ONE_RANK
    )
    distributed_executor_backend: str | None = arg(
        None, "parallel", "in_process: the worker in the engine's process; multi_process: in its own",
    )  # fmt: skip
    disable_custom_all_reduce: bool = arg(False, "parallel", "accepted for vLLM scripts; one rank reduces nothing")  # fmt: skip
    # -- device
    device: str = arg("auto", "device", "where to compute")
    num_threads: int | None = arg(
        None, "device", "compute threads on CPU; default: the cores at hand"
    )
    # -- adapters, speculation, pictures
    enable_lora: bool = arg(False, "lora", "serve LoRA adapters", unsupported=_ADAPTERS)
    max_loras: int = arg(1, "lora", "adapters in one batch", unsupported=_ADAPTERS)
    max_lora_rank: int = arg(16, "lora", "largest rank", unsupported=_ADAPTERS)
    speculative_config: dict[str, Any] | None = arg(
        None, "speculation", "draft tokens (JSON): method, num_speculative_tokens and more"
    )
    limit_mm_per_prompt: dict[str, int] | None = arg(
        None, "multimodal", "pictures a prompt (JSON)", unsupported="this version reads text only"
    )
    # -- observability
    disable_log_stats: bool = arg(False, "observability", "no statistics line and no metrics")
    log_stats_interval_s: float = arg(5.0, "observability", "seconds between two statistics lines")
    metrics_prefix: str = arg(
        "pagemill", "observability", "prefix of metric names (vllm keeps old boards)"
    )
    debug: bool = arg(False, "observability", "check the block invariant after every step")

    @classmethod
    def add_cli_args(cls, parser: P) -> P:
        """Add a flag a field to a program's own parser, or to a group of one; return it."""
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            made = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            hidden = f.metadata["unsupported"] is not None
            add_flag(parser, f, hints[f.name], hidden=hidden, default=made)
        return parser

    @classmethod
    def from_cli_args(cls: type[A], args: argparse.Namespace) -> A:
        """Build from what such a parser has read; its other values are passed over."""
        return cls(**{f.name: copy.copy(getattr(args, f.name)) for f in dataclasses.fields(cls)})

    @classmethod
    def from_keywords(cls: type[A], keywords: dict[str, Any]) -> A:
        """Build from keywords; an unknown one is a TypeError that names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in keywords:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"unknown engine argument {name!r}; did you mean {near!r}?")
        return cls(**keywords)

    def refuse_unsupported(self) -> None:
        """Raise for each argument that asks for a feature this version does not have."""
        for f in dataclasses.fields(self):
            reason = f.metadata["unsupported"]
            value = getattr(self, f.name)
            asks_nothing = (f.default, *f.metadata["off"])
            if reason is None or any(_is_same(value, one) for one in asks_nothing):
                continue
            raise NotSupportedError(
                f"{f.name}={value!r}: {reason}; leave {f.name} at its default ({f.default!r})"
            )
        if self.enable_chunked_prefill is False:
            raise NotSupportedError(
                "enable_chunked_prefill=False: prompts are always computed in chunks of the step "
                "budget; raise max_num_batched_tokens to compute a prompt in one step"
            )


@dataclass
class AsyncEngineArgs(EngineArgs):
    """The same arguments, for `AsyncLLMEngine`."""
