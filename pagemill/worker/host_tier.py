"""One rank's host tier: its store, how many slots it has, and what moving and computing cost here.

Costs are measured at start, on this machine, with this model: a few blocks to a file beside the tier's own
and back, and two short shares of a prompt, one at its beginning and one far in: a token's cost has two terms, and
each share is computed once. Called by `worker.worker`.
"""

from __future__ import annotations

import itertools
import os
import time

from pagemill.batch.block_mover import HostStore
from pagemill.batch.kv_store import KVStore
from pagemill.batch.tier_file import TierFile, advice
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.host_tier_plan import HostTierPlan, MoveCosts
from pagemill.log import get_logger
from pagemill.messages import (
    NewSequence,
    SamplingSpec,
    ScheduledSequence,
    SchedulerOutput,
)
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.tier_identity import tier_identity

logger = get_logger(__name__)

_MOST_SLOTS = 1 << 23  # each takes some hundred bytes of the scheduler's memory
_PROBE_BLOCKS = 8
_PROBE_TOKENS = 64
_PROBE_CONTEXT = 1024
_PROBE_ID = -1  # of the sequence and of the steps; the scheduler's begin at 0


def open_host_tier(
    config: EngineConfig, kv: KVStore, runner: ModelRunner
) -> tuple[HostTierPlan, HostStore] | None:
    """Return the tier that the configuration asks for, or None: it asks for none, or it cannot be had.

    Raises ConfigError for a `kv_cache_file` that is not this engine's.
    """
    cache = config.cache
    slot_bytes = kv.size_bytes // kv.num_blocks
    num_slots = cache.swap_space_bytes // (slot_bytes + TierFile.overhead_bytes(slot_bytes))
    if num_slots == 0:
        if cache.kv_cache_file is not None:
            raise ConfigError(
                f"kv_cache_file needs room: swap_space is {cache.swap_space_bytes / 2**30:g} GiB, and one "
                f"block takes {(slot_bytes + TierFile.overhead_bytes(slot_bytes)) / 2**30:.2g}; raise it"
            )
        return None
    if num_slots > _MOST_SLOTS:
        most_gib = _MOST_SLOTS * (cache.swap_space_bytes // num_slots) / 2**30
        raise ConfigError(
            f"swap_space is {cache.swap_space_bytes / 2**30:g} GiB, which are {num_slots} blocks of this "
            f"model's cache; the host tier keeps at most {_MOST_SLOTS}. Lower swap_space to "
            f"{most_gib:g}, or raise block_size"
        )
    store = None
    try:
        if cache.kv_cache_file is None:
            probe = TierFile.temporary(cache.swap_dir, slot_bytes)
            store = TierFile.temporary(cache.swap_dir, slot_bytes)
        else:
            # A file that is refused is refused before anything else is done in its folder.
            identity = tier_identity(config)
            store = TierFile.lasting(cache.kv_cache_file, slot_bytes, num_slots, identity)
            folder = os.path.dirname(os.path.abspath(cache.kv_cache_file))
            probe = TierFile.temporary(folder, slot_bytes)
        swap_out_s, swap_in_s = _measure_moves(probe, kv)
    except OSError as error:
        if store is not None:
            store.close()
        logger.warning(
            "host tier: %s cannot be written: %s. Starting without it: prefixes that are evicted and "
            "sequences that are preempted are computed again. %s, choose another "
            "%s, or set swap_space to 0",
            cache.kv_cache_file or cache.swap_dir,
            error.strerror or error,
            advice(error),
            "kv_cache_file" if cache.kv_cache_file else "swap_dir",
        )
        return None
    token_s, context_s = _measure_computing(config, kv, runner)
    costs = MoveCosts(
        swap_out_s=swap_out_s,
        swap_in_s=swap_in_s,
        compute_token_s=token_s,
        compute_context_s=context_s,
    )
    plan = HostTierPlan(
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        place=store.place,
        costs=costs,
        lasts=cache.kv_cache_file is not None,
        kept=tuple(store.kept),
    )
    return plan, store


def _measure_moves(probe: TierFile, kv: KVStore) -> tuple[float, float]:
    """Return the seconds that a block takes out to a file, and in again. Closes it."""
    out, into = [], []
    for slot in range(min(_PROBE_BLOCKS, kv.num_blocks)):
        parts = kv.block_bytes(slot)
        start = time.perf_counter()
        probe.write(slot, None, parts)
        written = time.perf_counter()
        probe.read(slot, parts)
        out.append(written - start)
        into.append(time.perf_counter() - written)
    probe.close()
    # The first move opens the file and touches what is touched once; others may be disturbed.
    return sorted(out)[len(out) // 2], sorted(into)[len(into) // 2]


def _measure_computing(
    config: EngineConfig, kv: KVStore, runner: ModelRunner
) -> tuple[float, float]:
    """Return what a token costs at a prompt's beginning, and what each token before it adds, in seconds."""
    room = min(config.model.max_model_len, kv.layout.most_tokens(kv.num_blocks))
    tokens = min(_PROBE_TOKENS, config.scheduler.max_num_batched_tokens, room)
    tokens = min([tokens, *(kind.chunk for kind in kv.layout.kinds if kind.window is not None)])
    context = min(_PROBE_CONTEXT, room - tokens)
    _share_s(kv, runner, 0, 1)  # touches all weights, which would count for much of what comes next
    first = _share_s(kv, runner, 0, tokens)
    if context == 0:
        return first / tokens, 0.0
    later = _share_s(kv, runner, context, tokens)
    context_s = max(0.0, later - first) / (tokens * context)
    return max(first / tokens - context_s * tokens / 2, 0.0), context_s


def _share_s(kv: KVStore, runner: ModelRunner, start: int, count: int) -> float:
    """Return the seconds of computing positions [start, start + count) of one sequence."""
    tables: list[tuple[int, ...]] = []
    unused = itertools.count()
    for kind in kv.layout.kinds:
        first, stop = kind.first_block(start), kind.blocks_of(start + count)
        tables.append((*[0] * first, *itertools.islice(unused, stop - first)))
    new = NewSequence(_PROBE_ID, "", (0,) * (start + count), start + count, 0, SamplingSpec())
    more = tuple((0, table) for table in tables[1:])
    share = ScheduledSequence(
        _PROBE_ID, start, count, 0, tables[0], num_samples=0, more_blocks=more
    )
    began = time.perf_counter()
    runner.execute(SchedulerOutput(step_id=_PROBE_ID, scheduled=(share,), new_sequences=(new,)))
    took = time.perf_counter() - began
    runner.execute(SchedulerOutput(step_id=_PROBE_ID, scheduled=(), removed_seq_ids=(_PROBE_ID,)))
    return took
