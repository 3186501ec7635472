"""The real scheduler and block manager over a made-up clock: no model, 100,000 requests in minutes.

    python -m benchmarks.simulate --workload conv --rate 0.5 --num-requests 100000 --policy fcfs,fair
    python -m benchmarks.simulate --pool-study --workload sharegpt --num-requests 1000

A step costs what the cost model says (weights, tokens, context, sequences), requests arrive at random, and what
each of them waited for is written down. Prints percentiles of the time to the first token and between tokens,
goodput (requests a second that kept both limits), preemptions, prefix hits, and how unevenly tenants were served.
`--plot FILE.svg` draws the distributions; give several policies to compare them on the same arrivals.

`--pool-study`: all requests come at once, over a pool of one fifth of the blocks that they would use if there were
enough. Prints tokens a second for each hand-set `max_num_seqs`, beside the `--max-num-seqs` given, where
admission and preemption alone decide how many run.

The streams are in `benchmarks.workloads`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.svg import Panel, picture
from benchmarks.workloads import ANSWER, WORKLOADS, Arrival, Workload, arrivals
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
_PARAMS = SamplingParams()
_SPEC = SamplingSpec()
_TOKEN = ((ANSWER,),)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated."""

    work: Workload
    policy: str = "fcfs"
    rate: float = 0.5  # requests a second; 0: all at once
    num_requests: int = 5000
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    num_blocks: int = 8192
    caches_prefixes: bool = True
    seed: int = 0
    costs: Costs = Costs()


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

    first_token_s: list[float] = field(default_factory=list)  # of each request, as they ended
    worst_gap_s: list[float] = field(default_factory=list)  # in the same order
    gaps_s: list[float] = field(default_factory=list)  # a sample of them
    first_token_by_tenant: dict[int, list[float]] = field(default_factory=dict)
    # Of each tenant, while it and another one had requests waiting: tokens computed for it, and seconds.
    tokens: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    num_output: int = 0
    num_preempted: int = 0
    num_queried: int = 0
    num_hits: int = 0
    num_steps: int = 0
    peak_usage: float = 0.0
    simulated_s: float = 0.0
    planning_s: float = 0.0

    def goodput(self, first_limit_s: float, gap_limit_s: float) -> float:
        """Return the requests a second that kept both limits."""
        pairs = zip(self.first_token_s, self.worst_gap_s, strict=True)
        kept = sum(first <= first_limit_s and gap <= gap_limit_s for first, gap in pairs)
        return kept / self.simulated_s

    def service(self) -> dict[int, float]:
        """Return the tokens a second that each tenant got while it and others had to wait."""
        return {t: self.tokens.get(t, 0) / s for t, s in self.seconds.items() if s}

    def unfairness(self) -> float:
        """Return the most of that over the least; 1 is even, infinity means that one got nothing."""
        speeds = self.service().values()
        if not speeds or max(speeds) == 0:
            return 1.0
        return max(speeds) / min(speeds) if min(speeds) else math.inf


