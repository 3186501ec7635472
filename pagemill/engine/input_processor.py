"""From what a caller says to a checked `EngineRequest`: tokens, settled lengths, a settled seed.

Called by `engine.llm_engine` and by `engine.async_engine`; with `serve` that is the HTTP process, so no
torch here. Everything wrong with a request is found here, before anything is queued; the error names
the field, its value and its range.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagemill.beam_search_params import BeamSearchParams
from pagemill.config import ModelConfig, SchedulerConfig
from pagemill.engine.service_checks import check_arrival, check_terms, deadlines_of
from pagemill.engine.vocabulary import (
    bad_word_ids,
    beam_spec,
    check_ids,
    check_logprobs,
    check_masks,
    special_stops,
)
from pagemill.errors import NotSupportedError, PromptTooLongError, RequestError
from pagemill.messages import PLAIN_TERMS, EngineRequest, SamplingSpec, ServiceTerms
from pagemill.sampling_params import SamplingParams, is_whole_number, shown
from pagemill.tokenizer.base import Tokenizer

_FORMS = "a string, a list of token ids, {'prompt': string} or {'prompt_token_ids': list of ids}"
# Keys of prompts that later features read; refused by name.
_UNSUPPORTED_KEYS = {
    "multi_modal_data": "this version reads text only",
    "multi_modal_uuids": "this version reads text only",
    "mm_processor_kwargs": "this version reads text only",
    "prompt_embeds": "prompts are text or token ids",
    "encoder_prompt": "this version has no encoder-decoder models",
    "decoder_prompt": "this version has no encoder-decoder models",
}
_SEED_BITS = 63


class LengthRule(enum.Enum):
    """What happens when prompt + max_tokens is more than the context."""

    CLAMP = "clamp"  # generate up to the context's end and finish with "length"
    STRICT = "strict"  # refuse the request, with all three numbers


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class InputProcessor:
    """Turns prompts and `SamplingParams` into `EngineRequest`s.

    `shares_process`: the worker runs in this process, so a request may bring functions.
    """

    def __init__(
        self,
        model: ModelConfig,
        scheduler: SchedulerConfig,
        tokenizer: Tokenizer | None,
        *,
        shares_process: bool = True,
    ) -> None:
        self._model = model
        self._shares_process = shares_process
        self._policy = scheduler.policy
        self._tokenizer = tokenizer
        self._unseeded = itertools.count()  # requests are checked in several threads

    def default_params(self) -> SamplingParams:
        """Return fresh parameters with the sampling defaults that the model brings."""
        return SamplingParams(**self._model.generation_config)

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        arrival_time: float | None = None,
        terms: ServiceTerms = PLAIN_TERMS,
        length_rule: LengthRule = LengthRule.CLAMP,
    ) -> EngineRequest:
        """Check everything and return the request; raises RequestError (NotSupportedError).

        `params` None means the model's defaults. The prompt forms are those of `pagemill.inputs`.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(
                f"request_id is {request_id!r}; it must be a non-empty string", param="request_id"
            )
        check_terms(terms, self._policy)
        if arrival_time is None:
            arrival_time = time.time()
        check_arrival(arrival_time, time.time())
        search = params.checked_copy() if isinstance(params, BeamSearchParams) else None
        own = self._own_params(params if search is None else search.as_sampling_params())
        read = self._read_prompt(prompt)
        token_ids, num_truncated = self._truncate(read.token_ids, own)
        max_tokens = self._settle_max_tokens(len(token_ids), own.max_tokens, length_rule)
        if own.min_tokens > max_tokens and length_rule is LengthRule.STRICT:
            raise PromptTooLongError(
                f"min_tokens is {shown(own.min_tokens)}, but the prompt has {len(token_ids)} tokens "
                f"and the context is {self._model.max_model_len} tokens; lower min_tokens to at most "
                f"{max_tokens} or shorten the prompt",
                param="min_tokens",
            )
        stop_ids, sampling = self._sampling(own)
        beams = None
        if search is not None:
            beams = beam_spec(search, self._model, len(sampling.stop_token_ids))
            sampling = replace(sampling, logprobs=max(beams.num_candidates, beams.num_logprobs))
        return EngineRequest(
            request_id=request_id,
            prompt=read.text,
            prompt_token_ids=tuple(token_ids),
            params=own,
            sampling=sampling,
            num_samples=own.num_samples if search is None else search.num_returned,
            max_tokens=max_tokens,
            eos_token_ids=frozenset(() if own.ignore_eos else self._model.eos_token_ids),
            stop_token_ids=stop_ids,
            arrival_time=arrival_time,
            priority=terms.priority,
            tenant=terms.tenant,
            deadlines=deadlines_of(terms, time.monotonic()),
            num_truncated_prompt_tokens=num_truncated,
            beams=beams,
            cache_keys=() if read.cache_salt is None else (("cache_salt", read.cache_salt),),
        )

    # ------------------------------------------------------------ parameters

    def _own_params(self, params: object) -> SamplingParams:
        if params is None:
            own = self.default_params()
        elif isinstance(params, SamplingParams):
            own = params.checked_copy()
        else:
            raise RequestError(
                f"sampling_params is {type(params).__name__}; it must be SamplingParams, "
                "BeamSearchParams or None",
                param="sampling_params",
            )
        if own.logits_processors and not self._shares_process:
            raise RequestError(
                "logits_processors are functions of this process, and the worker runs in another; "
                "name them at the start with the engine argument logits_processors, or run the "
                "worker in this process",
                param="logits_processors",
            )
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(own, name):
                    raise RequestError(
                        f"{name} needs a tokenizer, and the engine was started with "
                        "skip_tokenizer_init; use stop_token_ids, or start it with a tokenizer",
                        param=name,
                    )
            own.detokenize = False
        return own

    def _sampling(self, params: SamplingParams) -> tuple[frozenset[int], SamplingSpec]:
        """Return the ids that stop beside EOS, and the sampler's view of the parameters."""
        vocab = self._model.shape.vocab_size
        check_ids("stop_token_ids", params.stop_token_ids or [], vocab)
        check_ids("logit_bias", params.logit_bias or {}, vocab)
        check_ids("allowed_token_ids", params.allowed_token_ids or [], vocab)
        check_logprobs(params, self._model, vocab)
        stops = frozenset(params.stop_token_ids or ())
        bad_words: tuple[tuple[int, ...], ...] = ()
        if self._tokenizer is not None:
            stops = stops.union(special_stops(params.stop_strings, self._tokenizer))
            bad_words = bad_word_ids(params.bad_words or [], self._tokenizer)
        ends = stops if params.ignore_eos else stops.union(self._model.eos_token_ids)
        check_masks(params, bad_words, ends, vocab)
        ranked = params.num_samples > params.n  # best_of ranks by logprob, asked for or not
        sampling = SamplingSpec(
            temperature=0.0 if params.is_greedy else params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            seed=self._seed() if params.seed is None else params.seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(sorted(ends)),
            bad_words=bad_words,
            logit_bias=tuple(sorted((params.logit_bias or {}).items())),
            allowed_token_ids=_tuple(params.allowed_token_ids),
            logprobs=0 if params.logprobs is None and ranked else params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logits_processors=tuple(params.logits_processors or ()),
        )
        return stops, sampling

    def _seed(self) -> int:
        """Return the next seed of the engine's own stream; a given engine seed repeats the stream."""
        if self._model.seed is None:
            return secrets.randbits(_SEED_BITS)
        text = f"{self._model.seed}:{next(self._unseeded)}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    # ------------------------------------------------------------ prompt

    def _read_prompt(self, prompt: Any) -> _Prompt:
        text: str | None = None
        ids: list[int] | None = None
        salt: str | None = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, (list, tuple)):
            ids = _token_ids(prompt, "prompt")
        elif isinstance(prompt, Mapping):
            text, ids = _read_mapping(prompt)
            salt = _cache_salt(prompt)
        else:
            raise RequestError(
                f"the prompt is {type(prompt).__name__}; it must be {_FORMS}", param="prompt"
            )
        if ids is None:
            assert text is not None
            ids = self._encode(text)
        check_ids("prompt", ids, self._model.shape.vocab_size)
        if not ids:
            ids = self._begin_token()
        return _Prompt(text, ids, salt)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                "the prompt is text, and the engine was started with skip_tokenizer_init; give "
                "token ids, or start it with a tokenizer",
                param="prompt",
            )
        return self._tokenizer.encode(text)

    def _begin_token(self) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer is not None and tokenizer.adds_bos and tokenizer.bos_token_id is not None:
            return [tokenizer.bos_token_id]
        raise RequestError(
            "the prompt is empty, and this model's tokenizer adds no begin token to start from; "
            "give at least one token",
            param="prompt",
        )

    def _truncate(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        """Return the last ids that `truncate_prompt_tokens` keeps, and how many were cut.

        -1 keeps what leaves room for max_tokens (for one token when max_tokens is not given).
        """
        keep = params.truncate_prompt_tokens
        if keep is None:
            return ids, 0
        if keep == -1:
            wanted = 1 if params.max_tokens is None else params.max_tokens
            keep = max(1, self._model.max_model_len - wanted)
        return ids[-keep:], max(0, len(ids) - keep)

    def _settle_max_tokens(
        self, num_prompt: int, max_tokens: int | None, length_rule: LengthRule
    ) -> int:
        limit = self._model.max_model_len
        room = limit - num_prompt
        if room < 0 or (room == 0 and max_tokens != 0):
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens, and the context of {limit} tokens "
                f"(max_model_len) must hold {'it' if max_tokens == 0 else 'the answer too'}; shorten "
                f"the prompt to at most {limit - (max_tokens != 0)} tokens",
                param="prompt",
            )
        if max_tokens is None:
            return room
        if max_tokens > room and length_rule is LengthRule.STRICT:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together "
                f"{num_prompt + max_tokens}, but the context is {limit} tokens; shorten the prompt "
                f"or lower max_tokens to at most {room}",
                param="max_tokens",
            )
        return min(max_tokens, room)


