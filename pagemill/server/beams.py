"""The fields of a body that ask for beam search: `use_beam_search` and what belongs to it.

`best_of` is the number of beams and `n` how many of them come back, as in `SamplingParams`; either alone
is both. Called by `server.protocol`.
"""

from __future__ import annotations

from typing import Any

from pagemill.beam_search_params import BeamSearchParams
from pagemill.errors import PagemillError
from pagemill.sampling_params import SamplingParams, shown
from pagemill.server.errors import ApiError, to_api_error
from pagemill.server.fields import Fields

# Sampling fields that mean the same for beams, or nothing: no number is drawn. Temperature must be 0 or
# left out.
_KEPT = (
    "n", "best_of", "ignore_eos", "include_stop_str_in_output", "temperature", "seed", "stop",
    "stop_token_ids",
)  # fmt: skip


def read_beams(
    fields: Fields,
    values: dict[str, Any],
    given: dict[str, Any],
    renames: dict[str, str],
    *,
    streams: bool,
) -> BeamSearchParams | None:
    """Return the search that a body asks for, or None.

    `given`: the sampling fields of the body; `values`: the same with defaults, max_tokens and logprobs. `renames`:
    what parameters are called in the body, `beam_names` among them.
    """
    wanted = fields.flag("use_beam_search", False)
    penalty, early = fields.take("length_penalty"), fields.take("early_stopping")
    if not wanted:
        defaults = (("length_penalty", penalty, 1.0), ("early_stopping", early, False))
        for name, value, default in defaults:
            if value is not None and value != default:
                raise ApiError(
                    f"{name} is {shown(value)}, which means something with use_beam_search only; "
                    "set use_beam_search to true, or leave it out",
                    param=name,
                )
        return None
    if streams:
        raise ApiError(
            "use_beam_search cannot be streamed: the best beam is known at the end only; set stream "
            "to false",
            param="use_beam_search",
        )
    plain = SamplingParams()
    for name, value in given.items():
        if name not in _KEPT and value != getattr(plain, name):
            raise ApiError(
                f"{name} is {shown(value)}, which has no meaning with use_beam_search; leave it out",
                param=name,
            )
    if values.get("prompt_logprobs") is not None:
        raise ApiError(
            "echo with logprobs asks for logprobs of the prompt, which use_beam_search does not tell; "
            "set echo to false, or leave logprobs out",
            param="echo",
        )
    n = given.get("n", 1)
    try:
        return BeamSearchParams(
            beam_width=given.get("best_of", n),
            n=n,
            max_tokens=values["max_tokens"],
            ignore_eos=given.get("ignore_eos", False),
            temperature=given.get("temperature", 0.0),
            length_penalty=1.0 if penalty is None else penalty,
            include_stop_str_in_output=given.get("include_stop_str_in_output", False),
            early_stopping=False if early is None else early,
            stop=given.get("stop"),
            stop_token_ids=given.get("stop_token_ids"),
            logprobs=0 if values.get("logprobs") is None else values["logprobs"],
        )
    except PagemillError as error:
        raise to_api_error(error, renames) from None


def beam_names(given: dict[str, Any]) -> dict[str, str]:
    """Return what the fields of `BeamSearchParams` are called in a body with these sampling fields."""
    return {"beam_width": "best_of" if "best_of" in given else "n"}
