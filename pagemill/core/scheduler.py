"""The scheduler: who computes what in each step, and what becomes of the results.

The face of the planning wing. A step is

    schedule()   plan (pure, `planner`), then commit (`step_commit`): blocks, queues, counts -> SchedulerOutput
    update()     append tokens, token stops, forks (`step_results`)                          -> SequenceUpdate

and between steps requests are added, aborted, expired, or finished by a string stop. `schedule` may be called once
more before `update`, where `may_overlap` says so: the second step is planned as if each sequence that draws a token in
the first goes on with it. One that ends instead is dropped from the second step's results.

The sequences, their queues and their blocks are in the `roster`.

Called by `engine.engine_core`, from one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from pagemill.cache_layout import CacheLayout, plain_layout
from pagemill.config import SchedulerConfig, SpeculativeConfig
from pagemill.core.beam_results import TextOf
from pagemill.core.block_manager import BlockManager
from pagemill.core.deadlines import Deadlines
from pagemill.core.draft_lengths import DraftLengths
from pagemill.core.host_tier import HostTier
from pagemill.core.planner import PlanView, StepLimits, plan_step
from pagemill.core.policies import POLICIES
from pagemill.core.policies.base import PolicySetting
from pagemill.core.policies.walled import WalledPolicy
from pagemill.core.roster import Roster, failure_text
from pagemill.core.sequence import Sequence
from pagemill.core.step_commit import StepCommit
from pagemill.core.step_results import StepResults
from pagemill.errors import CacheTooSmallError, RequestError
from pagemill.host_tier_plan import HostTierPlan
from pagemill.log import get_logger
from pagemill.messages import (
    EngineRequest,
    ExpiredRequest,
    IgnoredRequest,
    QueueSizes,
    SchedulerOutput,
    SequenceUpdate,
    StepOutput,
)

logger = get_logger(__name__)


class Scheduler:
    """Plans steps over one pool of blocks and keeps every sequence from arrival to end."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        caches_prefixes: bool = False,
        speculative: SpeculativeConfig | None = None,
        host_tier: HostTierPlan | None = None,
        layout: CacheLayout | None = None,
        clock: Callable[[], float] = time.monotonic,
        text_of: TextOf = lambda request: None,
    ) -> None:
        """`layout` None: all layers share one table of blocks of `block_size` tokens.

        `text_of` begins the text of a request's beams, in which its stop strings are found.
        """
        layout = layout or plain_layout(block_size)
        num_needed = layout.blocks_of_request(max_model_len)
        if num_blocks < num_needed:
            most = layout.most_tokens(num_blocks)
            raise CacheTooSmallError(
                f"one request of max_model_len={max_model_len} tokens needs {num_needed} KV blocks of "
                f"{layout.describe()}, but the cache has {num_blocks} ({most} tokens). Lower "
                f"max_model_len to {most} or raise kv_cache_memory_bytes or gpu_memory_utilization"
            )
        self._max_model_len = max_model_len
        self._limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs)
        tier = None
        if host_tier is not None:
            tier = HostTier(
                host_tier,
                layout.kinds[0].block_tokens,
                mode=config.preemption_mode,
                num_blocks=layout.num_blocks_each,
            )
        self._blocks = BlockManager(
            num_blocks, block_size, caches_prefixes=caches_prefixes, tier=tier, layout=layout
        )
        setting = PolicySetting(self._blocks, config.tenant_weights)
        self._policy = WalledPolicy(POLICIES.load(config.policy)(setting))
        self._roster = Roster(self._blocks, self._policy, config.max_num_seqs)
        self._deadlines = Deadlines()
        self._clock = clock  # seconds of `time.monotonic`; a simulation has its own
        self._commit = StepCommit(self._roster, clock)
        self._drafts = None if speculative is None else DraftLengths(speculative, max_model_len)
        self._results = StepResults(self._roster, max_model_len, clock, self._drafts, text_of)
        self._ignored: dict[str, tuple[EngineRequest, IgnoredRequest]] = {}  # to be answered
        self._overlaps = config.async_scheduling
        self._in_flight: deque[SchedulerOutput] = deque()  # steps that have no result yet

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError when its id is taken by an unfinished one.

        A request that can never run is answered by the next `schedule` among `ignored`.
        """
        request_id = request.request_id
        if request_id in self._roster.groups or request_id in self._ignored:
            raise RequestError(
                f"request_id {request_id!r} belongs to an unfinished request; choose another",
                param="request_id",
            )
        reason = self._why_ignored(request)
        if reason is not None:
            self._ignored[request_id] = (request, IgnoredRequest(request_id, reason))
            return
        try:
            root = self._roster.enter(request)
        except Exception as error:  # of the policy's: it concerns this request alone
            logger.exception("request %s cannot be queued", request_id)
            answer = IgnoredRequest(request_id, failure_text(error))
            self._ignored[request_id] = (request, answer)
            return
        self._deadlines.add(root.group)

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        """End a request; its blocks are free at once. Unknown and ended ids give an empty list."""
        if request_id in self._ignored:
            request, _ = self._ignored.pop(request_id)
            return [
                SequenceUpdate(
                    seq_id=self._roster.seq_ids.take(),
                    request_id=request_id,
                    sample_index=index,
                    finish_reason="abort",
                )
                for index in range(request.num_samples)
            ]
        group = self._roster.groups.get(request_id)
        return [] if group is None else self._roster.end_group(group, "abort")

    def expire(self) -> list[ExpiredRequest]:
        """Drop the requests whose time is over; called between steps. Their blocks are free at once."""
        return [
            ExpiredRequest(
                expiry.group.request_id,
                expiry.deadline,
                expiry.message,
                tuple(self._roster.end_group(expiry.group, "abort")),
            )
            for expiry in self._deadlines.take_expired(self._clock())
        ]

    def finish(self, seq_id: int, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence for a reason found outside (a string stop); unknown or ended: nothing."""
        sequence = self._roster.sequences.get(seq_id)
        if sequence is not None:
            assert sequence.output_token_ids, (
                "a sequence without output has no text that could stop"
            )
            self._roster.end(sequence, reason, stop_reason)

    def has_unfinished(self) -> bool:
        """Return whether a request is queued, running, or waits for its refusal."""
        return bool(self._roster.groups or self._ignored)

    def num_unfinished(self) -> int:
        """Return the number of such requests."""
        return len(self._roster.groups) + len(self._ignored)

    def queue_sizes(self) -> QueueSizes:
        """Return the number of sequences in each queue; samples not forked yet are in none."""
        return self._roster.queue_sizes()

    def cache_usage(self) -> float:
        """Return the share of KV blocks in use, 0..1."""
        return self._blocks.usage

    def host_tier_usage(self) -> float:
        """Return the share of the host tier's slots that hold something, 0..1."""
        return self._blocks.tier_usage

    def forget_prefixes(self) -> SchedulerOutput | None:
        """Empty the prefix cache: nothing computed so far is found again.

        Returns the step that makes it so in a tier that lasts, to be run behind those in flight; its result
        is for `forgot`.
        """
        return self._commit.forget()

    def forgot(self, result: StepOutput) -> bool:
        """Take the result of such a step; return whether the tier has forgotten."""
        if result.lost is None:
            return True
        self._roster.lose(result.lost, ())
        return False

    def check_invariants(self) -> None:
        """Assert that blocks, queues and counts agree. For tests and `--debug`: it reads everything."""
        self._roster.check()

    # ------------------------------------------------------------ steps

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and commit it. Results of all steps before must have been given, or of all
        but one where `may_overlap` says so."""
        running: Iterable[Sequence] = self._roster.running
        num_held_up = 0
        if self._in_flight:
            assert self.may_overlap(), f"step {self._in_flight[0].step_id} has no result yet"
            self._results.count(self._in_flight[0])
            ready = [sequence for sequence in running if sequence.num_remaining]
            num_held_up, running = len(self._roster.running) - len(ready), ready
        view = PlanView(
            running=running,
            waiting=self._roster.waiting,
            smallest=self._roster.waiting.smallest,
            holders=self._roster.waiting_holders,
            blocks=self._blocks,
            drafts=self._drafts,
            num_held_up=num_held_up,
        )
        plan = plan_step(view, self._limits, self._policy)
        output = self._commit.commit(plan, tuple(answer for _, answer in self._ignored.values()))
        self._ignored.clear()
        if output.scheduled or not output.block_moves.is_empty:
            self._in_flight.append(output)
        return output

    def may_overlap(self) -> bool:
        """Return whether the next step may be scheduled before the step in flight has a result.

        Not behind a step that moves blocks of the host tier: what it could not move, nobody may build on. Not
        with drafts: how many tokens they come to is not known.
        """
        if not self._overlaps or len(self._in_flight) != 1 or self._drafts is not None:
            return False
        moves = self._in_flight[0].block_moves
        return not (moves.swap_in or moves.swap_out)

    def last_step(self) -> SchedulerOutput | None:
        """Return what is left to be kept in a tier that lasts when the engine ends; None: nothing."""
        if self._in_flight:
            return None  # that step failed, and what it should have computed is not there
        step = self._commit.last()
        return None if step.block_moves.is_empty else step

    def update(self, scheduled: SchedulerOutput, result: StepOutput) -> list[SequenceUpdate]:
        """Take a step's results in; return what is new, for the output processor.

        Results of sequences that ended since `schedule` are dropped.
        """
        assert result.step_id == scheduled.step_id, (
            f"the result of step {result.step_id} was given for step {scheduled.step_id}"
        )
        if self._in_flight and self._in_flight[0].step_id == scheduled.step_id:
            self._in_flight.popleft()
        else:
            assert not scheduled.scheduled, f"step {scheduled.step_id} is not the first in flight"
        return self._results.take(scheduled, result)

    def _why_ignored(self, request: EngineRequest) -> str | None:
        """Return why a request can never run, or None."""
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            return "the prompt has 0 tokens; give it at least one"
        limit = self._max_model_len - (request.max_tokens > 0)
        if num_prompt > limit:
            room = (
                "" if limit == self._max_model_len else ", which must leave room for one more token"
            )
            return (
                f"the prompt has {num_prompt} tokens, but max_model_len is {self._max_model_len}"
                f"{room}; shorten the prompt to at most {limit} tokens"
            )
        return None
