"""`LLM`, the offline face: prompts in, outputs out, in the order of the prompts.

Holds an `LLMEngine` and drives its steps. Called by users' programs, and by the command line's
`generate` and `bench`.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pagemill.beam_search_params import BeamSearchParams
from pagemill.engine.llm_engine import LLMEngine
from pagemill.engine.progress import Progress
from pagemill.engine.prometheus import Metric, PrometheusStatLogger
from pagemill.engine_args import EngineArgs
from pagemill.errors import NotSupportedError, RequestError
from pagemill.log import get_logger
from pagemill.messages import PLAIN_TERMS, EngineRequest, ServiceTerms
from pagemill.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
)
from pagemill.sampling_params import RequestOutputKind, SamplingParams, is_whole_number
from pagemill.tokenizer.base import Tokenizer

logger = get_logger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None
AnyParams = SamplingParams | BeamSearchParams
Message = dict[str, Any]


class LLM:
    """A model, loaded, for programs. Keywords are the fields of `EngineArgs`.

    Without a `seed` it is 0: a script that samples says the same each time it is run.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        args = EngineArgs.from_keywords({"model": model, **engine_args})
        if args.seed is None:
            args.seed = 0
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._ids = itertools.count()

    # ------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        start_timeout: float | None = None,
        request_timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Return one finished output a prompt, in order.

        `prompts`: one prompt or a list of them; a prompt is a string, a list of token ids, or a dict
        with "prompt" or "prompt_token_ids". `sampling_params`: one for all, a list of the same length,
        or None for the model's defaults. Everything is checked before anything is queued; RequestError
        names what is wrong. A request that breaks later has finish_reason "error" and says why. `tenant`
        (one for all, or one each) and the timeouts (seconds, of each request): `LLMEngine.add_request`.
        """
        if lora_request is not None:
            raise NotSupportedError("lora_request: this version serves no LoRA adapters")
        batch = _prompt_list(prompts)
        terms = _terms_list(len(batch), priority, tenant, start_timeout, request_timeout)
        return self._run(batch, _params_list(sampling_params, len(batch)), terms, use_tqdm)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """Return the best beams of each prompt, in the order of the prompts.

        The beams are those of transformers' `generate(num_beams=beam_width)` without sampling. Prompts are
        checked as in `generate`; a request that breaks later raises RequestError, since beams without an end
        have no rank. A beam's text is that of prompt and beam, without what its stop cuts off.
        """
        if lora_request is not None:
            raise NotSupportedError("lora_request: this version serves no LoRA adapters")
        if not isinstance(params, BeamSearchParams):
            raise RequestError(
                f"params is {type(params).__name__}; it must be BeamSearchParams", param="params"
            )
        batch = _prompt_list(prompts)
        outputs = self._run(batch, [params] * len(batch), [PLAIN_TERMS] * len(batch), use_tqdm)
        return [self._beams(output) for output in outputs]

    def _beams(self, output: RequestOutput) -> BeamSearchOutput:
        if output.error is not None:
            raise RequestError(f"the beam search of {output.request_id} broke: {output.error}")
        sequences = []
        for beam in output.outputs:
            tokens = [*output.prompt_token_ids, *beam.token_ids]
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    logprobs=beam.logprobs or [],
                    cum_logprob=beam.cumulative_logprob or 0.0,
                    text=self._beam_text(output.prompt_token_ids, beam),
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                )
            )
        return BeamSearchOutput(sequences)

    def _beam_text(self, prompt: list[int], beam: CompletionOutput) -> str | None:
        """Return the text of prompt and beam as one, less what is cut from the beam's own."""
        if self.llm_engine.has_no_tokenizer:
            return None
        tokenizer = self.get_tokenizer()
        # Models pad their vocabulary: rows behind the tokenizer's last id stand for no text.
        before, own = (
            [token for token in tokens if token < tokenizer.vocab_size]
            for tokens in (prompt, beam.token_ids)
        )
        whole = tokenizer.decode([*before, *own])
        num_cut = len(tokenizer.decode(own)) - len(beam.text)
        return whole[: len(whole) - num_cut]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template.

        Without `sampling_params` the model's defaults hold and the answer may fill the context.
        """
        if lora_request is not None:
            raise NotSupportedError("lora_request: this version serves no LoRA adapters")
        tokenizer = self.get_tokenizer()
        prompts = []
        for conversation in _conversations(messages):
            text = tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **dict(chat_template_kwargs or {}),
            )
            # The template has written every special token that belongs there.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
            if "max_tokens" not in self.llm_engine.config.model.generation_config:
                sampling_params.max_tokens = None
        terms = [PLAIN_TERMS] * len(prompts)
        return self._run(prompts, _params_list(sampling_params, len(prompts)), terms, use_tqdm)

    def _run(
        self,
        prompts: Sequence[Any],
        params: Sequence[AnyParams | None],
        terms: Sequence[ServiceTerms],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        requests = self._check(prompts, params, terms)
        order = [request.request_id for request in requests]
        with _deferred_interrupt() as interrupted:
            try:
                for request in requests:
                    self.llm_engine.add_checked(request)
                finished = self._step_until_done(len(requests), use_tqdm, interrupted)
            except BaseException:
                if not self.llm_engine.errored:
                    self.llm_engine.abort_request(order)
                raise
        return [finished[request_id] for request_id in order]

    def _check(
        self,
        prompts: Sequence[Any],
        params: Sequence[AnyParams | None],
        terms: Sequence[ServiceTerms],
    ) -> list[EngineRequest]:
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            if own is None:
                own = self.get_default_sampling_params()
            if isinstance(own, SamplingParams):
                own = _final_only(own)
            requests.append(
                self.llm_engine.input_processor.process(
                    f"prompt-{next(self._ids)}",
                    prompt,
                    own,
                    terms=terms[index],
                )
            )
        return requests

    def _step_until_done(
        self,
        num_requests: int,
        use_tqdm: bool | Callable[..., Any],
        interrupted: Callable[[], bool],
    ) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with Progress(num_requests, use_tqdm) as progress:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    finished[output.request_id] = output
                    progress.add(output)
                    if output.error is not None:
                        logger.warning("%s: %s", output.request_id, output.error)
                if interrupted():
                    raise KeyboardInterrupt
        return finished

    # ------------------------------------------------------------ the rest

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return fresh parameters with the sampling defaults that the model brings."""
        return self.llm_engine.get_default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget every computed prefix and return True.

        False: a `kv_cache_file` could not be emptied, and a restarted engine may find them. The log says why.
        """
        return self.llm_engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics; none with disable_log_stats."""
        loggers = self.llm_engine.stat_loggers
        found = [one for one in loggers if isinstance(one, PrometheusStatLogger)]
        return [metric for one in found for metric in one.metrics()]

    def shutdown(self) -> None:
        """End the ranks and free their memory; calling it twice is harmless."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _prompt_list(prompts: Any) -> list[Any]:
    """Return the prompts as a list. A list of ids is one prompt; an empty list is no prompt at all."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(
            f"prompts is {type(prompts).__name__}; it must be a prompt or a list of prompts",
            param="prompts",
        )
    if prompts and all(map(is_whole_number, prompts)):
        return [list(prompts)]
    return list(prompts)


