"""From a `StepReport` to `RequestOutput`s: text, stop strings, logprobs, samples, times.

One loop over the step's updates; a sequence may bring any number of new tokens. Owns the state of every
unfinished request outside the core. Called by `engine.llm_engine` between two steps, and by
`engine.async_engine` while later steps run. String stops found here go back to the core through
`ProcessedStep.string_stops`; tokens that it made of an ended sample before it knew are dropped unseen.

A request whose text cannot be made, whatever was raised, ends alone, with finish_reason "error".

Rules of the text:
- The token that ends a sequence (EOS or a stop token id) adds no text, unless
  `include_stop_str_in_output`; it stays in token_ids.
- A stop string cuts the text before it (after it with `include_stop_str_in_output`); token_ids keep the
  token that completed it and nothing behind. It wins over "length" on the same token.
- A stop string that is exactly one special token ends the sequence as a token does; its stop_reason is
  the string, unless the caller named its id in stop_token_ids too.
- With best_of > n nothing is known before all samples have ended: one output, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagemill.engine.sample_text import SampleText
from pagemill.engine.stats import StepCounts, finished_stats
from pagemill.engine.vocabulary import special_stops
from pagemill.errors import words_of
from pagemill.log import get_logger
from pagemill.messages import (
    EngineRequest,
    ExpiredRequest,
    SequenceUpdate,
    StepReport,
    StepStats,
    StringStop,
    TokenScores,
)
from pagemill.outputs import (
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from pagemill.sampling_params import RequestOutputKind
from pagemill.tokenizer.base import Tokenizer

logger = get_logger(__name__)


@dataclass(slots=True)
class ProcessedStep:
    """What one report made, and what the core has to be told. Requests by the key they were added with."""

    outputs: list[tuple[str, RequestOutput]] = field(default_factory=list)
    string_stops: list[StringStop] = field(default_factory=list)
    broken: list[str] = field(
        default_factory=list
    )  # ended by an error here; the core goes on with them
    stats: StepStats | None = None


class _Sample:
    """One sample of a request."""

    __slots__ = (
        "cumulative_logprob", "finish_reason", "has_news", "index", "last_token_time", "logprobs",
        "num_sent_chars", "num_sent_tokens", "stop_reason", "text", "token_ids",
    )  # fmt: skip

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.text = SampleText(request.params, tokenizer)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last_token_time: float | None = None
        self.has_news = False
        self.num_sent_tokens = 0
        self.num_sent_chars = 0

    def end(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.has_news = True


class _Request:
    """All samples of one request and what they share."""

    def __init__(
        self, key: str, request: EngineRequest, tokenizer: Tokenizer | None, queued_time: float
    ) -> None:
        params = request.params
        self.key = key
        self.request = request
        self.prompt_token_ids = list(request.prompt_token_ids)  # all outputs have this one
        self.samples = [_Sample(i, request, tokenizer) for i in range(request.num_samples)]
        self.prompt_logprobs: PromptLogprobs | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.metrics = RequestMetrics(arrival_time=request.arrival_time, queued_time=queued_time)
        self.num_cached_tokens = 0
        self.num_unfinished = request.num_samples
        self.error: str | None = None
        self.timed_out = False
        self.sent_prompt_logprobs = False
        self.ranked = request.beams is None and request.num_samples > params.n
        self.kind = RequestOutputKind.FINAL_ONLY if self.ranked else params.output_kind
        own_stops = params.stop_token_ids or ()
        stops = {} if tokenizer is None else special_stops(params.stop_strings, tokenizer)
        self.string_of_stop_id = {i: text for i, text in stops.items() if i not in own_stops}

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def finish_reason(self) -> str:
        """Return the one word for the metrics: an error or abort of any sample, else the last's."""
        reasons = [sample.finish_reason for sample in self.samples]
        for reason in ("error", "abort"):
            if reason in reasons:
                return reason
        return reasons[-1] or "abort"


