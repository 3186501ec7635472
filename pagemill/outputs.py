"""What a caller gets back. Field names and layouts follow vLLM's public API.

Made by `engine.output_processor`; plain data, picklable, never changed after it was handed out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# What may stand in CompletionOutput.finish_reason (over HTTP also "tool_calls").
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass(slots=True)
class Logprob:
    """One candidate at one position. `rank` is 1 for the most likely token of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# token id -> Logprob, in falling order of logprob; the chosen token is always there.
TokenLogprobs = dict[int, Logprob]
# One entry a prompt token; the first is None (nothing comes before it).
PromptLogprobs = list[TokenLogprobs | None]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # one of FINISH_REASONS, None while running
    stop_reason: int | str | None = None  # the stop token id or stop string that matched
    seed: int | None = None  # what this sample's random numbers were drawn with
    lora_request: None = None

    def finished(self) -> bool:
        """Return whether the sample has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic`, but `arrival_time` of `time.time`."""

    arrival_time: float
    queued_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """All samples of a request: everything so far, the news, or the end (`RequestOutputKind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: None = None
    num_cached_tokens: int = 0
    error: str | None = None  # why, when an output's finish_reason is "error"
    num_truncated_prompt_tokens: int = field(default=0)  # cut by truncate_prompt_tokens
