"""Engines in turn: every one loaded and waiting, then rounds of A B C D, A B C D, ...

A machine whose speed drifts favours none that way. An engine that is not installed or fails leaves a
reason in place of figures, and the others go on. Called by `benchmarks.peers` and `benchmarks.offline`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from benchmarks import work
from benchmarks.engines.process import EngineFailed, EngineProcess
from benchmarks.limits import Limits, LimitsMeter

_IDLE_SECONDS = 1.0


@dataclass(slots=True)
class Entrant:
    """One engine with one weight format, and what became of it."""

    engine: str
    format: str
    title: str
    arguments: list[str]  # its command; empty where there is none to run
    cases: str = work.CASES
    failure: str = ""  # why it has no figures from here on
    version: str = ""
    idle_cores: float = 0.0  # kept busy while waiting; it is stopped in others' turns
    resident_bytes: int = 0
    rounds: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # by case


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which cases, how often."""

    cases: str
    rounds: dict[str, int]  # by case


def take_turns(
    entrants: Sequence[Entrant], schedule: Schedule, threads: int, meter: LimitsMeter | None
) -> dict[str, list[Limits]]:
    """Load every entrant, run the schedule and fill the entrants in; return the limits of each round.

    An engine ends after the last of its cases, and leaves its memory to the others. Ctrl-C ends the rounds:
    what was measured until then stays.
    """
    limits: dict[str, list[Limits]] = {}
    signal.signal(signal.SIGTERM, _leave)  # the engines end with this process
    with contextlib.ExitStack() as stack:
        running: list[tuple[Entrant, EngineProcess]] = []
        for entrant in entrants:
            process = _start(entrant, threads, stack)
            if process is not None:
                running.append((entrant, process))
        try:
            for number, case in enumerate(schedule.cases):
                limits[case] = []
                taking = [(one, process) for one, process in running if case in one.cases]
                _run_case(case, taking, schedule.rounds[case], limits[case], meter)
                for entrant, process in taking:
                    if not set(entrant.cases) & set(schedule.cases[number + 1 :]):
                        process.close()
        except KeyboardInterrupt:
            _say("interrupted: no more rounds")
    return limits


def _run_case(
    case: str,
    running: Sequence[tuple[Entrant, EngineProcess]],
    rounds: int,
    limits: list[Limits],
    meter: LimitsMeter | None,
) -> None:
    """Warm every engine up, then run the rounds of one case."""
    for entrant, process in running:
        _turn(entrant, process, case, work.WARM_UP)
    for round in range(rounds):
        if meter is not None:
            limits.append(meter.measure())
        for entrant, process in running:
            _turn(entrant, process, case, str(round))


def _start(entrant: Entrant, threads: int, stack: contextlib.ExitStack) -> EngineProcess | None:
    """Load one engine and leave it stopped; None, with the reason noted, where that fails."""
    if entrant.failure:
        return None
    name = f"{entrant.title} {entrant.format}"
    _say(f"{name}: loading")
    process = stack.enter_context(EngineProcess(name, entrant.arguments, threads))
    try:
        process.wait_ready()
        entrant.version = process.version
    except EngineFailed as error:
        _fail(entrant, error)
        return None
    return process


def _turn(entrant: Entrant, process: EngineProcess, case: str, round: str) -> None:
    """Give an engine one turn, unless it has failed before."""
    if entrant.failure:
        return
    try:
        figures = process.run(case, round)
        if round == work.WARM_UP:
            entrant.rounds[case] = []
            entrant.idle_cores = max(entrant.idle_cores, process.idle_share(_IDLE_SECONDS))
            entrant.resident_bytes = max(entrant.resident_bytes, process.resident_bytes())
        else:
            entrant.rounds[case].append(figures)
    except EngineFailed as error:
        _fail(entrant, error)
        return
    shown = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
    _say(f"case {case} round {round:8} {entrant.title} {entrant.format}: {shown}")


def _fail(entrant: Entrant, error: EngineFailed) -> None:
    entrant.failure = str(error)
    _say(entrant.failure)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