class OutputProcessor:
    """Keeps what each unfinished request has said so far."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def add(self, request: EngineRequest, now: float, key: str | None = None) -> None:
        """Start a request; `now` is time.monotonic().

        `key` is what reports call it, the request_id if None: a caller that gives each request a key of its
        own may use a request_id again while the core still works on the one before. May be called from
        another thread than the rest.
        """
        key = request.request_id if key is None else key
        self._requests[key] = _Request(key, request, self._tokenizer, now)

    def drop(self, key: str) -> None:
        """Forget a request that the core refused."""
        self._requests.pop(key, None)

    def process(self, report: StepReport) -> ProcessedStep:
        """Take what a step came to and return the outputs it makes."""
        start = time.perf_counter()
        step, counts, now = ProcessedStep(), StepCounts(), report.time
        for aborted in report.aborted:
            self._note_times(aborted.request_id, aborted.updates)
            self._end(aborted.request_id, "abort", now, counts, step)
        for ignored in report.ignored:
            self._end(ignored.request_id, "error", now, counts, step, ignored.message)
        self._update(report.updates, now, counts, step)
        for expired in report.expired:
            self._expire(expired, now, counts, step)
        if report.stats is not None:
            seconds = {"process": time.perf_counter() - start}
            step.stats = counts.added_to(report.stats, seconds)
        return step

    def _update(
        self, updates: Sequence[SequenceUpdate], now: float, counts: StepCounts, step: ProcessedStep
    ) -> None:
        touched: dict[str, _Request] = {}
        for update in updates:
            state = self._requests.get(update.request_id)
            if state is None:
                continue
            sample = state.samples[update.sample_index]
            if sample.finish_reason is not None:
                continue
            touched[update.request_id] = state
            try:
                self._note_request(state, update, now, counts)
                stop = self._take(state, sample, update, counts, now)
            except Exception as error:
                self._break(state, error, step)
                continue
            if stop is not None:
                step.string_stops.append(StringStop(update.seq_id, stop))
        for state in touched.values():
            self._deliver(state, now, counts, step)

    def _end(
        self, key: str, reason: str, now: float, counts: StepCounts, step: ProcessedStep,
        error: str | None = None,
    ) -> None:  # fmt: skip
        """End every unfinished sample of a request; an unknown or ended one is passed over."""
        state = self._requests.get(key)
        if state is None:
            return
        state.error = error
        try:
            for sample in state.samples:
                if sample.finish_reason is None:
                    sample.text.finish(len(sample.token_ids))
                    sample.end(reason)
            state.num_unfinished = 0
        except Exception as failure:
            self._break(state, failure, step)
        self._deliver(state, now, counts, step)

    def _expire(
        self, expired: ExpiredRequest, now: float, counts: StepCounts, step: ProcessedStep
    ) -> None:
        """End a request that the scheduler dropped because its time was over."""
        state = self._requests.get(expired.request_id)
        if state is None:
            return
        state.timed_out = True
        counts.expired.append(expired.deadline)
        self._note_times(expired.request_id, expired.updates)
        self._end(expired.request_id, "abort", now, counts, step, expired.message)

    def _break(self, state: _Request, error: Exception, step: ProcessedStep) -> None:
        """End a request because of an error in here, without touching its text again."""
        logger.error("request %s ends: its text cannot be made", state.key, exc_info=error)
        state.error = f"its text could not be made: {words_of(error)}"
        for sample in state.samples:
            if sample.finish_reason is None:
                sample.end("error")
        state.num_unfinished = 0
        step.broken.append(state.key)

    def _note_times(self, key: str, updates: Iterable[SequenceUpdate]) -> None:
        """Take from updates when their request was first scheduled and how often preempted."""
        state = self._requests.get(key)
        if state is not None:
            for update in updates:
                _note_times(state.metrics, update)

    # ------------------------------------------------------------ one update

    def _note_request(
        self, state: _Request, update: SequenceUpdate, now: float, counts: StepCounts
    ) -> None:
        metrics = state.metrics
        _note_times(metrics, update)
        state.num_cached_tokens = max(state.num_cached_tokens, update.num_cached_tokens)
        if update.error is not None:
            state.error = update.error
        if update.prompt_scores and state.prompt_logprobs is not None:
            state.prompt_logprobs += [self._token_logprobs(s) for s in update.prompt_scores]
        is_first = metrics.first_token_time is None
        if is_first and (update.token_ids or update.finish_reason == "length"):
            counts.num_prompt_tokens += len(state.request.prompt_token_ids)
        if update.token_ids:
            if is_first:
                metrics.first_token_time = now
                counts.time_to_first_token_s.append(now - metrics.queued_time)
            metrics.last_token_time = now

    def _take(
        self, state: _Request, sample: _Sample, update: SequenceUpdate, counts: StepCounts, now: float
    ) -> str | None:  # fmt: skip
        """Add an update to its sample; return the stop string that ended it, if one did."""
        before = len(sample.token_ids)
        stopped = self._add_tokens(state, sample, update)
        num_new = len(sample.token_ids) - before
        counts.num_generation_tokens += num_new
        if num_new:
            sample.has_news = True
            if sample.last_token_time is not None:
                gap = (now - sample.last_token_time) / num_new
                counts.inter_token_latency_s += [gap] * num_new
            sample.last_token_time = now
        reason = update.finish_reason
        if stopped is None and reason is not None:
            # Held text comes out at the end and may complete a stop string.
            stopped = sample.text.finish(len(sample.token_ids))
        if stopped is not None:
            sample.end("stop", stopped)
        elif reason is not None:
            sample.end(reason, self._stop_reason(state, sample, update))
        else:
            return None
        state.num_unfinished -= 1
        return stopped

    def _add_tokens(self, state: _Request, sample: _Sample, update: SequenceUpdate) -> str | None:
        params = state.request.params
        last = len(update.token_ids) - 1
        # A token that ends a sequence adds no text; one that completes a stop string (of a beam) does.
        ends = update.finish_reason == "stop" and not isinstance(update.stop_reason, str)
        for i, token_id in enumerate(update.token_ids):
            sample.token_ids.append(token_id)
            if update.scores:
                scores = update.scores[i]
                sample.cumulative_logprob += scores.logprob
                if params.logprobs is not None:
                    sample.logprobs.append(self._token_logprobs(scores))
            if ends and i == last and not params.include_stop_str_in_output:
                continue
            stopped = sample.text.push(token_id, len(sample.token_ids))
            if stopped is not None:
                return stopped
        return None

    def _stop_reason(
        self, state: _Request, sample: _Sample, update: SequenceUpdate
    ) -> int | str | None:
        if update.finish_reason != "stop" or not sample.token_ids:
            return update.stop_reason
        return state.string_of_stop_id.get(sample.token_ids[-1], update.stop_reason)

    def _token_logprobs(self, scores: TokenScores) -> TokenLogprobs:
        """Return the alternatives in falling order; the chosen token, if it is not one, is last."""
        text = self._token_text
        found = {
            token_id: Logprob(logprob, rank, text(token_id))
            for rank, (token_id, logprob) in enumerate(
                zip(scores.top_ids, scores.top_logprobs, strict=True), start=1
            )
        }
        if scores.token_id not in found:
            found[scores.token_id] = Logprob(scores.logprob, scores.rank, text(scores.token_id))
        return found

    def _token_text(self, token_id: int) -> str | None:
        tokenizer = self._tokenizer
        if tokenizer is None or token_id >= tokenizer.vocab_size:
            return None
        return tokenizer.token_text(token_id)

    # ------------------------------------------------------------ outputs

    def _deliver(
        self, state: _Request, now: float, counts: StepCounts, step: ProcessedStep
    ) -> None:
        """Append the request's output, if it has one to give now; drop a finished request."""
        if state.is_finished:
            state.metrics.finished_time = now
        try:
            output = self._output(state)
        except Exception as error:
            self._break(state, error, step)
            state.metrics.finished_time = now
            for sample in state.samples:  # whatever they ended with, nobody is told
                sample.end("error")
            output = _bare_output(state)
        if output is not None:
            step.outputs.append((state.key, output))
        if state.is_finished:
            counts.finished.append(
                finished_stats(
                    state.metrics,
                    state.finish_reason(),
                    len(state.request.prompt_token_ids),
                    [len(s.token_ids) for s in state.samples],
                )
            )
            del self._requests[state.key]

    def _output(self, state: _Request) -> RequestOutput | None:
        request = state.request
        samples = self._samples_to_show(state)
        if not samples:
            return None
        is_delta = state.kind is RequestOutputKind.DELTA
        prompt_logprobs = state.prompt_logprobs
        if is_delta and state.sent_prompt_logprobs:
            prompt_logprobs = None
        state.sent_prompt_logprobs = True
        make = self._delta if is_delta else self._snapshot
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=state.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[make(state, index, sample) for index, sample in samples],
            finished=state.is_finished,
            metrics=_copy(state.metrics),
            num_cached_tokens=state.num_cached_tokens,
            error=state.error,
            timed_out=state.timed_out,
            num_truncated_prompt_tokens=request.num_truncated_prompt_tokens,
            num_discarded_tokens=self._num_discarded(state, samples),
        )

    def _num_discarded(self, state: _Request, shown: list[tuple[int, _Sample]]) -> int:
        """Return how many tokens the samples made that best_of leaves out."""
        if not state.ranked:
            return 0
        made = sum(len(sample.token_ids) for sample in state.samples)
        return made - sum(len(sample.token_ids) for _, sample in shown)

    def _samples_to_show(self, state: _Request) -> list[tuple[int, _Sample]]:
        """Return the samples of this output with the index each is shown under."""
        news = [s for s in state.samples if s.has_news]
        if not news or (state.kind is RequestOutputKind.FINAL_ONLY and not state.is_finished):
            return []
        for sample in news:
            sample.has_news = False
        if state.kind is RequestOutputKind.DELTA:
            return [(s.index, s) for s in news]
        if not state.ranked:
            return [(s.index, s) for s in state.samples]
        best = sorted(state.samples, key=_rank)
        return list(enumerate(best[: state.request.params.n]))

    def _snapshot(self, state: _Request, index: int, sample: _Sample) -> CompletionOutput:
        """Return everything so far."""
        return self._completion(state, index, sample, 0, 0)

    def _delta(self, state: _Request, index: int, sample: _Sample) -> CompletionOutput:
        """Return what is new since the last output."""
        made = self._completion(state, index, sample, sample.num_sent_tokens, sample.num_sent_chars)
        sample.num_sent_tokens = len(sample.token_ids)
        sample.num_sent_chars = len(sample.text.text)
        sample.logprobs = []  # by far the most that a request holds, and told once
        return made

    def _completion(
        self, state: _Request, index: int, sample: _Sample, from_token: int, from_char: int
    ) -> CompletionOutput:
        wants = state.request.params.logprobs is not None
        num_new = len(sample.token_ids) - from_token
        return CompletionOutput(
            index=index,
            text=sample.text.text[from_char:],
            token_ids=sample.token_ids[from_token:],
            cumulative_logprob=sample.cumulative_logprob if wants else None,
            logprobs=sample.logprobs[max(0, len(sample.logprobs) - num_new) :] if wants else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            seed=state.request.sampling.seed,
        )


