"""The real scheduler and block manager over a made-up clock: no model, 100,000 requests in minutes.

    python -m benchmarks.simulate --workload chat --rate 2 --num-requests 100000 --policy fcfs

A step costs what the cost model says (weights, tokens, context, sequences), requests arrive at random, and what
each of them waited for is written down. Prints percentiles of the time to the first token and between tokens,
goodput (requests a second that kept both limits), preemptions, prefix hits, and how unevenly tenants were served.
`--plot FILE.png` draws the distributions; give several policies to compare them on the same arrivals.

Lengths are log-normal. Medians of "chat" and "code" are those of the conversation and coding traces in Patel et
al. 2024 (Splitwise, table 2: prompts 1,020 and 1,500 tokens, outputs 129 and 13); the spreads are assumed. "flood"
is made up: short chats, and now and then a prompt of 20,000 tokens. "shared" has system prompts that
tenants repeat.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pagemill.config import SchedulerConfig
from pagemill.core.policies import POLICIES
from pagemill.core.scheduler import Scheduler
from pagemill.messages import EngineRequest, SamplingSpec, SequenceOutput, StepOutput
from pagemill.sampling_params import SamplingParams

NUM_TENANTS = 8
_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens: log-normal around a median, cut at a limit."""

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    prompt_max: int = 8000
    output_max: int = 1000
    shared: int = 0  # tokens of a tenant's system prompt
    giant_share: float = 0.0  # of requests, with prompts of `giant` tokens
    giant: int = 20_000