class Simulation:
    """One policy over one stream of requests."""

    def __init__(self, setup: Setup) -> None:
        self._now = 0.0
        self._setup = setup
        config = SchedulerConfig(
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_num_seqs=setup.max_num_seqs,
            policy=setup.policy,
        )
        self._scheduler = Scheduler(
            config,
            block_size=BLOCK_SIZE,
            num_blocks=setup.num_blocks,
            max_model_len=setup.work.max_model_len,
            caches_prefixes=setup.caches_prefixes,
            clock=lambda: self._now,
        )
        self._uses_priority = POLICIES.load(setup.policy).uses_priority
        self._watches: dict[str, Watch] = {}
        self._rng = random.Random(setup.seed)
        self._result = Result()
        self._tenants: dict[int, int] = {}  # seq_id -> tenant, of those that have run
        self._waiting: Counter[int] = Counter()  # tenant -> requests that were not begun

    def run(self) -> Result:
        """Serve every request and return what was seen."""
        setup = self._setup
        coming = arrivals(setup.work, setup.rate, setup.num_requests, setup.seed)
        following = next(coming, None)
        while following is not None or self._scheduler.has_unfinished():
            if following is not None and not self._scheduler.has_unfinished():
                self._now = max(self._now, following.at)
            while following is not None and following.at <= self._now:
                self._add(following)
                following = next(coming, None)
            self._step()
        self._result.simulated_s = self._now
        return self._result

    def _add(self, arrival: Arrival) -> None:
        request_id = str(arrival.number)
        self._watches[request_id] = Watch(arrival)
        self._waiting[arrival.tenant] += 1
        self._scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=arrival.prompt,
                params=_PARAMS,
                sampling=_SPEC,
                num_samples=1,
                max_tokens=arrival.num_output,
                eos_token_ids=frozenset(),
                stop_token_ids=frozenset(),
                arrival_time=arrival.at,
                priority=arrival.priority if self._uses_priority else 0,
                tenant=str(arrival.tenant),
            )
        )

    def _step(self) -> None:
        result = self._result
        begun = time.perf_counter()
        step = self._scheduler.schedule()
        result.planning_s += time.perf_counter() - begun
        result.peak_usage = max(result.peak_usage, self._scheduler.cache_usage())
        num_tokens = step.num_tokens
        num_context = num_tokens + sum(s.num_computed for s in step.scheduled)
        seconds = self._setup.costs.of(num_tokens, num_context, len(step.scheduled))
        self._now += seconds
        self._note_service(step, seconds)
        outputs = tuple(
            SequenceOutput(s.seq_id, _TOKEN if s.num_samples else ()) for s in step.scheduled
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
                self._note(self._watches[update.request_id])
            if update.finish_reason is not None:
                self._end(self._watches.pop(update.request_id))

    def _note_service(self, step: SchedulerOutput, seconds: float) -> None:
        waiting = {tenant for tenant, count in self._waiting.items() if count}
        for new in step.new_sequences:
            if new.seq_id not in self._tenants:
                tenant = self._watches[new.request_id].arrival.tenant
                self._tenants[new.seq_id] = tenant
                self._waiting[tenant] -= 1
        if len(waiting) < 2:
            return
        result = self._result
        for tenant in waiting:
            result.seconds[tenant] = result.seconds.get(tenant, 0.0) + seconds
        for share in step.scheduled:
            tenant = self._tenants[share.seq_id]
            if tenant in waiting:
                result.tokens[tenant] = result.tokens.get(tenant, 0) + share.num_tokens

    def _note(self, watch: Watch) -> None:
        self._result.num_output += 1
        if watch.first is None:
            watch.first = self._now
        else:
            gap = self._now - watch.last
            watch.worst_gap = max(watch.worst_gap, gap)
            if self._rng.random() < 0.02:
                self._result.gaps_s.append(gap)
        watch.last = self._now

    def _end(self, watch: Watch) -> None:
        arrival, result = watch.arrival, self._result
        assert watch.first is not None, "a request ended without a token"
        result.first_token_s.append(watch.first - arrival.at)
        result.worst_gap_s.append(watch.worst_gap)
        by_tenant = result.first_token_by_tenant.setdefault(arrival.tenant, [])
        by_tenant.append(result.first_token_s[-1])


def percentiles(values: list[float]) -> str:
    """Return the 50th, 90th and 99th percentile and the highest, in seconds."""
    array = np.array(values or [0.0])
    shown = [*np.percentile(array, (50, 90, 99)), array.max()]
    return " / ".join(f"{value:.3f}" for value in shown)


def report(policy: str, result: Result, limits: tuple[float, float]) -> None:
    """Print one run."""
    first_limit, gap_limit = limits
    count = len(result.first_token_s)
    goodput = result.goodput(*limits)
    hits = 100 * result.num_hits / max(1, result.num_queried)
    each_us = 1e6 * result.planning_s / result.num_steps
    print(f"policy {policy}: {count} requests in {result.simulated_s:.0f} simulated seconds")
    print(f"  first token, s (p50 / p90 / p99 / max)   {percentiles(result.first_token_s)}")
    print(f"  between tokens, s                        {percentiles(result.gaps_s)}")
    print(f"  worst gap of a request, s                {percentiles(result.worst_gap_s)}")
    print(
        f"  goodput ({first_limit:g} s to the first token, no gap over {gap_limit:g} s) "
        f"{goodput:.3f} requests/s = {100 * goodput * result.simulated_s / count:.1f} % of them; "
        f"{result.num_output / result.simulated_s:.1f} tokens/s"
    )
    print(f"  preemptions {result.num_preempted}, prefix hits {hits:.1f} % of prompt tokens")
    medians = {t: float(np.median(v)) for t, v in sorted(result.first_token_by_tenant.items())}
    print(f"  fairness: best served tenant / worst, while both wait {result.unfairness():.2f}")
    print(
        f"  first token, median s: tenant 0 {medians.pop(0, 0.0):.2f}, the others "
        + ", ".join(f"{value:.2f}" for value in medians.values())
    )
    print(f"  planning {each_us:.0f} us a step, {result.num_steps} steps", flush=True)


def pool_study(setup: Setup, widths: Iterable[int]) -> list[tuple[int, float, int]]:
    """Return (max_num_seqs, output tokens a second, preemptions) on a fifth of the pool needed.

    The last row is the setup's own max_num_seqs; those before it are hand-set, to `widths`.
    """
    setup = dataclasses.replace(setup, rate=0.0)
    roomy = dataclasses.replace(
        setup, num_blocks=setup.max_num_seqs * setup.work.max_model_len // 16
    )
    needed = round(Simulation(roomy).run().peak_usage * roomy.num_blocks)
    least = -(-setup.work.max_model_len // BLOCK_SIZE)
    pool = max(needed // 5, least)
    print(f"needed {needed} blocks, pool {pool}")
    rows = []
    for width in [*(w for w in widths if w < setup.max_num_seqs), setup.max_num_seqs]:
        run = dataclasses.replace(setup, max_num_seqs=width, num_blocks=pool)
        result = Simulation(run).run()
        rows.append((width, result.num_output / result.simulated_s, result.num_preempted))
        print("max_num_seqs {:4d}: {:8.2f} tokens/s, {} preemptions".format(*rows[-1]), flush=True)
    best = max(speed for _, speed, _ in rows)
    print(f"admission and preemption alone reach {100 * rows[-1][1] / best:.1f} % of the best")
    return rows


def draw(results: dict[str, Result]) -> str:
    """Return a picture of the waits, one curve a policy, and of what tenants got."""
    first = Panel("time to the first token", "seconds", "share of requests")
    first.curves({policy: result.first_token_s for policy, result in results.items()})
    first.legend(list(results))
    gaps = Panel("longest pause between tokens", "seconds", "share of requests")
    gaps.curves({policy: result.worst_gap_s for policy, result in results.items()})
    service = Panel("service while others wait too", "tenant", "tokens a second")
    service.bars({policy: result.service() for policy, result in results.items()})
    return picture([first, gaps, service])


def _number(text: str, kind: type[int] | type[float], low: float, unit: str) -> float:
    """Return a number of at least `low`, or say which it must be."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not low <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {unit} of at least {low:g}")
    return value


def _count(text: str) -> int:
    return int(_number(text, int, 1, "a whole number"))


def _seconds(text: str) -> float:
    return _number(text, float, 0, "a number")


def _counts(text: str) -> list[int]:
    return [_count(one) for one in text.split(",")]


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no policy; choose from {', '.join(POLICIES.names())}"
            )
    return names


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file in a folder")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    widths = "1,2,4,6,8,12,16,24,32,48,64,96,128,192"
    add = parser.add_argument
    add("--workload", choices=sorted(WORKLOADS), default="conv")
    add("--policy", type=_policies, default="fcfs", help="one or more, separated by commas")
    add("--rate", type=_seconds, default=0.5, help="requests a second; 0: all at once")
    add("--num-requests", type=_count, default=5000)
    add("--max-num-seqs", type=_count, default=128)
    add("--max-num-batched-tokens", type=_count, default=2048)
    add("--num-blocks", type=_count, default=8192, help="of 16 tokens")
    add("--no-prefix-caching", action="store_true")
    add("--pool-study", action="store_true")
    add("--widths", type=_counts, default=widths)
    add("--first-limit-s", type=_seconds, default=5.0)
    add("--gap-limit-s", type=_seconds, default=1.0)
    add("--seed", type=int, default=0)
    add("--plot", type=_new_file, default=None, metavar="FILE.svg")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line and simulate."""
    parser = _parser()
    args = parser.parse_args(words)
    work = WORKLOADS[args.workload]
    least = -(-work.max_model_len // BLOCK_SIZE)
    if args.num_blocks < least:
        parser.error(
            f"argument --num-blocks: {args.num_blocks} is less than the {least} that one request of "
            f"--workload {args.workload} may need"
        )
    setup = Setup(
        work=work,
        rate=args.rate,
        num_requests=args.num_requests,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=args.num_blocks,
        caches_prefixes=not args.no_prefix_caching,
        seed=args.seed,
    )
    limits = (args.first_limit_s, args.gap_limit_s)
    results = {}
    for policy in args.policy:
        run = dataclasses.replace(setup, policy=policy)
        if args.pool_study:
            pool_study(run, args.widths)
            continue
        results[policy] = Simulation(run).run()
        report(policy, results[policy], limits)
    if args.plot is not None and results:
        args.plot.write_text(draw(results))


if __name__ == "__main__":
    main()
