"""Every object that crosses a floor or a process.

    EngineRequest    engine/input_processor -> core/scheduler
    SchedulerOutput  core/scheduler         -> executor, every rank
    StepOutput       worker/model_runner    -> core/scheduler.update
    SequenceUpdate   core/scheduler.update  -> engine/engine_core
    StepReport       engine/engine_core     -> engine/output_processor, in another thread or process
    StringStop       the same way back      -> core/scheduler.finish
    StepStats        with each StepReport   -> stat loggers

All are frozen, picklable and free of tensors. The planning wing (core) and the compute wing (batch,
worker) meet here and nowhere else.

The three counts of a sequence, as intervals over its token positions:

    0 ............ num_computed ...... num_computed + num_scheduled ...... num_tokens
    [ KV in cache ) [ computed by the step in flight           ) [ later steps   )

A step that reaches num_tokens produces the next token. With drafts it computes positions past num_tokens
as well; how many of those hold what was sampled is known when its result is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.sampling_params import LogitsProcessor, SamplingParams
from pagemill.step_dataclass import step_dataclass

# ---------------------------------------------------------------- request in


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """What the sampler needs of a request: numbers only, checked, ids within the vocabulary."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # settled: an unseeded request has one from the engine's stream
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # every id that ends the sequence; masked by min_tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences; the last one is banned
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None  # how many alternatives; -1: the whole vocabulary
    prompt_logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Return whether the token is the argmax."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class BeamSpec:
    """How a request searches beams, see `core.beam_search`."""

    width: int
    num_candidates: int  # continuations looked at in a round
    num_logprobs: int  # of them told with each token of a beam; more where more are asked for
    length_penalty: float
    early_stopping: bool | str  # True, False or "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTerms:
    """How a request wants to be served; whatever it says, the tokens are the same."""

    priority: int = 0  # lower is sooner; policy "priority" looks at it
    tenant: str = ""  # whose work it is; policy "fair" shares by it
    # Seconds from now; None: no limit. What is not begun, or not finished, by then is dropped.
    start_timeout: float | None = None
    request_timeout: float | None = None


PLAIN_TERMS = ServiceTerms()


@dataclass(frozen=True, slots=True)
class RequestDeadlines:
    """When a request has to be begun and finished, in seconds of `time.monotonic`; None: no limit."""

    since: float
    start_by: float | None = None
    end_by: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A checked request: tokens, not text. Made by `engine.input_processor`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # the engine's own copy, defaults merged
    sampling: SamplingSpec
    num_samples: int  # sequences to sample: best_of, or n
    max_tokens: int  # settled: never None; 0 generates nothing
    eos_token_ids: frozenset[int]  # empty with ignore_eos
    stop_token_ids: frozenset[int]  # the caller's, plus stop strings that are one special token
    arrival_time: float  # seconds, time.time()
    priority: int = 0
    tenant: str = ""
    deadlines: RequestDeadlines | None = None
    num_truncated_prompt_tokens: int = 0
    beams: BeamSpec | None = None  # a beam search; num_samples of its beams come back
    # What keys and values hang on beside the tokens, as (label, value): the prefix cache keeps apart
    # what differs here.
    cache_keys: tuple[tuple[str, str], ...] = ()

    @property
    def cache_salt(self) -> str | None:
        """Return the salt of the request: what was computed, or said, under another is not for it."""
        return dict(self.cache_keys).get("cache_salt")


