"""Engines in turn: every one loaded and waiting, then rounds of A B C D, A B C D, ...

A machine whose speed drifts favours none that way. Each case loads its engines anew, with the memory that
the case needs, so that all of them find room side by side. An engine that is not installed or fails
leaves a reason in place of figures, and the others go on. Called by `benchmarks.peers` and
`benchmarks.offline`.
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
    commands: dict[str, list[str]]  # by case: what runs it
    cases: str = work.CASES
    failure: str = ""  # why it has no figures, or none of a case
    version: str = ""
    idle_cores: float = 0.0  # kept busy while waiting; it is stopped in others' turns
    resident_bytes: int = 0
    rounds: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # by case


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which cases, how often."""

    cases: str
    rounds: dict[str, int]  # by case
    own_rounds: dict[tuple[str, str], int] = field(default_factory=dict)  # by case and engine

    def num_rounds(self, case: str, engine: str) -> int:
        """Return in how many rounds of a case an engine takes part."""
        return self.own_rounds.get((case, engine), self.rounds[case])


def take_turns(
    entrants: Sequence[Entrant], schedule: Schedule, threads: int, meter: LimitsMeter | None
) -> dict[str, list[Limits]]:
    """Run the schedule and fill the entrants in; return the limits of each round.

    Ctrl-C ends the rounds: what was measured until then stays.
    """
    limits: dict[str, list[Limits]] = {}
    signal.signal(signal.SIGTERM, _leave)  # the engines end with this process
    try:
        for case in schedule.cases:
            limits[case] = []
            with contextlib.ExitStack() as stack:
                running: dict[EngineProcess, Entrant] = {}
                for entrant in entrants:
                    process = _start(entrant, case, threads, stack)
                    if process is not None:
                        running[process] = entrant
                _run_case(case, running, schedule, limits[case], meter)
    except KeyboardInterrupt:
        _say("interrupted: no more rounds")
    return limits


def _run_case(
    case: str,
    running: dict[EngineProcess, Entrant],
    schedule: Schedule,
    limits: list[Limits],
    meter: LimitsMeter | None,
) -> None:
    """Warm every engine up, then run the rounds of one case; one that fails is left out from there on."""

    def turns(round: str, taking: list[EngineProcess]) -> None:
        for process in taking:
            if not _turn(running[process], process, case, round):
                del running[process]

    turns(work.WARM_UP, list(running))
    for round in range(schedule.rounds[case]):
        if meter is not None:
            limits.append(meter.measure())
        taking = [
            process
            for process, one in running.items()
            if round < schedule.num_rounds(case, one.engine)
        ]
        turns(str(round), taking)


def _start(
    entrant: Entrant, case: str, threads: int, stack: contextlib.ExitStack
) -> EngineProcess | None:
    """Load one engine and leave it stopped; None, with the reason noted, where it has none or fails."""
    if case not in entrant.cases or case not in entrant.commands:
        return None
    name = f"{entrant.title} {entrant.format}"
    _say(f"case {case} {name}: loading")
    process = stack.enter_context(EngineProcess(name, entrant.commands[case], threads))
    try:
        process.wait_ready()
        entrant.version = process.version
    except EngineFailed as error:
        _fail(entrant, error)
        return None
    return process


def _turn(entrant: Entrant, process: EngineProcess, case: str, round: str) -> bool:
    """Give an engine one turn; return whether it came through."""
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
        return False
    shown = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
    _say(f"case {case} round {round:8} {entrant.title} {entrant.format}: {shown}")
    return True


def _fail(entrant: Entrant, error: EngineFailed) -> None:
    entrant.failure = str(error)
    _say(entrant.failure)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
