"""An executor that computes nothing: each sequence says what a script tells it to.

It keeps rows as a rank does (added, dropped, token by token), so that a wrong SchedulerOutput shows. A
script is a function (prompt ids, sample index) -> the tokens to say, one after the other; past its end
it says `FILLER`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagemill.executor.base import MemoryPlan
from pagemill.messages import (
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    StepOutput,
    TokenScores,
)

FILLER = ord(".")
Script = Callable[[tuple[int, ...], int], Sequence[int]]


@dataclass
class _Row:
    new: NewSequence
    tokens: list[int] = field(default_factory=list)


class ScriptExecutor:
    """Says what the script says. `fail_at` makes that step raise; `errors` breaks single prompts."""

    def __init__(
        self, script: Script, *, num_blocks: int, block_size: int, max_model_len: int = 64
    ) -> None:
        self.script = script
        self.rows: dict[int, _Row] = {}
        self.steps: list[SchedulerOutput] = []
        self.fail_at: int | None = None
        self.errors: dict[tuple[int, ...], str] = {}
        self.is_shut_down = False
        self.results: deque[StepOutput] = deque()  # submitted and not collected
        self.memory_plan = MemoryPlan(
            available_bytes=1 << 30,
            usable_bytes=1 << 29,
            weight_bytes=1,
            peak_activation_bytes=1,
            kv_cache_bytes=num_blocks,
            block_bytes=1,
            num_blocks=num_blocks,
            num_tokens=num_blocks * block_size,
            max_model_len=max_model_len,
            num_full_requests=num_blocks / -(-max_model_len // block_size),
        )

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """Play one step."""
        if self.fail_at is not None and len(self.steps) >= self.fail_at:
            raise RuntimeError("the script ends here")
        self.steps.append(scheduled)
        for seq_id in scheduled.removed_seq_ids:
            del self.rows[seq_id]
        for new in scheduled.new_sequences:
            self.rows[new.seq_id] = _Row(new, list(new.token_ids))
        outputs = tuple(self._play(share) for share in scheduled.scheduled)
        return StepOutput(scheduled.step_id, outputs, {"model": 0.0})

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Play one step; nobody knows before `collect`."""
        self.results.append(self.execute(scheduled))

    def collect(self) -> StepOutput:
        """Return the oldest result."""
        return self.results.popleft()

    def _play(self, share: ScheduledSequence) -> SequenceOutput:
        row = self.rows[share.seq_id]
        new, sampling = row.new, row.new.sampling
        prompt = tuple(row.tokens[: new.num_prompt_tokens])
        if prompt in self.errors:
            return SequenceOutput(share.seq_id, (), error=self.errors[prompt])
        num_output = len(row.tokens) - new.num_prompt_tokens
        runs = []
        for i in range(share.num_samples):
            said = self.script(prompt, new.sample_index + i)
            runs.append((said[num_output] if num_output < len(said) else FILLER,))
        if runs:
            row.tokens += runs[0]
        scores = ()
        if sampling.logprobs is not None:
            scores = tuple((self._score(run[0], sampling.logprobs),) for run in runs)
        prompt_scores: tuple[TokenScores, ...] = ()
        if share.prompt_logprobs_from is not None:
            end = min(share.num_computed + share.num_tokens, new.num_prompt_tokens - 1)
            wanted = range(share.prompt_logprobs_from, end + 1)
            k = sampling.prompt_logprobs or 0
            prompt_scores = tuple(self._score(row.tokens[p], k) for p in wanted)
        return SequenceOutput(share.seq_id, tuple(runs), scores, prompt_scores)

    def _score(self, token_id: int, k: int) -> TokenScores:
        """Score a token as -token/1000; the alternatives are the ids from 0 up."""
        tops = tuple(range(k))
        return TokenScores(
            token_id, -token_id / 1000, token_id + 1, tops, tuple(-t / 1000 for t in tops)
        )

    def check_health(self) -> None:
        """Nothing can be wrong."""

    def shutdown(self) -> None:
        """Note that it was called."""
        self.is_shut_down = True