def _params_list(params: Params, num_prompts: int) -> list[SamplingParams | None]:
    if params is None:
        return [None] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, (list, tuple)) or not all(
        isinstance(one, SamplingParams) for one in params
    ):
        raise RequestError(
            f"sampling_params is {type(params).__name__}; it must be SamplingParams, a list of them, "
            "or None",
            param="sampling_params",
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params has {len(params)} entries for {num_prompts} prompts; give one each, or "
            "one for all",
            param="sampling_params",
        )
    return list(params)


def _terms_list(
    num_prompts: int,
    priority: Sequence[int] | None,
    tenant: str | Sequence[str],
    start_timeout: float | None,
    request_timeout: float | None,
) -> list[ServiceTerms]:
    """Return one a prompt."""
    priorities = [0] * num_prompts if priority is None else priority
    tenants = [tenant] * num_prompts if isinstance(tenant, str) else tenant
    for name, given in (("priority", priorities), ("tenant", tenants)):
        if not isinstance(given, (list, tuple)):
            raise RequestError(
                f"{name} is {type(given).__name__}; it must be a list of one each", param=name
            )
        if len(given) != num_prompts:
            raise RequestError(
                f"{name} has {len(given)} entries for {num_prompts} prompts; give one each",
                param=name,
            )
    return [
        ServiceTerms(
            priority=priorities[index],
            tenant=tenants[index],
            start_timeout=start_timeout,
            request_timeout=request_timeout,
        )
        for index in range(num_prompts)
    ]


def _final_only(params: SamplingParams) -> SamplingParams:
    own = params.clone()
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own


def _conversations(messages: Any) -> list[Sequence[Message]]:
    if isinstance(messages, (list, tuple)):
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        found = [messages] if is_one else list(messages)
        if all(_is_conversation(one) for one in found):
            return found
    raise RequestError(
        "messages must be a conversation (a non-empty list of {'role', 'content'} dicts) or a list of "
        "conversations",
        param="messages",
    )


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(message, Mapping) for message in value)
    )


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Let a request be queued, or a step end, before Ctrl-C is obeyed: all rooms stay of one mind.

    Yields a function that says whether Ctrl-C came; one that nobody asked after is obeyed at the end. A
    second one interrupts at once. A program's own handler, and threads that are not the main one, are
    left alone.
    """
    came = False
    own = signal.getsignal(signal.SIGINT)
    if own is not signal.default_int_handler or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield lambda: False
        return

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, own)
    if came:
        raise KeyboardInterrupt
