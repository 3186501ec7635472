"""From `EngineArgs` to `EngineConfig`: every "auto" is settled here, once, each with its reason.

Called when an engine starts (`engine.llm_engine`) and by `pagemill plan`. The reasons are
`EngineConfig.notes`; whoever starts the engine logs them. Nothing here imports torch itself; the
registries of models and devices do when their entries are loaded. Ranges of single arguments:
`engine.argument_checks`; sampling defaults and end tokens: `engine.generation_defaults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill import env, native
from pagemill.attention import BACKENDS
from pagemill.checkpoint import checkpoint_format, locate, read_configs
from pagemill.config import (
    IN_PROCESS,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pagemill.core.policies import POLICIES
from pagemill.device import DEVICES, resolve_device
from pagemill.device.host import num_processors
from pagemill.engine.argument_checks import check_arguments
from pagemill.engine.generation_defaults import end_token_ids, sampling_defaults
from pagemill.engine.speculation import check_draft, draft_arguments, read_speculative_config
from pagemill.engine.tokenizer_source import read_tokenizer, tokenizer_path
from pagemill.engine_args import EngineArgs
from pagemill.errors import CheckpointError, ConfigError, NotSupportedError, UnknownNameError
from pagemill.executor import EXECUTORS
from pagemill.models import MODELS
from pagemill.quant import CHECKPOINT_SCHEMES, QUANT_METHODS, find_settings
from pagemill.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from pagemill.device.base import Device

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# Attention backends whose bits depend on the batch -> what still holds with them.
_MOST_THREADS = 16  # a processor
_REFERENCE_KERNELS = {
    "torch": "attention is plain torch; greedy tokens in float32 do not depend on the batch, other "
    "results may in their last bits",
}
# vLLM's names of the executors.
_EXECUTOR_NAMES = {None: IN_PROCESS, "uni": IN_PROCESS, "mp": "multi_process"}


@dataclass(slots=True)
class _Notes:
    """The choices made so far, as lines for the log."""

    lines: list[str] = field(default_factory=list)

    def say(self, name: str, value: object, reason: str) -> None:
        self.lines.append(f"{name} = {value}: {reason}")


def resolve(args: EngineArgs) -> EngineConfig:
    """Return the settled configuration; raises ConfigError or CheckpointError."""
    return resolve_engine(args)[0]


def resolve_engine(args: EngineArgs) -> tuple[EngineConfig, Tokenizer | None]:
    """Return the settled configuration and the tokenizer, which settling has to read anyway."""
    check_arguments(args)
    notes = _Notes()
    path = locate(args.model, revision=args.revision, download_dir=args.download_dir)
    configs = read_configs(path)
    tokenizer = read_tokenizer(args)
    # Torch comes in here; what can be wrong without it has been found by now.
    env.shorten_idle_spinning()
    device_name, device_reason = resolve_device(args.device)
    device = DEVICES.load(device_name)()
    model = _model(args, path, configs, tokenizer, device, notes)
    config = EngineConfig(
        model=model,
        cache=_cache(args, model, device, notes),
        scheduler=_scheduler(args, notes),
        parallel=_parallel(args, notes),
        device=_device(args, device_name, device_reason, device, notes),
        observability=ObservabilityConfig(
            log_stats=not args.disable_log_stats,
            log_stats_interval_s=args.log_stats_interval_s,
            metrics_prefix=args.metrics_prefix,
            debug=args.debug,
        ),
        speculative=_speculative(args, model, tokenizer, device, notes),
        notes=tuple(notes.lines),
    )
    return _settle_async_scheduling(config, args, notes), tokenizer


# ---------------------------------------------------------------- model


def _model(
    args: EngineArgs,
    path: Path,
    configs: tuple[dict[str, Any], dict[str, Any]],
    tokenizer: Tokenizer | None,
    device: Device,
    notes: _Notes,
) -> ModelConfig:
    hf_config, generation = configs
    hf_config = {**hf_config, **args.hf_overrides}
    if args.hf_overrides:
        notes.say("config.json", sorted(args.hf_overrides), "replaced by hf_overrides")
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"config.json of {path} has no model_type; known: {', '.join(MODELS.names())}"
        )
    shape = MODELS.load(model_type).read_shape(hf_config)
    load_format = _load_format(args, path, notes)
    defaults = sampling_defaults(args, generation)
    if defaults:
        notes.say("sampling defaults", defaults, "from the model's generation_config.json")
    return ModelConfig(
        model=args.model,
        path=str(path),
        tokenizer=str(path if args.tokenizer is None else tokenizer_path(args)),
        skip_tokenizer_init=args.skip_tokenizer_init,
        served_model_name=args.served_model_name or args.model,
        load_format=load_format,
        model_type=model_type,
        hf_config=hf_config,
        generation_config=defaults,
        shape=shape,
        dtype=_dtype(args, device, hf_config, notes),
        quantization=_quantization(args, hf_config, checkpoint_format(path), notes),
        max_model_len=_max_model_len(
            args, MODELS.load(model_type).context_lengths(hf_config), notes
        ),
        seed=args.seed,
        eos_token_ids=end_token_ids(hf_config, generation, tokenizer, shape.vocab_size),
        max_logprobs=args.max_logprobs,
        logprobs_mode=args.logprobs_mode,
        logits_processors=tuple(args.logits_processors),
    )


def _load_format(args: EngineArgs, path: Path, notes: _Notes) -> str:
    found = checkpoint_format(path)
    if args.load_format == "auto":
        notes.say("load_format", found, f"what lies at {path}")
        return found
    if args.load_format not in (found, "dummy"):
        raise ConfigError(
            f"load_format is {args.load_format!r}, but the model at {path} is {found}; leave it at "
            "auto"
        )
    return args.load_format


def _dtype(args: EngineArgs, device: Device, hf_config: dict[str, Any], notes: _Notes) -> str:
    key, said = _checkpoint_dtype(hf_config)
    settled, reason = device.resolve_dtype(args.dtype, said)
    if args.dtype == "auto":
        notes.say("dtype", settled, f"{reason} ({key})")
    return settled


def _quantization(
    args: EngineArgs, hf_config: dict[str, Any], found: str, notes: _Notes
) -> str | None:
    """Return the weight format: the checkpoint's own, one made while loading, or None for plain ones.

    The format's settings are checked here as well, before anything is loaded.
    """
    key, settings = find_settings(hf_config)
    asked = None if args.quantization == "auto" else args.quantization
    if asked is not None and asked not in CHECKPOINT_SCHEMES and asked not in QUANT_METHODS:
        raise UnknownNameError(
            f"unknown quantization {asked!r}; made while loading: {', '.join(QUANT_METHODS.names())}; "
            f"read from checkpoints: {', '.join(CHECKPOINT_SCHEMES.names())}"
        )
    if settings is None:
        if asked in CHECKPOINT_SCHEMES:
            raise ConfigError(
                f"quantization is {asked!r}, but config.json of this checkpoint has no "
                "quantization_config: its weights are plain. Leave it out, or choose one of "
                f"{', '.join(QUANT_METHODS.names())}, which are made while loading"
            )
        return None if asked == "none" else asked
    method = _method_of(key, settings)
    CHECKPOINT_SCHEMES.load(method)(settings)  # refuses what it cannot read
    if method == "gguf":
        return _of_blocks(asked, found, notes)
    if asked not in (None, method):
        raise ConfigError(
            f"quantization is {asked!r}, but the weights of this checkpoint are quantized already, as "
            f"{method!r} ({key} of config.json); leave quantization out"
        )
    notes.say("quantization", method, f"{key} of config.json")
    return method


def _of_blocks(asked: str | None, found: str, notes: _Notes) -> str | None:
    """Return the weight format for a .gguf file in blocks, which can also become plain weights."""
    if found != "gguf":
        raise CheckpointError(
            f"quantization_config of config.json names quant_method 'gguf', which belongs to .gguf files, "
            f"but the weights are {found}"
        )
    if asked in QUANT_METHODS:
        notes.say("quantization", asked, "asked for; the file's blocks become plain weights first")
        return None if asked == "none" else asked
    if asked not in (None, "gguf"):
        raise ConfigError(
            f"quantization is {asked!r}, but this checkpoint is a .gguf file in blocks ('gguf'); leave "
            "quantization out, or set it to 'none' for plain weights"
        )
    if asked is None and native.extension() is None:
        notes.say("quantization", "none", "without native kernels plain weights are faster")
        return None
    notes.say(
        "quantization", "gguf", "the file's blocks stay as they are; 'none' for plain weights"
    )
    return "gguf"


def _method_of(key: str, settings: object) -> str:
    """Return the name of a checkpoint's format; an unknown one lists the known ones."""
    method: object = settings
    if isinstance(settings, dict):
        method = settings.get("quant_method")
        if method is None and "config_groups" in settings:
            method = "compressed-tensors"
    if not isinstance(settings, dict) or method not in CHECKPOINT_SCHEMES:
        named = "no quant_method" if method is None else f"{method!r}"
        raise NotSupportedError(
            f"the weights of this checkpoint are quantized ({key} of config.json: {named}), and this "
            f"version reads {', '.join(CHECKPOINT_SCHEMES.names())}; use the original model, or one "
            "quantized to these. Weights that were dequantized load with hf_overrides "
            f'{{"{key}": null}}'
        )
    return str(method)


