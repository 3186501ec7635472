"""The simulator: every stream ends, and what the decision records say of policies and pools holds."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.simulate import Result, Setup, Simulation, draw, main, pool_study
from benchmarks.svg import COLOURS
from benchmarks.workloads import WORKLOADS, Workload, arrivals

SMALL = Workload(60, 0.8, 40, 0.8, prompt_max=400, output_max=120)


def simulate(work: Workload, policy: str, **changes: float) -> Result:
    setup = Setup(work=work, policy=policy, num_requests=120, **changes)  # type: ignore[arg-type]
    return Simulation(setup).run()


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_stream_is_served_to_the_end(name: str) -> None:
    setup = Setup(work=WORKLOADS[name], num_requests=12, rate=0.0, max_num_seqs=12)
    result = Simulation(setup).run()
    assert len(result.first_token_s) == len(result.worst_gap_s) == 12
    asked = sum(a.num_output for a in arrivals(WORKLOADS[name], 0.0, 12, 0))
    assert result.num_output == asked


def test_same_seed_is_the_same_run() -> None:
    first, again = (simulate(SMALL, "fcfs", rate=2.0) for _ in range(2))
    assert first.first_token_s == again.first_token_s
    assert first.simulated_s == again.simulated_s


def test_fair_serves_tenants_more_evenly_than_order_of_arrival_when_one_floods() -> None:
    work = Workload(60, 0.8, 40, 0.8, prompt_max=400, output_max=120, first_tenant=0.9)
    by_policy = {p: simulate(work, p, rate=20.0, max_num_seqs=8) for p in ("fcfs", "fair")}
    assert by_policy["fair"].unfairness() < 0.5 * by_policy["fcfs"].unfairness()
    others = {
        policy: sum(sum(waits) for t, waits in result.first_token_by_tenant.items() if t)
        for policy, result in by_policy.items()
    }
    assert others["fair"] < 0.5 * others["fcfs"]


def test_prefix_finds_more_than_order_of_arrival_when_the_pool_is_small() -> None:
    work = Workload(40, 0.5, 20, 0.5, prompt_max=100, output_max=60, shared=256, first_tenant=0.2)
    hits = {
        policy: simulate(work, policy, rate=20.0, max_num_seqs=4, num_blocks=96).num_hits
        for policy in ("fcfs", "prefix")
    }
    assert hits["prefix"] > 1.2 * hits["fcfs"]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_fifth_of_the_pool_gives_most_of_the_throughput_of_the_best_width(policy: str) -> None:
    setup = Setup(
        work=SMALL, policy=policy, num_requests=100, max_num_seqs=32, caches_prefixes=False
    )
    rows = pool_study(setup, widths=(4, 6, 8, 12))
    assert rows[-1][1] >= 0.8 * max(speed for _, speed, _ in rows)


def test_picture_is_a_document_with_a_curve_a_policy_and_a_bar_a_tenant() -> None:
    results = {p: simulate(SMALL, p, rate=20.0, max_num_seqs=4) for p in ("fcfs", "fair")}
    root = ElementTree.fromstring(draw(results))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    curves = root.findall(f".//{space}polyline")
    assert len(curves) == 2 * len(results)
    for curve in curves:
        numbers = [float(n) for point in curve.attrib["points"].split() for n in point.split(",")]
        assert numbers[::2] == sorted(numbers[::2])
        assert numbers[1::2] == sorted(numbers[1::2], reverse=True)
    tenants = {t for result in results.values() for t in result.service()}
    bars = [r for r in root.findall(f".//{space}rect") if r.get("fill") in COLOURS]
    assert len(bars) == len(results) * (1 + len(tenants))  # and its place in the legend


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--num-requests", "0", "'0' is not a whole number of at least 1"),
        ("--num-requests", "-5", "'-5' is not a whole number of at least 1"),
        ("--num-requests", "1.5", "'1.5' is not a whole number of at least 1"),
        ("--max-num-seqs", "0", "'0' is not a whole number of at least 1"),
        ("--max-num-batched-tokens", "0", "'0' is not a whole number of at least 1"),
        ("--rate", "-1", "'-1' is not a number of at least 0"),
        ("--rate", "nan", "'nan' is not a number of at least 0"),
        ("--rate", "inf", "'inf' is not a number of at least 0"),
        ("--gap-limit-s", "x", "'x' is not a number of at least 0"),
        (
            "--policy",
            "fcfs,bogus",
            "'bogus' is no policy; choose from fair, fcfs, prefix, priority",
        ),
        ("--widths", "4,0", "'0' is not a whole number of at least 1"),
        (
            "--num-blocks",
            "1",
            "1 is less than the 625 that one request of --workload conv may need",
        ),
        (
            "--plot",
            "no/such/folder/p.svg",
            "'no/such/folder/p.svg' is not the name of a file in a folder",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_flag(
    flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--num-requests", "3", flag, value])
    assert caught.value.code == 2
    assert f"argument {flag}: {words}" in capsys.readouterr().err


def test_the_command_reports_each_policy_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "p.svg"
    words = ["--num-requests", "3", "--rate", "0", "--max-num-seqs", "1", "--policy", "fcfs,fair"]
    main([*words, "--plot", str(picture)])
    told = capsys.readouterr().out
    assert "policy fcfs: 3 requests" in told and "policy fair: 3 requests" in told
    assert picture.read_text().startswith("<svg")
    main(["--num-requests", "3", "--max-num-seqs", "3", "--widths", "1,2", "--pool-study"])
    assert "max_num_seqs    1:" in capsys.readouterr().out
