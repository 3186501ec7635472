"""One rank from configuration to a runner that can execute: device, plan, weights, cache.

Made by the executors, in the engine's process or in its own.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBackend
from pagemill.attention.cpu import CPUAttention
from pagemill.batch.kv_store import KVStore
from pagemill.checkpoint import open_checkpoint
from pagemill.config import EngineConfig
from pagemill.device import DEVICES
from pagemill.device.base import Device
from pagemill.device.host import refused_memory
from pagemill.log import get_logger
from pagemill.memory_plan import MemoryPlan
from pagemill.messages import SchedulerOutput, StepOutput
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import load_model
from pagemill.sampling import ROW_MATH
from pagemill.sampling.sampler import Sampler
from pagemill.speculation import PROPOSERS
from pagemill.speculation.base import Forward, Proposer, RankParts
from pagemill.worker.host_tier import open_host_tier
from pagemill.worker.memory import check_fits, plan_memory
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.replay import ReplayedForward

logger = get_logger(__name__)


class Worker:
    """Loads in the constructor; then runs steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Plan first, so that a cache too small is an error before the weights are read."""
        device = DEVICES.load(config.device.device)()
        device.configure(config.device.num_threads)
        self._plan = plan_memory(config)
        check_fits(self._plan)
        start = time.perf_counter()
        dummy = config.model.load_format == "dummy"
        with refused_memory("weights were loaded and packed"):
            model = load_model(
                config.model,
                device=device.torch_device,
                checkpoint=None if dummy else open_checkpoint(config.model.path),
                dense=device.dense_weights,
            )
        logger.info("loaded %s in %.1f s", config.model.model, time.perf_counter() - start)
        for line in self._plan.lines():
            logger.info(line)
        backend = BACKENDS.load(device.attention_backend)()
        with refused_memory("the KV cache was made"):
            self.kv = KVStore(
                backend,
                model.attention_specs,
                num_blocks=self._plan.num_blocks,
                block_size=config.cache.block_size,
                dtype=getattr(torch, config.cache.dtype),
                device=device.torch_device,
                layout=self._plan.layout,
            )
        sampler = Sampler(
            dtype=config.model.dtype,
            logprobs_mode=config.model.logprobs_mode,
            logits_processors=config.model.logits_processors,
            math=ROW_MATH.load(device.dense_weights)(),
        )
        self._runner = ModelRunner(
            model,
            backend,
            self.kv,
            sampler,
            device,
            max_logit_rows=config.scheduler.max_num_seqs,
            forward=_replayed(config, model, backend),
            proposer=self._proposer(config, backend, sampler, device),
        )
        tier = open_host_tier(config, self.kv, self._runner)
        if tier is not None:
            plan, store = tier
            self._plan = dataclasses.replace(self._plan, host_tier=plan)
            self._runner.swap_to(store)
            for line in plan.lines(self.kv.block_size, self.kv.layout.num_blocks_each):
                logger.info(line)

    def _proposer(
        self, config: EngineConfig, backend: AttentionBackend, sampler: Sampler, device: Device
    ) -> Proposer | None:
        """Return what guesses tokens, if anything is to."""
        if config.speculative is None:
            return None
        parts = RankParts(
            backend,
            sampler,
            device.torch_device,
            device.dense_weights,
            self._plan.num_blocks,
            lambda model: _replayed_layers(config, model, backend),
        )
        with refused_memory("the draft model and its cache were made"):
            return PROPOSERS.load(config.speculative.method).make(config, parts)

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the plan the KV cache was made by."""
        return self._plan

    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Run one step."""
        return self._runner.execute(step)

    def close(self) -> None:
        """Let go of files; the memory goes with the object."""
        self._runner.close()


def _replayed(
    config: EngineConfig, model: DecoderLM, backend: AttentionBackend
) -> ReplayedForward | None:
    """Return a forward that replays small steps, where all of it is native calls."""
    if config.device.enforce_eager or not isinstance(backend, CPUAttention):
        return None
    return ReplayedForward(model, backend)


def _replayed_layers(
    config: EngineConfig, model: DecoderLM, backend: AttentionBackend
) -> Forward | None:
    """Return the pass to hidden states of such a forward, for a model beside the target."""
    replayed = _replayed(config, model, backend)
    return None if replayed is None else replayed.hidden
