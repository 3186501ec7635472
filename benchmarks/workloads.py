"""Made-up streams of requests in the shapes of public traces, for `benchmarks.simulate`.

Lengths are log-normal. "conv" and "code" have the medians of the conversation and coding traces in Patel et al.
2024 (Splitwise, table 2: prompts of 1,020 and 1,500 tokens, outputs of 129 and 13); "sharegpt" has the means that
Kwon et al. 2023 (PagedAttention, section 6) give for ShareGPT, 161 and 338. The spreads are assumed. The others
are worst cases and cases for the prefix cache, made up:

    shared   a system prompt of 1,024 tokens a tenant
    turns    conversations of several turns, each with all before it as its prompt
    giants   short chats, and one prompt in a hundred of 20,000 tokens
    growing  short prompts and long answers: what is admitted grows by thirty times
    long     nothing but long prompts and long answers
    flood    one tenant sends nine requests in ten
    bursts   conversations that arrive in heaps: gaps with a coefficient of variation of 8
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

NUM_TENANTS = 8
ANSWER = 7  # the token that the simulated model says
_OWN_TOKENS = 40_000  # ids that one request may use
_TURN_SHARE = 0.8  # of requests that go on with a conversation
_MOST_CONVERSATIONS = 200


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
    turns: bool = False
    first_tenant: float = 0.5  # share of requests that tenant 0 sends
    burst: float = 1.0  # coefficient of variation of the gaps; 1: Poisson

    @property
    def max_model_len(self) -> int:
        """Return what the longest request may need."""
        longest = max(self.prompt_max, self.giant if self.giant_share else 0)
        return self.shared + longest + 2 * self.output_max


def _median(mean: float, sigma: float) -> float:
    """Return the median of a log-normal distribution with this mean."""
    return mean / math.exp(sigma * sigma / 2)


WORKLOADS = {
    "conv": Workload(1020, 0.9, 129, 0.8),
    "code": Workload(1500, 0.7, 13, 0.9),
    "sharegpt": Workload(_median(161, 1.1), 1.1, _median(338, 0.8), 0.8, prompt_max=2000),
    "shared": Workload(100, 0.8, 100, 0.8, prompt_max=2000, shared=1024),
    "turns": Workload(60, 0.8, 100, 0.8, turns=True),
    "giants": Workload(60, 0.8, 150, 0.8, giant_share=0.01),
    "growing": Workload(20, 0.3, 600, 0.3, prompt_max=200),
    "long": Workload(6000, 0.3, 600, 0.3),
    "flood": Workload(300, 0.8, 100, 0.8, first_tenant=0.9),
    "bursts": Workload(1020, 0.9, 129, 0.8, burst=8.0),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    at: float  # seconds
    number: int
    tenant: int
    prompt: tuple[int, ...]
    num_output: int
    priority: int


def arrivals(work: Workload, rate: float, count: int, seed: int) -> Iterator[Arrival]:
    """Yield `count` requests, `rate` a second; a rate of 0: all at once."""
    rng = random.Random(seed)
    shape = 1 / work.burst**2  # of a gamma distribution with that coefficient of variation
    conversations: list[tuple[int, ...]] = []
    now = 0.0
    for number in range(count):
        if rate:
            now += rng.gammavariate(shape, 1 / (shape * rate))
        num_own = _length(rng, work.prompt_median, work.prompt_sigma, work.prompt_max)
        num_output = _length(rng, work.output_median, work.output_sigma, work.output_max)
        if rng.random() < work.giant_share:
            num_own = work.giant
        is_first = rng.random() < work.first_tenant
        tenant = 0 if is_first else rng.randrange(1, NUM_TENANTS)
        start = 1_000_000 + number * _OWN_TOKENS
        prompt = tuple(range(start, start + num_own))
        if work.shared:
            prompt = (*range(tenant * 10_000, tenant * 10_000 + work.shared), *prompt)
        if work.turns:
            prompt = _turn(rng, conversations, prompt, num_output, work.prompt_max)
        yield Arrival(now, number, tenant, prompt, num_output, rng.choice((0, 0, 0, 1, 5)))


def _turn(
    rng: random.Random,
    conversations: list[tuple[int, ...]],
    own: tuple[int, ...],
    num_output: int,
    limit: int,
) -> tuple[int, ...]:
    """Return the prompt of the next turn of an old conversation or the first of a new one."""
    at = rng.randrange(len(conversations)) if conversations else 0
    goes_on = conversations and rng.random() < _TURN_SHARE
    prompt = (*conversations[at], *own) if goes_on else own
    if len(prompt) > limit:  # it has become too long: a new one begins
        prompt, goes_on = own, True
    after = (*prompt, *(ANSWER,) * num_output)
    if goes_on:
        conversations[at] = after
    elif len(conversations) < _MOST_CONVERSATIONS:
        conversations.append(after)
    else:
        conversations[at] = after
    return prompt


def _length(rng: random.Random, median: float, sigma: float, limit: int) -> int:
    return max(1, min(limit, round(rng.lognormvariate(math.log(median), sigma))))