def _checkpoint_dtype(hf_config: dict[str, Any]) -> tuple[str, str]:
    """Return the dtype that config.json names and where; float32, as transformers, without one."""
    text = hf_config.get("text_config")
    for source in (hf_config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(source.get(key), str):
                return f"{key} of config.json", str(source[key]).removeprefix("torch.")
    return "config.json names no dtype", "float32"


def _max_model_len(args: EngineArgs, contexts: tuple[int, int], notes: _Notes) -> int:
    usual, limit = contexts
    asked = args.max_model_len
    if asked is None:
        notes.say("max_model_len", usual, "the longest context the checkpoint declares")
        return usual
    if asked > limit:
        raise ConfigError(
            f"max_model_len is {asked}, but this checkpoint's context is {limit} tokens; lower it "
            f"to at most {limit}, or give the checkpoint's rope scaling with hf_overrides"
        )
    return asked


# ---------------------------------------------------------------- the other sections


def _speculative(
    args: EngineArgs,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    device: Device,
    notes: _Notes,
) -> SpeculativeConfig | None:
    settings = read_speculative_config(args.speculative_config)
    if settings is None:
        return None
    draft = None
    if settings.needs_model:
        draft_args = draft_arguments(args, settings, model.dtype)
        path = locate(draft_args.model, revision=draft_args.revision)
        draft = _model(draft_args, path, read_configs(path), tokenizer, device, _Notes())
        # The same files have the same tokens; reading a large vocabulary again takes seconds.
        own = tokenizer if draft.path == model.path else read_tokenizer(draft_args)
        check_draft(draft, own, model, tokenizer)
        notes.say("draft model", path, "speculative_config")
    notes.say(
        "speculative_config",
        settings.config.method,
        f"at most {settings.config.num_speculative_tokens} draft tokens a sequence and step, "
        + ("fewer where they do not pay" if settings.config.adaptive_length else "always as many"),
    )
    return replace(settings.config, draft_model=draft)


def _cache(args: EngineArgs, model: ModelConfig, device: Device, notes: _Notes) -> CacheConfig:
    block_size = args.block_size
    if block_size is None:
        block_size = DEFAULT_BLOCK_SIZE
        notes.say("block_size", block_size, "default; legal are the powers of two from 1 to 256")
    share = args.gpu_memory_utilization
    if share is None:
        share = device.default_memory_utilization
        if args.kv_cache_memory_bytes is None:
            notes.say("gpu_memory_utilization", share, "default share of the available memory")
    dtype = args.kv_cache_dtype
    if dtype == "auto":
        dtype = model.dtype
        notes.say("kv_cache_dtype", dtype, "the model's dtype")
    known = BACKENDS.load(device.attention_backend).cache_dtypes
    if dtype not in known:
        raise ConfigError(
            f"kv_cache_dtype is {dtype!r}, which the {device.attention_backend!r} attention backend does "
            f"not keep (it needs the native kernels; see the line about them); choose one of "
            f"{', '.join(known)}"
        )
    caching = args.enable_prefix_caching
    if caching is None:
        caching = True
        notes.say("enable_prefix_caching", caching, "default; answers do not depend on it")
    return CacheConfig(
        block_size=block_size,
        dtype=dtype,
        gpu_memory_utilization=share,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        enable_prefix_caching=caching,
        swap_space_bytes=int(args.swap_space * 2**30),
        swap_dir=args.swap_dir or str(env.cache_dir() / "swap"),
        kv_cache_file=args.kv_cache_file,
    )


def _scheduler(args: EngineArgs, notes: _Notes) -> SchedulerConfig:
    """Settle the budgets. A token budget under max_num_seqs is legal: sequences take turns."""
    tokens, seqs = args.max_num_batched_tokens, args.max_num_seqs
    if tokens is None:
        tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS
        notes.say("max_num_batched_tokens", tokens, "default")
    if seqs is None:
        seqs = min(DEFAULT_MAX_NUM_SEQS, tokens)
        reason = "default" if seqs == DEFAULT_MAX_NUM_SEQS else "one token of the step for each"
        notes.say("max_num_seqs", seqs, reason)
    POLICIES.load(args.scheduling_policy)
    return SchedulerConfig(
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        policy=args.scheduling_policy,
        tenant_weights=dict(args.tenant_weights),
        preemption_mode=args.preemption_mode,
    )


def _parallel(args: EngineArgs, notes: _Notes) -> ParallelConfig:
    name = args.distributed_executor_backend
    executor = _EXECUTOR_NAMES.get(name, name)
    if name is None:
        notes.say("executor", executor, "one rank needs no process beside the engine's")
    if executor not in EXECUTORS:
        EXECUTORS.load(str(executor))  # raises, listing the known ones
    return ParallelConfig(executor=str(executor), tensor_parallel_size=args.tensor_parallel_size)


def _settle_async_scheduling(config: EngineConfig, args: EngineArgs, notes: _Notes) -> EngineConfig:
    """Plan steps ahead if asked to, or where it was measured to pay: see docs/decisions/012."""
    wanted = args.async_scheduling
    if wanted is None:
        is_elsewhere = config.parallel.executor != IN_PROCESS and config.speculative is None
        wanted = is_elsewhere and config.device.num_threads < num_processors()
        if is_elsewhere:
            reason = "a processor is" if wanted else "no processor is"
            notes.say("async_scheduling", wanted, f"{reason} left beside the worker's threads")
    scheduler = replace(config.scheduler, async_scheduling=wanted)
    return replace(config, scheduler=scheduler, notes=tuple(notes.lines))


def _device(
    args: EngineArgs, name: str, reason: str, device: Device, notes: _Notes
) -> DeviceConfig:
    if args.device == "auto":
        notes.say("device", name, reason)
    notes.say("kernels", device.dense_weights, native.describe())
    kernels = _REFERENCE_KERNELS.get(device.attention_backend)
    if kernels is not None:
        notes.say("attention", device.attention_backend, kernels)
    num_threads, chosen = args.num_threads, "asked for"
    if num_threads is None:
        num_threads, chosen = device.default_num_threads()
    processors = num_processors()
    if num_threads > _MOST_THREADS * processors:
        raise ConfigError(
            f"num_threads is {num_threads}, and this process may use {processors} processors; it must be "
            f"at most {_MOST_THREADS * processors} ({_MOST_THREADS} each): the threads of a step wait for "
            "each other"
        )
    if num_threads > processors:
        chosen += f", more than the {processors} processors, which makes steps slower"
    notes.say("num_threads", num_threads, f"{chosen}; {device.thread_places(num_threads)}")
    return DeviceConfig(device=name, num_threads=num_threads, enforce_eager=args.enforce_eager)
