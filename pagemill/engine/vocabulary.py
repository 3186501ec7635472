"""What of a request can only be checked with the vocabulary at hand: ids, bad words, masks, logprobs.

Pure functions, called by `engine.input_processor` (and, for stops that are one special token, by
`engine.output_processor`). No torch: they run in the HTTP process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pagemill.beam_search_params import BeamSearchParams
from pagemill.config import ModelConfig
from pagemill.errors import RequestError
from pagemill.messages import BeamSpec
from pagemill.sampling_params import SamplingParams, shown
from pagemill.tokenizer.base import Tokenizer

# A character that no tokenizer merges with the word behind it; shows a word as it is inside a text.
_ANCHOR = "\n"


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError for the first id outside 0..vocab_size-1."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds the token id {shown(token_id)}; ids of this model go from 0 to "
                f"{vocab_size - 1}",
                param=param,
            )


def check_logprobs(params: SamplingParams, model: ModelConfig, vocab_size: int) -> None:
    """Raise RequestError when more alternatives are asked for than the engine allows."""
    limit = model.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is None or limit == -1:
            continue
        wanted = vocab_size if value == -1 else value
        if wanted > limit:
            given = f"-1 (the whole vocabulary of {vocab_size})" if value == -1 else shown(value)
            raise RequestError(
                f"{name} is {given}; it must be from 0 to {limit} (max_logprobs; start the engine "
                "with a larger one, or with -1 for no limit)",
                param=name,
            )
    if params.num_samples > params.n and not model.logprobs_mode.endswith("logprobs"):
        raise RequestError(
            f"best_of is {params.best_of} with n {params.n}, which ranks by logprob, but the engine "
            f"reports {model.logprobs_mode} (logprobs_mode); set best_of to n",
            param="best_of",
        )


def beam_spec(params: BeamSearchParams, model: ModelConfig, num_ends: int) -> BeamSpec:
    """Return what a beam search needs, of a vocabulary of which `num_ends` tokens end a beam.

    With (1 + num_ends) * width candidates a round leaves at least `width` that run on.
    """
    if model.logprobs_mode != "raw_logprobs":
        raise RequestError(
            "beam search ranks by the model's log probabilities, but the engine reports "
            f"{model.logprobs_mode} (logprobs_mode); start it with raw_logprobs",
            param="beam_width",
        )
    vocab = model.shape.vocab_size
    num_candidates = max(2, 1 + num_ends) * params.beam_width
    if num_candidates > vocab:
        raise RequestError(
            f"beam_width is {params.beam_width}; with the {vocab} tokens of this model it must be at "
            f"most {vocab // max(2, 1 + num_ends)}",
            param="beam_width",
        )
    num_told = 2 * params.beam_width if params.logprobs is None else params.logprobs
    return BeamSpec(
        width=params.beam_width,
        num_candidates=num_candidates,
        num_logprobs=vocab if num_told == -1 else num_told,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def special_stops(stops: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the stop strings that are exactly one special token, by its id.

    They end a sequence as the token does, without its text being read, and are masked by min_tokens.
    """
    found = {}
    for stop in stops:
        token_id = tokenizer.token_to_id(stop)
        if token_id is not None and token_id in tokenizer.special_token_ids:
            found[token_id] = stop
    return found


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return every token form of each word: first in a text and inside one, with and without a space.

    The forms may have different token counts; all are banned. No form holds a begin token.
    """
    forms: dict[tuple[int, ...], None] = {}
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    for word in words:
        bare = word.lstrip(" ") or word
        found = 0
        for text in (bare, " " + bare):
            ids = tokenizer.encode(text, add_special_tokens=False)
            inside = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
            # A tokenizer that puts a space before every text shows the spaceless form only here.
            tail = inside[len(anchor) :] if inside[: len(anchor)] == anchor else []
            for form in (tuple(ids), tuple(tail)):
                if form:
                    forms[form] = None
                    found += 1
        if not found:
            raise RequestError(
                f"bad_words holds {word!r}, which is no token of this model; it can be left out",
                param="bad_words",
            )
    return tuple(forms)


def check_masks(
    params: SamplingParams,
    bad_words: Sequence[tuple[int, ...]],
    end_ids: Collection[int],
    vocab_size: int,
) -> None:
    """Raise RequestError when the masks leave no token at all."""
    banned = {form[0] for form in bad_words if len(form) == 1}
    allowed = params.allowed_token_ids
    if allowed is not None and banned.issuperset(allowed):
        raise RequestError(
            f"allowed_token_ids holds {len(set(allowed))} tokens and bad_words bans every one of "
            "them; allow another token or drop a bad word",
            param="allowed_token_ids",
        )
    if allowed is None and len(banned) >= vocab_size:
        raise RequestError(
            f"bad_words bans all {vocab_size} tokens of this model; drop one", param="bad_words"
        )
    if params.min_tokens == 0:
        return
    closed = banned.union(end_ids)
    left = vocab_size - len(closed) if allowed is None else len(set(allowed) - closed)
    if left == 0:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but every token left by allowed_token_ids and "
            "bad_words ends the sequence; allow a token that does not, or set min_tokens to 0",
            param="min_tokens" if allowed is None else "allowed_token_ids",
        )
