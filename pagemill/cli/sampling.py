"""Flags of the sampling parameters that make sense at a prompt; shared by `generate` and `chat`."""

from __future__ import annotations

import argparse
from typing import Any

_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate; default: what the context leaves"),
    "min_tokens": (int, "fewest tokens before the model may end"),
    "temperature": (float, "0: always the likeliest token; default: the model's, or 1"),
    "top_p": (float, "keep the likeliest tokens of this total mass"),
    "top_k": (int, "keep this many of the likeliest tokens"),
    "min_p": (float, "drop tokens under this share of the likeliest one"),
    "repetition_penalty": (float, "above 1: repeat prompt and output less"),
    "presence_penalty": (float, "above 0: repeat the output less, once a token"),
    "frequency_penalty": (float, "above 0: repeat the output less, by count"),
    "n": (int, "samples a prompt"),
}


def add_sampling(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """Add the sampling flags; those not given stay absent, so that the model's defaults hold."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in _FLAGS.items():
        if name not in skip:
            flag = "--" + name.replace("_", "-")
            metavar = "N" if kind is int else "X"
            group.add_argument(
                flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text
            )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS,
        help="end before this text; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--sampling-seed", type=int, metavar="N", default=argparse.SUPPRESS,
        help="seed of the request; --seed is the engine's",
    )  # fmt: skip


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the SamplingParams fields that the command line holds; the engine checks them."""
    values = {name: getattr(args, name) for name in (*_FLAGS, "stop") if hasattr(args, name)}
    if hasattr(args, "sampling_seed"):
        values["seed"] = args.sampling_seed
    return values