# ---------------------------------------------------------------- step out


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the rank has no row for: new, forked, or resumed after preemption."""

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]  # prompt, then output so far
    num_prompt_tokens: int
    sample_index: int  # 0..num_samples-1; keys the random numbers together with seed and position
    sampling: SamplingSpec
    cache_salt: str | None = None  # its drafts come from outputs of the same salt only


@step_dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute positions [num_computed, num_computed + num_tokens)."""

    seq_id: int
    num_computed: int
    num_tokens: int
    # The row's block table changes: table[block_start : block_start + len(block_ids)] = block_ids.
    block_start: int
    block_ids: tuple[int, ...]
    # 0: the step ends inside the known tokens. 1: one next token. k: the prompt ends here and k samples
    # are drawn from one row of logits, with sample indices 0..k-1.
    num_samples: int
    # First prompt position whose logprobs are still owed, when the request wants them. Position p is
    # scored by the logits of position p - 1. None: nothing is owed in this step.
    prompt_logprobs_from: int | None = None
    # Most draft tokens to compute behind these: the row's blocks have slots for them. 0 unless the
    # sequence samples, and samples once.
    num_drafts: int = 0
    # The same changes, (block_start, block_ids), of the tables of further kinds of layers.
    more_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class SwapOut:
    """A block of the device pool is written to a slot of the host tier."""

    block: int
    slot: int
    name: bytes | None = (
        None  # of its contents, when others may find them; None: one sequence's own
    )


@dataclass(frozen=True, slots=True)
class SwapIn:
    """A slot of the host tier is read into a block of the device pool."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Moves of whole blocks, done before the step's forward pass: all out, then all in, then copies.

    No slot is both written and read in one step.
    """

    copies: tuple[tuple[int, int], ...] = ()  # (from, to), inside the device pool
    swap_out: tuple[SwapOut, ...] = ()
    swap_in: tuple[SwapIn, ...] = ()
    forgets_host: bool = False  # first of all: nothing in the tier may be found after a restart

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to do."""
        return not (self.copies or self.swap_out or self.swap_in or self.forgets_host)


@dataclass(frozen=True, slots=True)
class LostMoves:
    """What a step's moves could not do. The scheduler computes again what hung on it."""

    blocks: tuple[int, ...] = ()  # read from a slot that does not hold what it should
    slots: tuple[int, ...] = ()  # could not be written, or not be read
    ends_tier: bool = False  # nothing more can be written


@dataclass(frozen=True, slots=True)
class IgnoredRequest:
    """A request that can never run, answered at once."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class ExpiredRequest:
    """A request that was dropped because its time was over."""

    request_id: str
    deadline: str  # "start" | "end"
    message: str
    updates: tuple[SequenceUpdate, ...]  # the last ones of its samples


@dataclass(frozen=True, slots=True)
class AbortedRequest:
    """A request that its caller ended."""

    request_id: str
    updates: tuple[SequenceUpdate, ...]  # the last ones of its samples


@dataclass(frozen=True, slots=True)
class StringStop:
    """A sequence that a stop string has ended; the scheduler learns it from whoever makes the text."""

    seq_id: int
    stop: str


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """Sequences by queue, after planning."""

    running: int
    waiting: int
    swapped: int = 0


@dataclass(frozen=True, slots=True)
class PrefixLookups:
    """Tokens looked up in the prefix cache by requests that begin, and those found."""

    num_queried: int
    num_hits: int  # in the device pool or the host tier
    num_host_hits: int = 0  # of them in the host tier


NO_LOOKUPS = PrefixLookups(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """Everything the ranks need to know of one step."""

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    new_sequences: tuple[NewSequence, ...] = ()  # get a row before `scheduled` is read
    # Finished, aborted or preempted: lose their row first. One whose last result was void may be among
    # `new_sequences` at once.
    removed_seq_ids: tuple[int, ...] = ()
    block_moves: BlockMoves = field(default_factory=BlockMoves)
    ignored: tuple[IgnoredRequest, ...] = ()
    num_preempted: int = 0
    num_swapped_out: int = 0  # of them by swap
    prefix_lookups: PrefixLookups = NO_LOOKUPS
    queues: QueueSizes = QueueSizes(0, 0)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the step computes."""
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute (rows may still have to be dropped)."""
        return not self.scheduled


# ---------------------------------------------------------------- step in


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Logprobs at one position: the token that stands there, and the alternatives asked for."""

    token_id: int
    logprob: float
    rank: int  # 1: most likely
    top_ids: tuple[int, ...] = ()  # falling logprob, ties to the lower id; may hold token_id
    top_logprobs: tuple[float, ...] = ()