def _rank(sample: _Sample) -> tuple[bool, float, int]:
    """Order samples best first; one that an error or abort has cut short is behind all others."""
    broken = sample.finish_reason in ("error", "abort")
    return (broken, -sample.cumulative_logprob, sample.index)


def _copy(metrics: RequestMetrics) -> RequestMetrics:
    return RequestMetrics(
        arrival_time=metrics.arrival_time,
        queued_time=metrics.queued_time,
        first_scheduled_time=metrics.first_scheduled_time,
        first_token_time=metrics.first_token_time,
        last_token_time=metrics.last_token_time,
        finished_time=metrics.finished_time,
        num_preemptions=metrics.num_preemptions,
    )


def _note_times(metrics: RequestMetrics, update: SequenceUpdate) -> None:
    if metrics.first_scheduled_time is None:
        metrics.first_scheduled_time = update.first_scheduled_time
    metrics.num_preemptions = max(metrics.num_preemptions, update.num_preemptions)


def _bare_output(state: _Request) -> RequestOutput:
    """Return the end of a request of which nothing more can be made."""
    return RequestOutput(
        request_id=state.request.request_id,
        prompt=state.request.prompt,
        prompt_token_ids=state.prompt_token_ids,
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(sample.index, "", [], finish_reason="error")
            for sample in state.samples
        ],
        finished=True,
        error=state.error,
    )
