"""The bodies of requests, checked: JSON object in, frozen dataclass out.

Every field is one of four kinds: OpenAI's or vLLM's and read here; OpenAI's but without meaning for a
server of one model (`NO_MEANING`, accepted); a feature of later versions (refused by name); unknown
(refused with the nearest known name). The sampling fields are those of `SamplingParams`, which checks
their values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pagemill.beam_search_params import BeamSearchParams
from pagemill.errors import PagemillError
from pagemill.messages import ServiceTerms
from pagemill.sampling_params import RequestOutputKind, SamplingParams, as_whole, shown
from pagemill.server.beams import beam_names, read_beams
from pagemill.server.errors import ApiError, to_api_error
from pagemill.server.fields import Fields, wrong

# Bookkeeping of OpenAI's platform: who asks, where to file it, how to bill it. No answer depends on it.
NO_MEANING = (
    "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip

_STRUCTURED = "this version has no structured output; leave it out"
_LATER = "this version does not have it; leave it out"
_REFUSED_EVERYWHERE = {
    "logits_processors": "functions run inside a Python process only; use LLM or LLMEngine",
    "structured_outputs": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "response_format": _STRUCTURED,
    "output_kind": "it is chosen by stream; leave it out",
}
_REFUSED_COMPLETIONS = {
    "suffix": "this version does not fill in between a prompt and a suffix; leave it out",
    "prompt_embeds": _LATER,
}
_REFUSED_CHAT = {
    "functions": "this version has no tool calls; leave it out",
    "function_call": "this version has no tool calls; leave it out",
    "modalities": "this version answers in text only",
    "audio": "this version answers in text only",
    "prediction": _LATER,
    "web_search_options": _LATER,
    "reasoning_effort": "set it in chat_template_kwargs, as the model's template names it",
    "verbosity": _LATER,
    "echo": "chat has no echo; use continue_final_message or /v1/completions",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "logits_processors": ([],),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
}

# SamplingParams fields that a body sets under the same name; the rest have rules of their own.
_OWN_RULES = ("max_tokens", "logprobs", "logits_processors", "structured_outputs", "output_kind")
_SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _OWN_RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How an answer is streamed; `None` in its place means whole."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What completions and chat have in common."""

    model: str | None
    params: SamplingParams
    beams: BeamSearchParams | None  # then `params` holds what is shown, and nothing is sampled
    stream: StreamOptions | None
    terms: ServiceTerms  # the tenant is the field `user`
    cache_salt: str | None
    add_special_tokens: bool
    return_token_ids: bool
    # SamplingParams fields under the names this body gave them, for messages.
    renames: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompts: list[str | list[int]]
    echo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """How messages become text."""

    tools: list[dict[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    template: TemplateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """POST /tokenize: a prompt, or messages."""

    model: str | None
    prompt: str | None
    messages: list[dict[str, Any]] | None
    template: TemplateOptions | None
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """POST /detokenize."""

    model: str | None
    tokens: list[int]
    skip_special_tokens: bool


def read_completion(data: dict[str, Any], defaults: dict[str, Any]) -> CompletionRequest:
    """Check a completions body; `defaults` are the model's own sampling defaults."""
    fields = Fields(data)
    prompts = _prompts(fields.take("prompt"))
    echo = fields.flag("echo", False)
    given = _sampling(fields)
    values = {"max_tokens": 16, **defaults, **given}
    max_tokens = fields.take("max_tokens")
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    values["logprobs"] = fields.take("logprobs")
    if echo and values["logprobs"] is not None:
        values["prompt_logprobs"] = _larger(values["logprobs"], values.get("prompt_logprobs"))
    if echo and values["max_tokens"] == 0 and values.get("prompt_logprobs") is None:
        values["prompt_logprobs"] = 0  # what makes "generate nothing" a request
    stream = _stream(fields)
    renames = beam_names(given)
    beams = read_beams(fields, values, given, renames, streams=stream is not None)
    common = _common(fields, add_special_tokens=True)
    fields.refuse({**_REFUSED_EVERYWHERE, **_REFUSED_COMPLETIONS}, _HARMLESS)
    fields.accept(NO_MEANING)
    fields.end()
    _refuse_streamed_prompt_logprobs(data, stream)
    params = _params(values if beams is None else _shown(beams, values), stream, {})
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        params=params,
        beams=beams,
        stream=stream,
        renames=renames,
        **common,
    )


def read_chat(data: dict[str, Any], defaults: dict[str, Any]) -> ChatRequest:
    """Check a chat body; `defaults` are the model's own sampling defaults."""
    fields = Fields(data)
    messages = _messages(fields)
    template = _template(fields)
    given = _sampling(fields)
    renames = {"logprobs": "top_logprobs", **beam_names(given)}
    values = {"max_tokens": None, **defaults, **given}
    newer, older = fields.take("max_completion_tokens"), fields.take("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise ApiError(
            f"max_completion_tokens is {shown(newer)} and max_tokens is {shown(older)}; give one",
            param="max_completion_tokens",
        )
    if newer is not None:
        renames["max_tokens"] = "max_completion_tokens"
    if newer is not None or older is not None:
        values["max_tokens"] = newer if newer is not None else older
    values["logprobs"] = _chat_logprobs(fields)
    stream = _stream(fields)
    _refuse_streamed_prompt_logprobs(data, stream)
    beams = read_beams(fields, values, given, renames, streams=stream is not None)
    common = _common(fields, add_special_tokens=False)
    fields.refuse({**_REFUSED_EVERYWHERE, **_REFUSED_CHAT}, _HARMLESS)
    fields.accept(NO_MEANING)
    fields.end()
    params = _params(values if beams is None else _shown(beams, values), stream, renames)
    return ChatRequest(
        messages=messages,
        template=template,
        params=params,
        beams=beams,
        stream=stream,
        renames=renames,
        **common,
    )


def read_tokenize(data: dict[str, Any]) -> TokenizeRequest:
    """Check a tokenize body."""
    fields = Fields(data)
    prompt = fields.text("prompt")
    template = None
    messages = None
    if prompt is None:
        if data.get("messages") is None:
            raise ApiError("give prompt (a string) or messages", param="prompt")
        messages = _messages(fields)
        template = _template(fields)
    add_special_tokens = fields.flag("add_special_tokens", prompt is not None)
    return_token_strs = fields.flag("return_token_strs", False)
    model = fields.text("model")
    fields.end()
    return TokenizeRequest(
        model=model,
        prompt=prompt,
        messages=messages,
        template=template,
        add_special_tokens=add_special_tokens,
        return_token_strs=return_token_strs,
    )


def read_detokenize(data: dict[str, Any]) -> DetokenizeRequest:
    """Check a detokenize body."""
    fields = Fields(data)
    given = fields.take("tokens")
    tokens = _ids(given)
    if tokens is None:
        raise wrong("tokens", given, "a list of token ids")
    skip = fields.flag("skip_special_tokens", False)
    model = fields.text("model")
    fields.end()
    return DetokenizeRequest(model=model, tokens=tokens, skip_special_tokens=skip)


def _common(fields: Fields, *, add_special_tokens: bool) -> dict[str, Any]:
    return {
        "model": fields.text("model"),
        "terms": ServiceTerms(
            priority=fields.whole("priority", -(2**31), 2**31 - 1) or 0,
            tenant=fields.text("user") or "",
            start_timeout=fields.take("start_timeout"),
            request_timeout=fields.take("request_timeout"),
        ),
        "cache_salt": fields.text("cache_salt"),
        "add_special_tokens": fields.flag("add_special_tokens", add_special_tokens),
        "return_token_ids": fields.flag("return_token_ids", False),
    }


def _sampling(fields: Fields) -> dict[str, Any]:
    """Return the sampling fields that are given and not null."""
    taken = {name: fields.take(name) for name in _SAMPLING}
    return {name: value for name, value in taken.items() if value is not None}


def _params(
    values: dict[str, Any], stream: StreamOptions | None, renames: dict[str, str]
) -> SamplingParams:
    n, best_of = values.get("n", 1), values.get("best_of")
    if stream and best_of is not None and best_of != n:
        raise ApiError(
            f"best_of is {shown(best_of)}: the best are known at the end only, so they cannot be "
            "streamed; set best_of to n or stream to false",
            param="best_of",
        )
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    try:
        return SamplingParams(**values, output_kind=kind)
    except PagemillError as error:
        raise to_api_error(error, renames) from None


def _shown(beams: BeamSearchParams, values: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters by which the beams are shown."""
    shown = {"n": beams.num_returned, "max_tokens": beams.max_tokens}
    return {**shown, "logprobs": values.get("logprobs")}


def _stream(fields: Fields) -> StreamOptions | None:
    stream = fields.flag("stream", False)
    options = fields.mapping("stream_options")
    if options is None:
        return StreamOptions() if stream else None
    if not stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    inner = Fields(options, "stream_options.")
    include = inner.flag("include_usage", False)
    continuous = inner.flag("continuous_usage_stats", False)
    if inner.flag("include_obfuscation", False):
        raise ApiError(
            "stream_options.include_obfuscation: this version pads no chunks; leave it out",
            param="stream_options.include_obfuscation",
        )
    inner.end()
    return StreamOptions(include_usage=include, continuous_usage=include and continuous)


def _refuse_streamed_prompt_logprobs(data: dict[str, Any], stream: StreamOptions | None) -> None:
    if stream and data.get("prompt_logprobs") is not None:
        raise ApiError(
            "prompt_logprobs cannot be streamed; set stream to false, or ask /v1/completions for "
            "echo with logprobs",
            param="prompt_logprobs",
        )


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts: a string, a list of strings, token ids, or a list of lists of ids."""
    wanted = "a string, a list of strings, a list of token ids, or a list of such lists"
    if value is None:
        raise ApiError(f"prompt is missing; it must be {wanted}", param="prompt")
    if isinstance(value, str):
        return [value]
    ids = _ids(value)
    if ids is not None:  # no ids at all: an empty prompt
        return [ids]
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return list(value)
    lists = [_ids(v) for v in value] if isinstance(value, list) else [None]
    prompts: list[str | list[int]] = [one for one in lists if one is not None]
    if len(prompts) < len(lists):
        raise wrong("prompt", value, wanted)
    return prompts


def _ids(value: Any) -> list[int] | None:
    """Return a list of whole numbers, or None where it is none."""
    if not isinstance(value, list):
        return None
    if not all(type(v) is int for v in value):
        value = [as_whole(v) for v in value]
    return value if all(type(v) is int for v in value) else None


def _larger(k: Any, other: Any) -> Any:
    """Return the count that asks for more; -1 asks for all. Wrong types pass, to be refused."""
    k, other = as_whole(k), as_whole(other)
    if other is None or not isinstance(k, int) or not isinstance(other, int):
        return k if other is None else other
    return -1 if -1 in (k, other) else max(k, other)


def _chat_logprobs(fields: Fields) -> int | None:
    """Return SamplingParams.logprobs of chat's two fields."""
    wanted = fields.flag("logprobs", False)
    top = fields.whole("top_logprobs", -1)
    if top is not None and not wanted and top != 0:
        raise ApiError(f"top_logprobs is {top}, but logprobs is not true", param="top_logprobs")
    return (top or 0) if wanted else None


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages; parts of type text pass, other parts are refused by name."""
    messages = fields.objects("messages")
    if not messages:
        raise ApiError("messages is missing or empty; give at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise wrong(f"{where}.role", message.get("role"), "a string such as 'user'")
    content = message.get("content")
    if content is None or isinstance(content, str):
        has_call = bool(message.get("tool_calls"))
        if content is None and not has_call:
            raise wrong(f"{where}.content", content, "a string or a list of parts")
        return message
    if not isinstance(content, list):
        raise wrong(f"{where}.content", content, "a string or a list of parts")
    for j, part in enumerate(content):
        at = f"{where}.content[{j}]"
        if not isinstance(part, dict):
            raise wrong(at, part, "an object with a type")
        if part.get("type") != "text":
            raise ApiError(
                f"{at}.type is {shown(part.get('type'))}: this version reads parts of type 'text' "
                "only",
                param=f"{at}.type",
            )
        if not isinstance(part.get("text"), str):
            raise wrong(f"{at}.text", part.get("text"), "a string")
    return message


def _template(fields: Fields) -> TemplateOptions:
    tools = fields.objects("tools") or None
    choice = fields.take("tool_choice")
    if tools is not None and choice != "none":
        raise ApiError(
            "tools: this version does not read tool calls out of answers; leave tools out, or set "
            "tool_choice to 'none' to show them to the model all the same",
            param="tools",
        )
    if choice not in (None, "none", "auto"):
        raise ApiError(
            f"tool_choice is {shown(choice)}: this version has no tool calls; leave it out",
            param="tool_choice",
        )
    generation_prompt = fields.flag("add_generation_prompt", True)
    continue_final = fields.flag("continue_final_message", False)
    if continue_final and generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt exclude each other; set "
            "add_generation_prompt to false",
            param="continue_final_message",
        )
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    documents = fields.objects("documents")
    if documents is not None:
        variables["documents"] = documents
    clash = sorted(set(variables) & set(_TEMPLATE_OWN))
    if clash:
        raise ApiError(
            f"chat_template_kwargs has {clash[0]!r}, which is a field of its own",
            param="chat_template_kwargs",
        )
    return TemplateOptions(
        tools=tools,
        chat_template=fields.text("chat_template"),
        add_generation_prompt=generation_prompt,
        continue_final_message=continue_final,
        variables=variables,
    )


_TEMPLATE_OWN = (
    "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
)  # fmt: skip