def _read_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    for key, reason in _UNSUPPORTED_KEYS.items():
        if prompt.get(key) is not None:
            raise NotSupportedError(f"{key} in the prompt: {reason}; leave it out")
    unknown = [k for k in prompt if k not in _UNSUPPORTED_KEYS]
    unknown = [k for k in unknown if k not in ("prompt", "prompt_token_ids", "cache_salt")]
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if unknown or (text is None and ids is None):
        raise RequestError(
            f"the prompt is a dict with the keys {sorted(map(str, prompt))}; a prompt must be "
            f"{_FORMS}",
            param="prompt",
        )
    if text is not None and not isinstance(text, str):
        raise RequestError(
            f"prompt['prompt'] is {type(text).__name__}; it must be a string", param="prompt"
        )
    return text, None if ids is None else _token_ids(ids, "prompt_token_ids")


def _cache_salt(prompt: Mapping[str, Any]) -> str | None:
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(
            f"cache_salt is {shown(salt)}; it must be a string of at least one character, or left out",
            param="cache_salt",
        )
    return salt


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(
            f"{name} is {type(value).__name__}; it must be a list of token ids", param=name
        )
    for position, token in enumerate(value):
        if type(token) is not int and not is_whole_number(token):
            raise RequestError(
                f"{name} holds {token!r} at position {position}; token ids are whole numbers",
                param=name,
            )
    return list(map(int, value))


def _tuple(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(sorted(set(value)))
