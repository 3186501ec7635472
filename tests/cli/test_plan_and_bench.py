"""`plan`, `bench latency`, `bench throughput` and `pull` print numbers that can be checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagemill.cli import main


def test_plan_prints_what_fits_and_what_to_change(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", tiny_llama, *small]) == 0
    out = capsys.readouterr().out
    assert "weights" in out and "KV cache" in out
    assert "--max-num-seqs" in out or "--kv-cache-memory-bytes" in out


def test_plan_as_json_adds_up(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", tiny_llama, "--json", *small]) == 0
    plan = json.loads(capsys.readouterr().out)
    # two layers, K and V, two heads of 16, float32
    assert plan["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert plan["num_blocks"] * plan["block_bytes"] == plan["kv_cache_bytes"] <= 8 * 2**20
    assert plan["num_tokens"] == plan["kv_cache_bytes"] // plan["kv_bytes_per_token"]
    assert plan["num_full_requests"] == pytest.approx(plan["num_tokens"] / 256)


def test_plan_of_what_does_not_fit_is_an_error_with_the_flag(
    tiny_llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", tiny_llama, "--kv-cache-memory-bytes", "64KiB"]) == 1
    err = capsys.readouterr().err
    assert "max_model_len" in err and "kv_cache_memory_bytes" in err


def test_bench_latency_prints_the_rounds_it_ran(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--batch-size", "2", "--input-len", "4", "--output-len", "3", "--num-iters", "2"]
    assert main(["bench", "latency", tiny_llama, "--json", "--quiet", *words, *small]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert len(numbers["latencies_s"]) == 2
    assert numbers["min_latency_s"] <= numbers["median_latency_s"] <= numbers["max_latency_s"]


def test_bench_throughput_counts_every_token_with_random_weights_too(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "3", "--input-len", "8", "--output-len", "5"]
    dummy = ["--load-format", "dummy"]
    assert main(["bench", "throughput", tiny_llama, "--json", *dummy, *words, *small]) == 0
    captured = capsys.readouterr()
    numbers = json.loads(captured.out)
    assert (numbers["num_input_tokens"], numbers["num_output_tokens"]) == (24, 15)
    assert "requests: 100%" in captured.err


def test_bench_for_people_is_lines(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "1", "--input-len", "2", "--output-len", "2", "--quiet"]
    assert main(["bench", "throughput", tiny_llama, *words, *small]) == 0
    assert "output tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_bench_longer_than_the_context_is_refused(
    tiny_llama: str, small: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--input-len", "200", "--output-len", "57"]
    assert main(["bench", command, tiny_llama, *words, *small]) == 1
    err = capsys.readouterr().err
    assert "257" in err and "256" in err


def test_bench_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--num-prompts", "0"]) == 1
    assert "--num-prompts is 0" in capsys.readouterr().err


def test_pull_of_an_unknown_name_lists_the_known_ones(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "no-such-model"]) == 1
    err = capsys.readouterr().err
    assert "no-such-model" in err and "smollm2-135m-instruct" in err


def test_pull_of_what_is_there_prints_its_path(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def pull(name: str, *, progress: bool = True) -> Path:
        asked.append((name, progress))
        return cache / "models" / name

    monkeypatch.setattr("pagemill.checkpoint.pull.pull", pull)
    assert main(["pull", "--quiet"]) == 0
    assert asked == [("smollm2-135m-instruct", False)]
    assert capsys.readouterr().out.strip().endswith("smollm2-135m-instruct")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["latency", "--num-iters-warmup", "-1"],
            "--num-iters-warmup is -1; it must be at least 0",
        ),
        (["latency", "--batch-size", "0"], "--batch-size is 0; it must be at least 1"),
        (["throughput", "--num-prompts", "-3"], "--num-prompts is -3; it must be at least 1"),
    ],
)
def test_bench_of_fewer_than_none_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 1
    assert said in capsys.readouterr().err
