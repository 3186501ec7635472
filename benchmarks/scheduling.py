"""What planning costs a step: schedule() and update() alone, as sequences and waiting requests grow.

    python -m benchmarks.scheduling [--policies fcfs,priority,fair,prefix] [--running 1,10,100,1000]
                                    [--waiting 0,1000,100000] [--steps 100] [--measure-step]

The real scheduler and block manager, no model. "steady": every running sequence decodes and nothing ends.
"turnover": in each step one in 64 of the running ends (at least one every fourth step), as many come, and as
many are admitted from the waiting, over a pool in which everybody fits. Milliseconds of
processor time a step, to which other processes do not add: the median and the 99th percentile. The last
column is the median under turnover as a share of a decode step of the Qwen3-0.6B shape with 256 sequences of 128
tokens: of the fastest of a few such steps with `--measure-step`, which runs them first (bfloat16, made-up weights, 8 GiB), and
else of `--step-ms`.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time

from pagemill.config import SchedulerConfig
from pagemill.core.policies import POLICIES
from pagemill.core.scheduler import Scheduler
from pagemill.messages import (
    EngineRequest,
    SamplingSpec,
    SchedulerOutput,
    SequenceOutput,
    StepOutput,
)
from pagemill.sampling_params import SamplingParams

BLOCK_SIZE = 16
NUM_PROMPT = 256
NUM_TENANTS = 100
NUM_STEMS = 50  # system prompts that requests begin with, of half a prompt
NUM_MODEL_SEQUENCES = 256
MODEL_CONTEXT = 128
_NUM_MODEL_STEPS = 8
_PARAMS = SamplingParams()
_SPEC = SamplingSpec()
_ONE = ((7,),)


class Load:
    """A scheduler with so many running and so many waiting requests."""

    def __init__(self, policy: str, num_running: int, num_waiting: int) -> None:
        self.turns_over = False
        self._policy = policy
        self._num_running = num_running
        self._rng = random.Random(0)
        self._count = 0
        self._ending = 0.0
        blocks_each = (NUM_PROMPT + 1024) // BLOCK_SIZE
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=1 << 20, max_num_seqs=num_running, policy=policy
            ),
            block_size=BLOCK_SIZE,
            num_blocks=(num_running + 32) * blocks_each,
            max_model_len=NUM_PROMPT + 1024,
            caches_prefixes=True,
        )
        for _ in range(num_running + num_waiting):
            self._add()
        for _ in range(3):
            self.step()

    def step(self) -> float:
        """Run one step; return the seconds that the scheduler took."""
        begun = time.thread_time()
        step = self.scheduler.schedule()
        seconds = time.thread_time() - begun
        result = _result(step)
        begun = time.thread_time()
        self.scheduler.update(step, result)
        seconds += time.thread_time() - begun
        if self.turns_over:
            self._ending += max(0.25, self._num_running / 64)
            while self._ending >= 1:
                self._ending -= 1
                self.scheduler.finish(self._rng.choice(step.scheduled).seq_id, "stop", "x")
                self._add()
        return seconds

    def _add(self) -> None:
        number = self._count
        self._count += 1
        stem = self._rng.randrange(NUM_STEMS) * 1000
        half = NUM_PROMPT // 2
        own = self._rng.randrange(1 << 30)
        priority = self._rng.randrange(-3, 4)
        self.scheduler.add(
            EngineRequest(
                request_id=str(number),
                prompt=None,
                prompt_token_ids=(*range(stem, stem + half), *range(own, own + half)),
                params=_PARAMS,
                sampling=_SPEC,
                num_samples=1,
                max_tokens=1024,
                eos_token_ids=frozenset(),
                stop_token_ids=frozenset(),
                arrival_time=number / 100,
                priority=priority if POLICIES.load(self._policy).uses_priority else 0,
                tenant=f"tenant{self._rng.randrange(NUM_TENANTS)}",
            )
        )


def _result(step: SchedulerOutput) -> StepOutput:
    outputs = tuple(SequenceOutput(s.seq_id, _ONE if s.num_samples else ()) for s in step.scheduled)
    return StepOutput(step.step_id, outputs)


def measure(load: Load, num_steps: int) -> list[float]:
    """Return the seconds of some steps, rising. The collector rests: it would see the requests' heap."""
    gc.collect()
    gc.disable()
    seconds = sorted(load.step() for _ in range(num_steps))
    gc.enable()
    return seconds


def measure_step(num_sequences: int, context: int, threads: int, num_layers: int | None) -> float:
    """Return the milliseconds of the fastest of a few decode steps of Qwen3-0.6B's shape."""
    from benchmarks.growth import BLOCK_SIZE, MODELS, NUM_WARM_UP, Model, make_worker, run_steps

    shape = MODELS["qwen3-0.6b"]
    model = Model(shape, num_layers or shape["num_hidden_layers"])
    room = NUM_WARM_UP + _NUM_MODEL_STEPS + BLOCK_SIZE
    blocks = num_sequences * -(-(context + room) // BLOCK_SIZE)
    worker = make_worker(model, threads, blocks * BLOCK_SIZE, context + room, num_sequences)
    return run_steps(worker, num_sequences, context, _NUM_MODEL_STEPS)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--policies", default="fcfs,priority,fair,prefix")
    parser.add_argument("--running", default="1,10,100,1000")
    parser.add_argument("--waiting", default="0,1000,100000")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=800.0)
    parser.add_argument("--measure-step", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="of the measured step")
    parser.add_argument("--layers", type=int, default=None, help="of its model; all if left out")
    args = parser.parse_args()
    step_ms = args.step_ms
    if args.measure_step:
        step_ms = measure_step(NUM_MODEL_SEQUENCES, MODEL_CONTEXT, args.threads, args.layers)
        print(f"a decode step of {NUM_MODEL_SEQUENCES} sequences: {step_ms:.1f} ms", flush=True)
    print("policy    running  waiting   steady ms (p99)    turnover ms (p99)    share of a step")
    for policy in args.policies.split(","):
        for num_running in map(int, args.running.split(",")):
            for num_waiting in map(int, args.waiting.split(",")):
                cells = []
                load = Load(policy, num_running, num_waiting)
                for load.turns_over in (False, True):
                    seconds = measure(load, args.steps)
                    last = seconds[int(0.99 * (len(seconds) - 1))]
                    cells.append((1e3 * statistics.median(seconds), 1e3 * last))
                (steady, steady_p99), (turning, turning_p99) = cells
                share = 100 * turning / step_ms
                print(
                    f"{policy:9s} {num_running:7d} {num_waiting:8d}  {steady:8.3f} ({steady_p99:.3f})"
                    f"    {turning:8.3f} ({turning_p99:.3f})    {share:6.2f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
