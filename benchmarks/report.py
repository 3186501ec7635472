"""A run as Markdown: one table a case, the machine, and the verdict on every target."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import targets
from benchmarks.limits import Limits
from benchmarks.random_models import Sizes
from benchmarks.targets import BEST_PEER, OWN, TARGETS, Ratio, Target, ratio
from benchmarks.turns import Entrant

# By case: the figures of its table.
COLUMNS = {
    "a": ("decode_tok_per_s", "ttft_ms"),
    "b": ("output_tok_per_s", "total_tok_per_s"),
    "c": ("output_tok_per_s", "total_tok_per_s"),
    "d": ("prefill_tok_per_s",),
    "e": ("wall_s",),
}
_TITLES = {
    "decode_tok_per_s": "decode tokens/s", "ttft_ms": "TTFT ms", "wall_s": "seconds",
    "output_tok_per_s": "output tokens/s", "total_tok_per_s": "total tokens/s",
    "prefill_tok_per_s": "prefill tokens/s",
}  # fmt: skip
_NONE = "-"
_CELL = 200  # characters


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that was measured."""

    model: str
    threads: int
    sizes: Sizes
    entrants: Sequence[Entrant]
    limits: dict[str, list[Limits]]  # by case, one a round; empty without the native extension


def series(entrant: Entrant, case: str, figure: str) -> list[float]:
    """Return an entrant's figure in every round; empty where it has none."""
    return [one[figure] for one in entrant.rounds.get(case, ()) if figure in one]


def markdown(run: Run) -> str:
    """Return the tables."""
    parts = [_heading(run)]
    parts += [_table(run, case) for case in run.limits]
    verdicts = [line for target in TARGETS if (line := _verdict(run, target))]
    share = _streaming_verdict(run)
    if share or verdicts:
        parts.append(
            "| target | asked | reached | verdict |\n|---|---|---|---|\n"
            + share
            + "\n".join(verdicts)
        )
    parts.append(_engines(run))
    return "\n\n".join(parts)


def _heading(run: Run) -> str:
    text = f"Model {run.model}, {run.threads} threads."
    every = [one for limits in run.limits.values() for one in limits]
    if every:
        read = [one.read_bytes_per_s / 1e9 for one in every]
        flops = [one.bf16_flops_per_s / 1e9 for one in every]
        text += (
            f" Streaming reads {_spread(read)} GB/s, bfloat16 products from registers "
            f"{_spread(flops)} GFLOP/s."
        )
    return text + f" Load average at the end: {os.getloadavg()[0]:.1f}."


def _table(run: Run, case: str) -> str:
    columns = COLUMNS[case]
    rounds = max((len(entrant.rounds.get(case, ())) for entrant in run.entrants), default=0)
    head = ["engine", "weights", *(_TITLES[figure] for figure in columns)]
    head += [f"pagemill is, in {_TITLES[figure]}" for figure in _compared(columns)]
    head += ["of the limit"] if case in "ad" else []
    lines = [f"Case {case}, {rounds} rounds, medians (lowest-highest)", "", _row(head)]
    lines.append(_row(["---"] * len(head)))
    for entrant in run.entrants:
        if case not in entrant.cases:
            continue
        own = len(entrant.rounds.get(case, ()))
        title = (
            entrant.title if own in (0, rounds) else f"{entrant.title}, {own} of {rounds} rounds"
        )
        cells = [title, entrant.format]
        cells += [_spread(series(entrant, case, figure)) for figure in columns]
        for figure in _compared(columns):
            one = _against(run, case, figure, entrant)
            cells.append(_NONE if one is None else f"x {one}")
        if case in "ad":
            cells.append(_share(run, case, entrant))
        lines.append(_row(cells))
    return "\n".join(lines)


def _compared(columns: Sequence[str]) -> list[str]:
    """Return the figures that get a ratio: output and total tokens have the same one."""
    return [figure for figure in columns if figure != "total_tok_per_s"]