WORKLOADS = {
    "chat": Workload(1020, 0.9, 129, 0.8),
    "code": Workload(1500, 0.7, 13, 0.9),
    "short": Workload(60, 0.8, 150, 0.8),
    "shared": Workload(100, 0.8, 100, 0.8, shared=1024),
    "flood": Workload(60, 0.8, 150, 0.8, giant_share=0.01),
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step: weights read once, a share a token, a share a token of context, a share a sequence.

    The defaults are about a 0.6-billion-parameter model in bfloat16 on two cores.
    """

    weights_s: float = 0.06
    token_s: float = 0.001
    context_s: float = 4e-6
    sequence_s: float = 2e-5

    def of(self, num_tokens: int, num_context: int, num_seqs: int) -> float:
        """Return what one step takes."""
        return (
            self.weights_s + self.token_s * num_tokens + self.context_s * num_context
            + self.sequence_s * num_seqs
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    at: float  # seconds
    number: int
    tenant: int
    num_prompt: int
    num_output: int
    priority: int


def arrivals(work: Workload, rate: float, count: int, seed: int) -> Iterator[Arrival]:
    """Yield requests of a Poisson stream of `rate` a second; tenant 0 sends half of them."""
    rng = random.Random(seed)
    now = 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        prompt = rng.lognormvariate(math.log(work.prompt_median), work.prompt_sigma)
        output = rng.lognormvariate(math.log(work.output_median), work.output_sigma)
        num_prompt = work.shared + max(1, min(work.prompt_max, round(prompt)))
        if rng.random() < work.giant_share:
            num_prompt = work.giant
        tenant = 0 if rng.random() < 0.5 else rng.randrange(1, NUM_TENANTS)
        num_output = max(1, min(work.output_max, round(output)))
        yield Arrival(now, number, tenant, num_prompt, num_output, rng.choice((0, 0, 0, 1, 5)))


@dataclass(slots=True)
class Watch:
    """What became of one request so far."""

    arrival: Arrival
    first: float | None = None
    last: float = 0.0
    worst_gap: float = 0.0


@dataclass(slots=True)
class Result:
    """What a run measured."""

    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # a sample of them
    worst_gap_s: list[float] = field(default_factory=list)
    service: dict[int, list[float]] = field(default_factory=dict)  # tenant -> tokens a second
    num_preempted: int = 0
    num_queried: int = 0
    num_hits: int = 0
    num_steps: int = 0
    simulated_s: float = 0.0
    planning_s: float = 0.0


class Simulation:
    """One policy over one stream of requests."""

    def __init__(self, args: argparse.Namespace, policy: str) -> None:
        self._now = 0.0
        self._costs = Costs()
        self._args = args
        self._work = WORKLOADS[args.workload]
        config = SchedulerConfig(
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            policy=policy,
        )
        self._scheduler = Scheduler(
            config,
            block_size=16,
            num_blocks=args.num_blocks,
            max_model_len=self._work.giant + 2 * self._work.output_max,
            caches_prefixes=not args.no_prefix_caching,
            clock=lambda: self._now,
        )
        self._uses_priority = POLICIES.load(policy).uses_priority
        self._watches: dict[str, Watch] = {}
        self._rng = random.Random(args.seed)

    def run(self) -> Result:
        """Serve every request and return what was seen."""
        result = Result()
        args = self._args
        coming = arrivals(self._work, args.rate, args.num_requests, args.seed)
        following = next(coming, None)
        while following is not None or self._scheduler.has_unfinished():
            if following is not None and not self._scheduler.has_unfinished():
                self._now = max(self._now, following.at)
            while following is not None and following.at <= self._now:
                self._add(following)
                following = next(coming, None)
            self._step(result)
        result.simulated_s = self._now
        return result

    def _add(self, arrival: Arrival) -> None:
        request_id = str(arrival.number)
        shared = range(arrival.tenant * 10_000, arrival.tenant * 10_000 + self._work.shared)
        start = 1_000_000 + arrival.number * 40_000
        own = range(start, start + arrival.num_prompt - self._work.shared)
        self._watches[request_id] = Watch(arrival)
        self._scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=(*shared, *own),
                params=_PARAMS,
                sampling=SamplingSpec(),
                num_samples=1,
                max_tokens=arrival.num_output,
                eos_token_ids=frozenset(),
                stop_token_ids=frozenset(),
                arrival_time=arrival.at,
                priority=arrival.priority if self._uses_priority else 0,
            )
        )

    def _step(self, result: Result) -> None:
        begun = time.perf_counter()
        step = self._scheduler.schedule()
        result.planning_s += time.perf_counter() - begun
        num_context = sum(s.num_computed + s.num_tokens for s in step.scheduled)
        self._now += self._costs.of(step.num_tokens, num_context, len(step.scheduled))
        outputs = tuple(
            SequenceOutput(s.seq_id, ((7,),) if s.num_samples else ()) for s in step.scheduled
        )
        begun = time.perf_counter()
        updates = self._scheduler.update(step, StepOutput(step.step_id, outputs))
        result.planning_s += time.perf_counter() - begun
        result.num_steps += 1
        result.num_preempted += step.num_preempted
        result.num_queried += step.prefix_lookups.num_queried
        result.num_hits += step.prefix_lookups.num_hits
        for update in updates:
            if update.token_ids:
                self._note(self._watches[update.request_id], result)
            if update.finish_reason is not None:
                self._end(self._watches.pop(update.request_id), result)

    def _note(self, watch: Watch, result: Result) -> None:
        if watch.first is None:
            watch.first = self._now
            result.first_token_s.append(self._now - watch.arrival.at)
        else:
            gap = self._now - watch.last
            watch.worst_gap = max(watch.worst_gap, gap)
            if self._rng.random() < 0.02:
                result.gaps_s.append(gap)
        watch.last = self._now

    def _end(self, watch: Watch, result: Result) -> None:
        arrival = watch.arrival
        result.worst_gap_s.append(watch.worst_gap)
        num_tokens = arrival.num_prompt + arrival.num_output
        speed = num_tokens / max(1e-9, self._now - arrival.at)
        result.service.setdefault(arrival.tenant, []).append(speed)


def percentiles(values: list[float]) -> str:
    """Return the 50th, 90th and 99th percentile and the highest, in seconds."""
    array = np.array(values or [0.0])
    shown = [*np.percentile(array, (50, 90, 99)), array.max()]
    return " / ".join(f"{value:.3f}" for value in shown)


def report(policy: str, result: Result, limits: tuple[float, float]) -> None:
    """Print one run."""
    first_limit, gap_limit = limits
    kept = sum(f <= first_limit for f in result.first_token_s) / max(1, len(result.first_token_s))
    smooth = sum(g <= gap_limit for g in result.worst_gap_s) / max(1, len(result.worst_gap_s))
    count = len(result.first_token_s)
    speeds = [float(np.mean(values)) for values in result.service.values()]
    print(f"policy {policy}: {count} requests in {result.simulated_s:.0f} simulated seconds")
    print(f"  first token, s (p50 / p90 / p99 / max)   {percentiles(result.first_token_s)}")
    print(f"  between tokens, s                        {percentiles(result.gaps_s)}")
    print(f"  worst gap of a request, s                {percentiles(result.worst_gap_s)}")
    print(
        f"  within {first_limit:g} s to the first token {100 * kept:.1f} %, "
        f"no gap over {gap_limit:g} s {100 * smooth:.1f} %"
    )
    print(
        f"  goodput, at least {count * max(0.0, kept + smooth - 1) / result.simulated_s:.2f} requests/s"
    )
    hits = 100 * result.num_hits / max(1, result.num_queried)
    print(f"  preemptions {result.num_preempted}, prefix hits {hits:.1f} % of prompt tokens")
    print(f"  fairness: fastest tenant / slowest {max(speeds) / min(speeds):.2f}")
    each_us = 1e6 * result.planning_s / result.num_steps
    print(f"  planning {each_us:.0f} us a step, {result.num_steps} steps", flush=True)


def plot(results: dict[str, Result], path: str) -> None:
    """Draw the distributions of the waits, one line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, name, title in (
        (axes[0], "first_token_s", "time to the first token"),
        (axes[1], "worst_gap_s", "longest pause between tokens"),
    ):
        for policy, result in results.items():
            values = np.sort(np.array(getattr(result, name)))
            axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=policy)
        axis.set(xscale="log", xlabel="seconds", ylabel="share of requests", title=title)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse the command line and simulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="chat")
    parser.add_argument("--policy", default="fcfs", help="one or more, separated by commas")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--num-requests", type=int, default=5000)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--num-blocks", type=int, default=8192, help="of 16 tokens")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--first-limit-s", type=float, default=5.0)
    parser.add_argument("--gap-limit-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default=None, metavar="FILE.png")
    args = parser.parse_args()
    results = {}
    for policy in args.policy.split(","):
        results[policy] = Simulation(args, policy).run()
        report(policy, results[policy], (args.first_limit_s, args.gap_limit_s))
    if args.plot is not None:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
