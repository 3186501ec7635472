"""The tables show what ran, what did not and why."""

from __future__ import annotations

from benchmarks import report
from benchmarks.limits import Limits
from benchmarks.random_models import Sizes
from benchmarks.turns import Entrant

_SIZES = Sizes(weight_bytes=1_000_000_000, linear_flops_per_token=1e9, kv_bytes_per_token=100)
_LIMITS = [Limits(read_bytes_per_s=20e9, bf16_flops_per_s=2e12)] * 7


def entrant(engine: str, format: str, rates: list[float], ttfts: list[float]) -> Entrant:
    """Return an engine that did case a."""
    rounds = [
        {"decode_tok_per_s": rate, "ttft_ms": ttft} for rate, ttft in zip(rates, ttfts, strict=True)
    ]
    return Entrant(engine, format, engine, {}, version="1.0", rounds={"a": rounds})


def test_table_has_medians_spreads_ratios_and_shares() -> None:
    own = entrant(
        "pagemill", "bf16", [18.0, 17.0, 19.0] + [18.0] * 4, [100.0, 90.0, 110.0] + [100.0] * 4
    )
    peer = entrant("vllm", "bf16", [9.0] + [10.0] * 6, [300.0, 300.0, 200.0] + [300.0] * 4)
    text = report.markdown(report.Run("m", 2, _SIZES, [own, peer], {"a": _LIMITS}))
    assert "| pagemill | bf16 | 18.0 (17.0-19.0) | 100 (90.0-110) | - | - | 90% (85%-95%) |" in text
    assert (
        "| vllm | bf16 | 10.0 (9.0-10.0) | 300 (200-300) | x 1.80 (1.70-2.00) | x 3.00 (1.82-3.33) |"
        in text
    )
    assert "20.0 (20.0-20.0) GB/s" in text
    assert "share of the streaming bandwidth | 0.85 | 0.90 (0.85-0.95) | shown |" in text
    assert "TTFT ms, against vllm bf16 | x 2.5 | x 3.00 (1.82-3.33) | not shown |" in text


def test_engine_with_fewer_rounds_says_so() -> None:
    own = entrant("pagemill", "bf16", [18.0] * 7, [100.0] * 7)
    slow = entrant("slow", "bf16", [9.0] * 2, [100.0] * 2)
    text = report.markdown(report.Run("m", 2, _SIZES, [own, slow], {"a": _LIMITS}))
    assert "Case a, 7 rounds" in text
    assert "| slow, 2 of 7 rounds | bf16 | 9.0 (9.0-9.0) |" in text
    assert "| pagemill | bf16 | 18.0 (18.0-18.0) |" in text


def test_best_peer_is_the_one_that_leaves_pagemill_the_least() -> None:
    own = entrant("pagemill", "bf16", [18.0] * 7, [100.0] * 7)
    slow = entrant("slow", "bf16", [9.0] * 7, [100.0] * 7)
    fast = entrant("fast", "bf16", [15.0] * 7, [100.0] * 7)
    text = report.markdown(report.Run("m", 2, _SIZES, [own, slow, fast], {"a": _LIMITS}))
    assert "decode tokens/s, against fast bf16 | x 1.25 | x 1.20 (1.20-1.20) | missed |" in text


def test_peer_that_is_not_installed_is_an_empty_row() -> None:
    own = entrant("pagemill", "bf16", [18.0] * 7, [100.0] * 7)
    absent = Entrant("vllm", "bf16", "vLLM-CPU", {}, failure="not installed")
    text = report.markdown(report.Run("m", 2, _SIZES, [own, absent], {"a": _LIMITS}))
    assert "| vLLM-CPU | bf16 | - | - | - | - | - |" in text
    assert "| vLLM-CPU | bf16 | not installed | - | - |" in text
    assert "TTFT ms, against vLLM-CPU | x 2.5 | - | not measured |" in text


def test_quantized_weights_are_held_against_own_bfloat16() -> None:
    plain = entrant("pagemill", "bf16", [10.0] * 7, [100.0] * 7)
    quantized = entrant("pagemill", "int8", [19.0] * 7, [100.0] * 7)
    text = report.markdown(report.Run("m", 2, _SIZES, [plain, quantized], {"a": _LIMITS}))
    assert "case a, int8: decode tokens/s, against pagemill bf16 | x 1.8 | x 1.90" in text


def test_run_without_limits_has_no_shares() -> None:
    own = entrant("pagemill", "bf16", [18.0] * 7, [100.0] * 7)
    text = report.markdown(report.Run("m", 2, _SIZES, [own], {"a": []}))
    assert "| pagemill | bf16 | 18.0 (18.0-18.0) | 100 (100-100) | - | - | - |" in text
    assert "streaming" not in text


def test_format_with_fewer_cases_is_in_their_tables_alone() -> None:
    own = entrant("pagemill", "bf16", [10.0] * 7, [100.0] * 7)
    few = Entrant("pagemill", "int8", "pagemill", {}, "b", version="1.0")
    text = report.markdown(report.Run("m", 2, _SIZES, [own, few], {"a": _LIMITS, "b": _LIMITS}))
    tables = text.split("Case ")
    assert "| pagemill | int8 |" not in tables[1]
    assert "| pagemill | int8 |" in tables[2]
    assert "case a, int8" not in text
