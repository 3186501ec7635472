"""How many tokens fit a KV cache of a given size: windowed layers that keep every token, and that let go.

    python -m benchmarks.windows [--gib 8] [--lengths 8192,32768] [--models FOLDER,FOLDER]

Gemma 3's shapes (layers, heads, windows) from their published configurations, bfloat16, 16 tokens a block and steps of
2048 tokens; `--models` adds those of folders with a config.json. No model runs. "requests" is how many of that
length the memory plan promises; the real scheduler then serves as many (all prompt but for 2048 tokens, without a
model), and "at once" is how many of them were running together, "preempted" how often one had to give way.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pagemill.cache_layout import CacheLayout, cache_layout, plain_layout
from pagemill.config import DTYPE_BYTES, ModelShape, SchedulerConfig
from pagemill.core.scheduler import Scheduler
from pagemill.messages import EngineRequest, SamplingSpec, SequenceOutput, StepOutput
from pagemill.models import MODELS
from pagemill.sampling_params import SamplingParams

BLOCK_SIZE = 16
STEP_TOKENS = 2048
NUM_OUTPUT = 2048
_COMMON = {"model_type": "gemma3_text", "head_dim": 256, "vocab_size": 262144}
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-270m": {
        **_COMMON, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "hidden_size": 640, "intermediate_size": 2048, "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "gemma-3-1b": {
        **_COMMON, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "hidden_size": 1152, "intermediate_size": 6912, "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "gemma-3-4b": {
        **_COMMON, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "hidden_size": 2560, "intermediate_size": 10240, "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip


def serve(layout: CacheLayout, num_blocks: int, length: int, count: int) -> tuple[int, int]:
    """Serve `count` requests of `length` tokens; return how many ran at once, and preemptions."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=STEP_TOKENS, max_num_seqs=count, policy="fcfs"),
        block_size=BLOCK_SIZE, num_blocks=num_blocks, max_model_len=length, layout=layout,
    )  # fmt: skip
    prompt = tuple(range(length - NUM_OUTPUT))
    for number in range(count):
        scheduler.add(
            EngineRequest(
                request_id=str(number), prompt=None, prompt_token_ids=prompt,
                params=SamplingParams(), sampling=SamplingSpec(), num_samples=1,
                max_tokens=1 << 30, eos_token_ids=frozenset(), stop_token_ids=frozenset(),
                arrival_time=float(number),
            )
        )  # fmt: skip
    most = num_preempted = 0
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        most = max(most, step.queues.running)
        num_preempted += step.num_preempted
        outputs = tuple(
            SequenceOutput(s.seq_id, ((7,),) if s.num_samples else ()) for s in step.scheduled
        )
        scheduler.update(step, StepOutput(step.step_id, outputs))
        if step.queues.running == count and all(s.num_samples for s in step.scheduled):
            break
    return most, num_preempted


def rows(name: str, shape: ModelShape, length: int, gib: float) -> list[str]:
    """Return two table rows: every layer keeps all, and windows let go."""
    token_bytes = shape.kv_bytes_per_token("bfloat16")
    assert token_bytes % (shape.num_layers * DTYPE_BYTES["bfloat16"]) == 0
    layouts = {
        "all kept": plain_layout(BLOCK_SIZE, shape.num_layers),
        "let go": cache_layout(
            shape, block_size=BLOCK_SIZE, max_model_len=length, max_num_tokens=STEP_TOKENS
        ),
    }
    made = []
    before = 0
    for label, layout in layouts.items():
        cell_bytes = token_bytes // shape.num_layers * BLOCK_SIZE
        block_bytes = cell_bytes * layout.block_layers(shape.num_layers)
        num_blocks = int(gib * 2**30) // block_bytes
        requests = layout.requests_that_fit(num_blocks, length)
        tokens = int(requests * length)
        most = preempted = 0
        if requests >= 1:
            most, preempted = serve(layout, num_blocks, length, int(requests))
        before = before or tokens
        made.append(
            f"| {name} | {length} | {label} | {num_blocks} | {tokens} | x {tokens / before:.2f} | "
            f"{requests:.1f} | {most} | {preempted} |"
        )
    return made


def main() -> None:
    """Parse the command line and count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--models", default="", help="folders with a config.json")
    args = parser.parse_args()
    configs = dict(SHAPES)
    for folder in filter(None, args.models.split(",")):
        configs[f"{Path(folder).name} (its files)"] = json.loads(
            (Path(folder) / "config.json").read_text()
        )
    print(f"{args.gib:g} GiB of cache")
    print(
        "| model | length | windows | blocks | tokens that fit | | requests | at once | preempted |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, config in configs.items():
        shape = MODELS.load(config["model_type"]).read_shape(config)
        for length in map(int, args.lengths.split(",")):
            print("\n".join(rows(name, shape, length, args.gib)), flush=True)


if __name__ == "__main__":
    main()
