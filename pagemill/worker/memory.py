"""The memory plan: how many KV blocks fit, computed from shapes before anything is loaded.

    available   what the process may still take at start (machine, or cgroup limit)
    usable      available * gpu_memory_utilization
    weights     parameters in the model's dtype, and those of a draft model
    activations the worst-case step: max_num_batched_tokens tokens of sequences at max_model_len, then
                max_num_seqs rows of logits (and one a draft token) and the sampler; and what the device's libraries keep
    mapped      the weights' files while they are read: only where the process's address space is limited
    KV cache    the rest, in whole blocks; or kv_cache_memory_bytes outright. A block of the plan is one
                of the model's pool and one of the draft model's

Called by the worker, and by `pagemill plan` with the same arithmetic.
"""

from __future__ import annotations

import math

import torch

from pagemill.attention import BACKENDS
from pagemill.attention.cpu import CPUAttention
from pagemill.cache_layout import CacheLayout, layout_of
from pagemill.config import EngineConfig
from pagemill.device import DEVICES, host
from pagemill.device.base import Device
from pagemill.errors import CacheTooSmallError, ConfigError
from pagemill.memory_plan import MemoryPlan
from pagemill.models.base import CausalLM
from pagemill.models.loader import build_meta_model
from pagemill.ops.kept_results import kept_bytes
from pagemill.sampling import ROW_MATH, sampler
from pagemill.worker.replay import arena_bytes

# Flat inputs of one token: ids, positions, slots, owners and their temporaries, int64 each.
_INPUT_BYTES_PER_TOKEN = 8 * 8


def plan_memory(config: EngineConfig, available_bytes: int | None = None) -> MemoryPlan:
    """Return the plan; `available_bytes` None asks the device.

    Raises CacheTooSmallError when the pool could not hold one request of `max_model_len` tokens.
    """
    device = DEVICES.load(config.device.device)()
    available = device.available_bytes() if available_bytes is None else available_bytes
    # A plan for a given size is of a machine, not of this process.
    limit = host.limit_that_binds(available) if available_bytes is None else None
    usable = int(available * config.cache.gpu_memory_utilization)
    model = build_meta_model(config.model, dense=device.dense_weights)
    weights = weight_bytes(model)
    peak = peak_activation_bytes(config, model, device)
    draft = config.speculative.draft_model if config.speculative is not None else None
    if draft is not None:
        draft_model = build_meta_model(draft, dense=device.dense_weights)
        weights += weight_bytes(draft_model)
        # The two models compute one after the other; each keeps its recordings.
        peak = max(peak, peak_activation_bytes(config, draft_model, device))
        peak += _recording_bytes(draft_model, device)
    peak += device.library_bytes(config.model.dtype)
    # What is mapped takes no memory, but counts against such a limit.
    mapped = 0 if limit is None else weights
    free = usable - weights - peak - mapped
    if config.cache.kv_cache_memory_bytes is not None:
        free = config.cache.kv_cache_memory_bytes
    layout = layout_of(config)
    shape = config.model.shape
    token_bytes = shape.kv_bytes_per_token(config.cache.dtype)
    if draft is not None:
        token_bytes += draft.shape.kv_bytes_per_token(config.cache.dtype)
    token_bytes = token_bytes * layout.block_layers(shape.num_layers) // shape.num_layers
    block_bytes = token_bytes * config.cache.block_size
    num_blocks = _num_blocks(config, layout, free, block_bytes)
    longest = config.model.max_model_len
    num_full_requests = layout.requests_that_fit(num_blocks, longest)
    too_small = num_blocks < layout.blocks_of_request(longest)
    plan = MemoryPlan(
        available_bytes=available,
        usable_bytes=usable,
        weight_bytes=weights,
        peak_activation_bytes=peak,
        kv_cache_bytes=num_blocks * block_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_tokens=_tokens_that_fit(layout, num_blocks, longest, too_small),
        max_model_len=longest,
        num_full_requests=num_full_requests,
        layout=layout,
        num_tokens_without_windows=(
            num_blocks * block_bytes // shape.kv_bytes_per_token(config.cache.dtype)
        ),
    )
    if too_small:
        raise CacheTooSmallError(_too_small(config, plan, max(0, free), limit))
    return plan


def check_fits(plan: MemoryPlan) -> None:
    """Refuse to load what this machine cannot hold, whoever chose the size of the pool.

    A plan may be made for another machine; a worker that goes past what its own has ends it instead.
    """
    needed = plan.weight_bytes + plan.kv_cache_bytes
    if needed > plan.available_bytes:
        raise ConfigError(
            f"weights take {_size(plan.weight_bytes)} and the KV cache {_size(plan.kv_cache_bytes)}, "
            f"but {_size(plan.available_bytes)} of memory is available. Lower kv_cache_memory_bytes, "
            "choose a smaller model or dtype, free memory, or raise the process's limit (ulimit -v)"
        )


