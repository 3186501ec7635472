"""`pagemill plan [MODEL]`: weights, KV bytes a token, what fits, and what to change if it does not.

Nothing is loaded: the arithmetic is the one that the engine makes its KV cache by.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from pagemill.cli.arguments import add_fields, add_model, settle
from pagemill.engine_args import EngineArgs
from pagemill.log import setup_logging

if TYPE_CHECKING:
    from pagemill.config import EngineConfig
    from pagemill.executor.base import MemoryPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --json and the engine's flags."""
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    add_fields(parser, EngineArgs)


def run(args: argparse.Namespace) -> int:
    """Print the plan; a model that does not fit is an error with the numbers and the flag."""
    engine_args = settle(args, EngineArgs)
    setup_logging()
    from pagemill.engine.resolve import resolve
    from pagemill.worker.memory import plan_memory

    config = resolve(engine_args)
    plan = plan_memory(config)
    if args.json:
        print(json.dumps(plan_object(config, plan)))
        return 0
    print(f"{config.model.model}: {config.model.model_type}, {config.model.dtype}")
    print("\n".join(plan.lines()))
    print(f"  one token needs {_kv_bytes(config) / 1024:.1f} KiB of KV cache")
    print(advice(config, plan))
    return 0


def plan_object(config: EngineConfig, plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as JSON-ready data; sizes in bytes."""
    return {
        "model": config.model.model,
        "dtype": config.model.dtype,
        "kv_bytes_per_token": _kv_bytes(config),
        **dataclasses.asdict(plan),
    }


def advice(config: EngineConfig, plan: MemoryPlan) -> str:
    """Return one line: which argument moves the limit that binds first."""
    if plan.num_full_requests < 2:
        return (
            f"little room: one request of {plan.max_model_len} tokens nearly fills the cache. Lower "
            "--max-model-len, or raise --gpu-memory-utilization or --kv-cache-memory-bytes"
        )
    if plan.num_full_requests >= config.scheduler.max_num_seqs:
        return (
            f"the cache outlasts --max-num-seqs ({config.scheduler.max_num_seqs}): a smaller "
            "--kv-cache-memory-bytes would do"
        )
    return (
        "for more requests at once: raise --gpu-memory-utilization or --kv-cache-memory-bytes, or "
        "lower --max-model-len if requests are shorter"
    )


def _kv_bytes(config: EngineConfig) -> int:
    return config.model.shape.kv_bytes_per_token(config.cache.dtype)
