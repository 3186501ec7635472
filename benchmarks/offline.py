"""Tokens a second on a real small model, against transformers: the same jobs, in turn.

    python -m benchmarks.offline --cases c --rounds 3

The model is SmolLM2-135M-Instruct in bfloat16, or a Hugging Face folder of the llama family. Against the
peers that have kernels of their own: `benchmarks.peers`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks import models, random_models, report
from benchmarks.engines import ENGINES
from benchmarks.engines.process import command
from benchmarks.limits import limits_meter
from benchmarks.peers import Room
from benchmarks.turns import Entrant, Schedule, take_turns
from pagemill.env import shorten_idle_spinning

_ENGINES = ("pagemill", "transformers-generate", "transformers-continuous")


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=",".join(_ENGINES))
    parser.add_argument("--cases", default="c")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: SmolLM2-135M")
    arguments = parser.parse_args()
    shorten_idle_spinning()
    folder = arguments.model or models.smollm2_folder()
    threads = os.cpu_count() or 1
    sizes = random_models.sizes(folder)
    options = {
        case: Room.of(case, threads, sizes).options(folder, "bfloat16") for case in arguments.cases
    }
    entrants = []
    for name in arguments.engines.split(","):
        kind = ENGINES[name]
        commands = {
            case: command(sys.executable, kind.module, own) for case, own in options.items()
        }
        entrants.append(Entrant(name, "bf16", kind.title, commands))
    schedule = Schedule(arguments.cases, dict.fromkeys(arguments.cases, arguments.rounds))
    limits = take_turns(entrants, schedule, threads, limits_meter(threads))
    print(report.markdown(report.Run(folder.name, threads, sizes, entrants, limits)), flush=True)


if __name__ == "__main__":
    main()
