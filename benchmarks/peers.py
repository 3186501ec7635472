"""pagemill and every peer that is installed, in one run, in turn, on the same weights and lengths.

    python -m benchmarks.peers --venvs DIR --model qwen3-0.6b --cases ade --rounds 7
        [--formats bf16,int8=ad,int4=a]

Prints a Markdown table a case and the verdict on every target. Each case loads its engines anew, with a
KV cache of the size that the case needs. Ctrl-C ends the rounds and prints what was measured until then.
benchmarks/README.md says how the peers are installed; one that is not is an empty row. Nothing else
should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import random_models, report, work
from benchmarks.engines import ENGINES, EngineKind
from benchmarks.engines.base import MAX_MODEL_LEN, EngineOptions
from benchmarks.engines.process import command, has_package, python_of
from benchmarks.limits import limits_meter
from benchmarks.turns import Entrant, Schedule, take_turns
from pagemill.env import shorten_idle_spinning

_PEERS = ("pagemill", "vllm", "openvino", "llamacpp")
_FORMATS = ("bf16", "int8", "int4")
_SPARE_KV = 1.15  # blocks are not filled to their ends


@dataclass(frozen=True, slots=True)
class Room:
    """What every engine may take."""

    threads: int
    kv_tokens: int
    kv_bytes: int

    @classmethod
    def of(cls, case: str, threads: int, sizes: random_models.Sizes) -> Room:
        """Return KV cache for a case, or one sequence of the longest."""
        tokens = max(MAX_MODEL_LEN, int(work.num_tokens(work.make(case, "0")) * _SPARE_KV))
        return cls(threads, tokens, tokens * sizes.kv_bytes_per_token)

    def options(self, path: Path, weights: str) -> EngineOptions:
        """Return the options of an engine that loads `path`."""
        return EngineOptions(str(path), weights, self.threads, self.kv_tokens, self.kv_bytes)


def make_entrant(
    name: str, format: str, cases: str, model: str, venvs: Path, threads: int
) -> Entrant:
    """Return one engine in one format, its model files made; or with the reason why it cannot run."""
    kind = ENGINES[name]
    entrant = Entrant(name, format, kind.title, {}, cases)
    python = _find(kind, venvs)
    if python is None:
        entrant.failure = "not installed"
    elif format not in kind.formats:
        entrant.failure = "does not make this format from a bfloat16 checkpoint"
    else:
        weights = kind.formats[format]
        try:
            path = random_models.form_of(model, kind, weights, venvs)
            sizes = random_models.sizes(random_models.model_folder(model))
            for case in cases:
                options = Room.of(case, threads, sizes).options(path, weights)
                entrant.commands[case] = command(python, kind.module, options)
        except subprocess.CalledProcessError as error:
            entrant.failure = f"its model could not be made: {Path(error.cmd[0]).name} failed"
    return entrant


def _find(kind: EngineKind, venvs: Path) -> str | None:
    python = python_of(venvs, kind.venv)
    return python if python is not None and has_package(python, kind.package) else None


def parse_rounds(text: str, cases: str) -> Schedule:
    """Return the rounds by case: "7"; "7,c=2" where case c has its own number; "7,c/vllm=2" its engine."""
    default, *exceptions = text.split(",")
    schedule = Schedule(cases, dict.fromkeys(cases, int(default)))
    for exception in exceptions:
        what, _, number = exception.partition("=")
        case, _, engine = what.partition("/")
        if engine:
            schedule.own_rounds[case, engine] = int(number)
        else:
            schedule.rounds[case] = int(number)
    return schedule


def parse_formats(text: str, cases: str) -> dict[str, str]:
    """Return the cases by format: "bf16,int8=ad" has all of `cases` in bf16 and two of them in int8."""
    formats = {}
    for word in text.split(","):
        name, _, own = word.partition("=")
        formats[name] = own or cases
    return formats


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venvs", type=Path, default=Path(".venvs"), help="folder of the peers")
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(random_models.SHAPES))
    parser.add_argument("--engines", default=",".join(_PEERS), help=f"of {', '.join(ENGINES)}")
    parser.add_argument(
        "--formats", default="bf16",
        help=f"of {', '.join(_FORMATS)}; int8=ad for a format with cases of its own",
    )  # fmt: skip
    parser.add_argument("--cases", default="ade", help=f"of {work.CASES}")
    parser.add_argument(
        "--rounds", default="7",
        help="7, or 7,c=2 for a case with its own number, 7,c/llamacpp=2 for an engine in a case",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="a file for every single figure")
    arguments = parser.parse_args()
    shorten_idle_spinning()
    schedule = parse_rounds(arguments.rounds, arguments.cases)
    sizes = random_models.sizes(random_models.model_folder(arguments.model))
    entrants = [
        make_entrant(engine, format, cases, arguments.model, arguments.venvs, arguments.threads)
        for format, cases in parse_formats(arguments.formats, arguments.cases).items()
        for engine in arguments.engines.split(",")
    ]
    limits = take_turns(entrants, schedule, arguments.threads, limits_meter(arguments.threads))
    run = report.Run(arguments.model, arguments.threads, sizes, entrants, limits)
    print(report.markdown(run), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(run), indent=1))


if __name__ == "__main__":
    main()