def _against(run: Run, case: str, figure: str, entrant: Entrant) -> Ratio | None:
    """Return how many times as good pagemill is as an entrant of the same format."""
    own = _find(run, OWN, entrant.format)
    if own is None or entrant.engine == OWN:
        return None
    return _ratio(case, figure, own, entrant)


def _ratio(case: str, figure: str, own: Entrant, other: Entrant) -> Ratio | None:
    mine, theirs = series(own, case, figure), series(other, case, figure)
    return ratio(figure, mine, theirs) if mine and theirs else None


def _find(run: Run, engine: str, format: str) -> Entrant | None:
    found = [one for one in run.entrants if (one.engine, one.format) == (engine, format)]
    return found[0] if found else None


def _shares(run: Run, case: str, entrant: Entrant) -> list[float]:
    """Return, by round, a's weight bytes a second or d's linear layers as a share of the limit."""
    if entrant.format != "bf16":
        return []
    values = series(entrant, case, COLUMNS[case][0])
    limits = run.limits[case]
    if case == "a":
        speeds = [one.read_bytes_per_s / run.sizes.weight_bytes for one in limits]
    else:
        speeds = [one.bf16_flops_per_s / run.sizes.linear_flops_per_token for one in limits]
    return [value / speed for value, speed in zip(values, speeds, strict=False)]


def _share(run: Run, case: str, entrant: Entrant) -> str:
    shares = _shares(run, case, entrant)
    if not shares:
        return _NONE
    return f"{statistics.median(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})"


def _streaming_verdict(run: Run) -> str:
    own = _find(run, OWN, "bf16")
    shares = _shares(run, "a", own) if own is not None and "a" in run.limits else []
    if not shares:
        return ""
    reached = Ratio(statistics.median(shares), min(shares), max(shares), len(shares))
    wanted = targets.STREAMING_SHARE
    cells = ["case a, bf16: share of the streaming bandwidth", f"{wanted:.2f}", str(reached)]
    return _row([*cells, reached.verdict(wanted)]) + "\n"


def _verdict(run: Run, target: Target) -> str:
    """Return a target's row, or nothing where the run has not asked for it."""
    own = _find(run, OWN, target.format)
    if own is None or target.case not in run.limits or target.case not in own.cases:
        return ""
    if target.engine == BEST_PEER:
        others = [
            one for one in run.entrants if one.engine != OWN and one.format == target.engine_format
        ]
    else:
        others = [
            one for one in [_find(run, target.engine, target.engine_format)] if one is not None
        ]
    ratios = {
        other.title: one
        for other in others
        if (one := _ratio(target.case, target.figure, own, other)) is not None
    }
    what = f"case {target.case}, {target.format}: {_TITLES[target.figure]}"
    if not ratios:
        if not others:
            return ""
        name = target.engine if target.engine == BEST_PEER else others[0].title
        return _row([f"{what}, against {name}", f"x {target.at_least}", _NONE, "not measured"])
    title, closest = min(ratios.items(), key=lambda item: item[1].value)
    what += f", against {title} {target.engine_format}"
    return _row([what, f"x {target.at_least}", f"x {closest}", closest.verdict(target.at_least)])


def _engines(run: Run) -> str:
    lines = [_row(["engine", "weights", "version", "cores busy while waiting", "resident GiB"])]
    lines.append(_row(["---"] * 5))
    for one in run.entrants:
        if one.version:
            cells = [one.version, f"{one.idle_cores:.2f}", f"{one.resident_bytes / 2**30:.1f}"]
            if one.failure:
                cells[0] += f"; {_short(one.failure)}"
        else:
            cells = [_short(one.failure), _NONE, _NONE]
        lines.append(_row([one.title, one.format, *cells]))
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return _NONE
    middle, lowest, highest = statistics.median(values), min(values), max(values)
    return f"{_number(middle)} ({_number(lowest)}-{_number(highest)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _short(failure: str) -> str:
    """Return the end of a message, where a traceback has its error, fit for a cell."""
    text = failure.replace("|", "/")
    return text if len(text) <= _CELL else "... " + text[-_CELL:]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