@step_dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step made for one scheduled sequence."""

    seq_id: int
    # One entry a sample (ScheduledSequence.num_samples of them), each a run of new tokens: one token
    # without drafts. The cache holds the keys and values of all but a run's last token. `scores` has the
    # same shape, or is empty when nobody asked for logprobs.
    tokens: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[TokenScores, ...], ...] = ()
    prompt_scores: tuple[TokenScores, ...] = ()  # positions prompt_logprobs_from and on, in order
    error: str | None = None  # this sequence cannot go on (for example: its logits are not finite)
    num_drafted: int = 0  # draft tokens that were computed; a run has at most one token more


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a rank returns for one SchedulerOutput, in the order of its `scheduled`."""

    step_id: int
    sequences: tuple[SequenceOutput, ...]
    timings_s: dict[str, float] = field(default_factory=dict)  # part of the step -> seconds
    lost: LostMoves | None = None  # nearly always None: every move was done


@step_dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """What changed for one sequence, for the output processor. Only updates with news are made."""

    seq_id: int
    request_id: str
    sample_index: int
    token_ids: tuple[int, ...] = ()  # new tokens, cut after a stop token
    scores: tuple[TokenScores, ...] = ()  # one a new token, or empty
    prompt_scores: tuple[TokenScores, ...] = ()
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None  # time.monotonic()


# ---------------------------------------------------------------- stats


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What one step's drafts came to."""

    num_drafts: int = 0  # sequences that had one
    num_drafted: int = 0  # tokens in them
    accepted: tuple[int, ...] = ()  # drafts whose token at this place was sampled, by place

    @property
    def num_accepted(self) -> int:
        """Return how many draft tokens were sampled."""
        return sum(self.accepted)


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStats:
    """One request's numbers at its end. Times in seconds; None where that point was never reached."""

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    e2e_s: float
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    time_per_output_token_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one engine step (or an abort between steps) adds to the metrics.

    Tokens, latencies, ended and expired requests are counted where the text is made, all else by the core.
    """

    queues: QueueSizes
    kv_cache_usage: float  # 0..1, share of blocks in use
    num_preempted: int = 0
    num_swapped_out: int = 0  # of them by swap
    prefix_lookups: PrefixLookups = NO_LOOKUPS
    num_blocks_out: int = 0  # to the host tier, swapped out or evicted
    num_blocks_in: int = 0  # from there
    num_blocks_unwritten: int = 0  # should have gone there: a full disk
    num_blocks_unread: int = 0  # should have come from there: damaged
    num_blocks_copied: int = 0  # inside the device pool
    host_tier_usage: float = 0.0  # 0..1, share of slots that hold something
    num_prompt_tokens: int = 0  # of prompts whose computation was finished by this step
    num_generation_tokens: int = 0
    iteration_tokens: int = 0  # computed by the step
    time_to_first_token_s: tuple[float, ...] = ()
    inter_token_latency_s: tuple[float, ...] = ()
    drafts: DraftCounts = NO_DRAFTS
    finished: tuple[FinishedStats, ...] = ()
    expired: tuple[str, ...] = ()  # "start" or "end" of each request dropped for its deadline
    timings_s: dict[str, float] = field(default_factory=dict)  # part of the step -> seconds


# ---------------------------------------------------------------- to the text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step, or an abort between two steps, came to: tokens, ends and numbers, no text yet."""

    time: float  # time.monotonic() when it was over
    aborted: tuple[AbortedRequest, ...] = ()
    ignored: tuple[IgnoredRequest, ...] = ()
    updates: tuple[SequenceUpdate, ...] = ()
    expired: tuple[ExpiredRequest, ...] = ()
    stats: StepStats | None = None  # without what the text adds; None: nobody wants statistics

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        news = self.aborted or self.ignored or self.updates or self.expired
        return not news and self.stats is None