def weight_bytes(model: CausalLM) -> int:
    """Return the bytes of all parameters and buffers, tied ones once."""
    assert isinstance(model, torch.nn.Module)
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def peak_activation_bytes(config: EngineConfig, model: CausalLM, device: Device) -> int:
    """Return the temporary memory of the worst-case step.

    The forward pass and the logits with the sampler come one after the other, so the larger counts; but
    logits whose memory is kept are there all the time.
    """
    backend = BACKENDS.load(device.attention_backend)()
    tokens = config.scheduler.max_num_batched_tokens
    seqs = min(config.scheduler.max_num_seqs, tokens)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    longest = config.model.max_model_len
    sizes = {kind.block_tokens for kind in layout_of(config).kinds}
    attention: int = max(
        backend.peak_bytes(spec, tokens, seqs, longest, dtype, block_size)
        for spec in set(model.attention_specs)
        for block_size in sizes
    )
    forward = model.peak_bytes(tokens, 0) + attention
    recordings = _recording_bytes(model, device)
    sampling = sampler.peak_bytes(
        config.model.shape.vocab_size,
        ROW_MATH.load(device.dense_weights)(),
        config.device.num_threads,
    )
    rows = seqs + _most_drafts(config)
    after = model.peak_bytes(tokens, rows) + sampling
    kept = kept_bytes(rows, config.model.shape.vocab_size) if recordings else 0
    return max(forward + kept, after) + tokens * _INPUT_BYTES_PER_TOKEN + recordings


def _recording_bytes(model: CausalLM, device: Device) -> int:
    """Return what recorded steps of a model keep."""
    backend = BACKENDS.load(device.attention_backend)()
    return arena_bytes(model) if isinstance(backend, CPUAttention) else 0


def _most_drafts(config: EngineConfig) -> int:
    """Return the most draft tokens of a step; each has a row of logits."""
    spec, scheduler = config.speculative, config.scheduler
    if spec is None:
        return 0
    most = scheduler.max_num_seqs * spec.num_speculative_tokens
    return min(most, spec.max_drafts, scheduler.max_num_batched_tokens - 1)


def _num_blocks(config: EngineConfig, layout: CacheLayout, free: int, block_bytes: int) -> int:
    """Return the blocks of the pool: no more than max_num_seqs full-length requests can fill."""
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    num_blocks = max(0, free) // block_bytes
    if config.cache.kv_cache_memory_bytes is not None:
        return num_blocks
    one = layout.blocks_of_request(config.model.max_model_len)
    return min(num_blocks, config.scheduler.max_num_seqs * one)


def _tokens_that_fit(
    layout: CacheLayout, num_blocks: int, max_model_len: int, too_small: bool
) -> int:
    """Return the tokens of requests of full length that fit, or of the longest that would."""
    if not layout.lets_go:
        return num_blocks * layout.kinds[0].block_tokens
    if too_small:
        return layout.most_tokens(num_blocks)
    return int(layout.requests_that_fit(num_blocks, max_model_len) * max_model_len)


def _too_small(config: EngineConfig, plan: MemoryPlan, free: int, limit: int | None) -> str:
    """Return what is short and the ways out; `limit` is the process's own, where it decides."""
    assert plan.layout is not None
    need = plan.layout.blocks_of_request(plan.max_model_len) * plan.block_bytes
    text = (
        f"One request of max_model_len = {plan.max_model_len} tokens needs {_size(need)} of KV cache "
        f"but {_size(free)} is free"
    )
    ways = []
    if plan.num_tokens:
        ways.append(f"lower max_model_len to {plan.num_tokens} or less")
    if config.cache.kv_cache_memory_bytes is not None:
        text += " (kv_cache_memory_bytes)"
        ways.append(f"raise kv_cache_memory_bytes to at least {need}")
    elif config.cache.num_blocks is None:
        fixed = plan.weight_bytes + plan.peak_activation_bytes
        whose = "" if limit is None else f" under {host.limit_words(limit)}"
        text += (
            f": of {_size(plan.available_bytes)} available{whose}, gpu_memory_utilization = "
            f"{config.cache.gpu_memory_utilization:g} allows {_size(plan.usable_bytes)}, weights take "
            f"{_size(plan.weight_bytes)} and the worst-case step {_size(plan.peak_activation_bytes)}"
        )
        if limit is not None:
            fixed += plan.weight_bytes
            text += "; the weights' files take their size again while they are read"
            ways.append(
                f"raise the limit to about ulimit -v {_enough(config, plan, limit, fixed + need)}"
            )
        share = math.ceil(100 * (fixed + need) / max(1, plan.available_bytes)) / 100
        if share <= 1.0:
            ways.append(f"raise gpu_memory_utilization to {share:g}")
        if limit is None or share <= 1.0:
            ways.append(f"set kv_cache_memory_bytes to at least {need}")
        if not plan.num_tokens:
            ways.append("lower max_num_batched_tokens or max_num_seqs for a smaller step")
    return f"{text}. To fit: {'; or '.join(ways)}."


def _enough(config: EngineConfig, plan: MemoryPlan, limit: int, needed: int) -> int:
    """Return a limit in KiB, as the shell takes it, under which `needed` bytes are usable; in whole 10 MiB."""
    short = needed / config.cache.gpu_memory_utilization - plan.available_bytes
    return math.ceil((limit + short) / (10 << 20)) * (10 << 10)


def _size(count: int) -> str:
    """Return bytes in words, in the largest unit that leaves at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
