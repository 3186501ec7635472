"""The tier that a worker opens: measured costs, room, identity, and a disk that is full at start."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from pagemill.batch.tier_file import TierFile
from pagemill.config import EngineConfig
from pagemill.engine.resolve import resolve
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError
from pagemill.executor.in_process import InProcessExecutor
from pagemill.host_tier_plan import HostTierPlan, MoveCosts
from pagemill.worker.tier_identity import tier_identity
from tests.fakes.fake_model import save_tiny_llama
from tests.models.tiny import TINY, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", max_position=64)


def config(folder: Path, swap_dir: Path, **fields: Any) -> EngineConfig:
    settled = {"kv_cache_memory_bytes": 1 << 20, "num_threads": 1, "swap_dir": str(swap_dir)}
    return resolve(EngineArgs(str(folder), skip_tokenizer_init=True, **{**settled, **fields}))


def tier_of(settled: EngineConfig) -> HostTierPlan | None:
    executor = InProcessExecutor(settled)
    executor.shutdown()
    return executor.memory_plan.host_tier


def test_costs_are_measured_and_shown(folder: Path, tmp_path: Path) -> None:
    plan = tier_of(config(folder, tmp_path, swap_space=0.01))
    assert plan is not None
    costs = plan.costs
    assert costs.swap_out_s > 0 and costs.swap_in_s > 0 and costs.compute_token_s > 0
    assert costs.compute_context_s >= 0
    record = plan.slot_bytes + TierFile.overhead_bytes(plan.slot_bytes)
    assert plan.num_slots == int(0.01 * 2**30) // record
    said = "\n".join(plan.lines(16))
    assert "ms out" in said and "ms in" in said and "to compute" in said
    assert list(tmp_path.iterdir()) == [], "temporary files have no name"


def test_costs_add_up_over_a_prompt() -> None:
    costs = MoveCosts(swap_out_s=2.0, swap_in_s=3.0, compute_token_s=1.0, compute_context_s=0.5)
    assert costs.recompute_s(0, 4) == 4 + 0.5 * 8
    assert costs.recompute_s(0, 10) == costs.recompute_s(0, 4) + costs.recompute_s(4, 10)
    assert costs.swap_s(1, 2) == 8.0


def test_no_room_is_no_tier(folder: Path, tmp_path: Path) -> None:
    assert tier_of(config(folder, tmp_path, swap_space=0.0)) is None
    assert tier_of(config(folder, tmp_path, swap_space=1e-9)) is None


def test_no_room_for_a_block_of_a_file_that_was_named_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    small = config(folder, tmp_path, swap_space=1e-9, kv_cache_file=str(tmp_path / "tier"))
    with pytest.raises(ConfigError, match="kv_cache_file needs room: swap_space is 9.3.*e-10 GiB"):
        InProcessExecutor(small)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folder_that_does_not_exist_is_refused_and_nothing_is_made(
    folder: Path, tmp_path: Path
) -> None:
    named = config(folder, tmp_path, kv_cache_file=str(tmp_path / "no" / "such" / "tier"))
    with pytest.raises(
        ConfigError, match="cannot be opened: .*name a file in a folder that exists"
    ):
        InProcessExecutor(named)
    assert list(tmp_path.iterdir()) == []


def test_a_swap_dir_is_made_where_it_is_not_there(folder: Path, tmp_path: Path) -> None:
    assert tier_of(config(folder, tmp_path / "new" / "swap")) is not None


def test_full_disk_at_start_is_said_and_the_engine_starts(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_log: pytest.LogCaptureFixture,
) -> None:
    own_log.set_level(logging.WARNING, logger="pagemill")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert tier_of(config(folder, tmp_path)) is None
    assert "No space left on device. Starting without it" in own_log.text
    assert "swap_space to 0" in own_log.text


def test_a_swap_dir_that_cannot_be_made_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert tier_of(config(folder, tmp_path / "file" / "below")) is None


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("dtype", {"dtype": "bfloat16"}),
        ("cache layout", {"block_size": 8}),
        ("rotary setting", {"hf_overrides": {"rope_theta": 5000.0}}),
        ("model configuration", {"hf_overrides": {"rms_norm_eps": 1e-4}}),
        ("quantization", {"quantization": "int8"}),
    ],
)
def test_identity_tells_engines_apart(
    folder: Path, tmp_path: Path, part: str, change: dict[str, Any]
) -> None:
    one = tier_identity(config(folder, tmp_path))
    other = tier_identity(config(folder, tmp_path, **change))
    assert one[part] != other[part]
    assert one == tier_identity(config(folder, tmp_path, swap_space=1.0, max_num_seqs=3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"rope_theta": 5000.0},
            r"its rotary setting rope_theta is .*, this engine's is 5000\.0\. Name",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"rope_scaling\.factor is none, this engine's is 2\.0",
        ),
        (
            {"rms_norm_eps": 1e-4},
            r"its model configuration rms_norm_eps is .*, this engine's is 0\.0001\. Name",
        ),
    ],
)
def test_a_refusal_names_the_setting_and_both_values(
    folder: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = str(tmp_path / "tier")
    assert tier_of(config(folder, tmp_path, kv_cache_file=path)) is not None
    with pytest.raises(ConfigError, match=reason):
        InProcessExecutor(config(folder, tmp_path, kv_cache_file=path, hf_overrides=change))


def test_long_settings_are_compared_by_digests_and_fit_the_header(
    folder: Path, tmp_path: Path
) -> None:
    def identity(last: int, **more: Any) -> dict[str, Any]:
        change = {"labels": {str(i): "x" * 50 for i in range(99)} | {"99": last}, **more}
        return tier_identity(config(folder, tmp_path, hf_overrides=change))

    one, other = identity(1), identity(2)
    assert one != other and str(one["model configuration"]["labels"]).startswith("digest ")
    many = {f"key{i}": "x" * 50 for i in range(2000)}
    one, other = identity(1, **many), identity(2, **many)
    assert one != other and len(str(one)) < 10_000


def test_the_length_counts_where_rotary_factors_hang_on_it(folder: Path, tmp_path: Path) -> None:
    def differs(**rotary: Any) -> bool:
        one, other = (
            tier_identity(config(folder, tmp_path, max_model_len=length, hf_overrides=rotary))
            for length in (32, 64)
        )
        return one != other

    assert not differs()
    assert differs(rope_scaling={"rope_type": "dynamic", "factor": 2.0})


def test_other_weights_under_the_same_name_are_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny_llama(folder, seed=0)
    before = tier_identity(config(folder, tmp_path))
    save_tiny_llama(folder, seed=1)
    after = tier_identity(config(folder, tmp_path))
    assert [key for key in before if before[key] != after[key]] == ["weights digest"]


def test_a_file_of_another_engine_stops_the_start_with_the_reason(
    folder: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "tier")
    assert tier_of(config(folder, tmp_path, kv_cache_file=path)) is not None
    other = config(folder, tmp_path, kv_cache_file=path, block_size=8)
    with pytest.raises(ConfigError, match="belongs to another engine: its cache layout is"):
        InProcessExecutor(other)
    assert tier_of(config(folder, tmp_path, kv_cache_file=path)) is not None


def test_a_file_with_other_layers_in_its_blocks_is_refused(tmp_path: Path) -> None:
    folder, path = tmp_path / "m", str(tmp_path / "tier")
    save_tiny(TINY["gemma3"], folder)  # one window of 8
    split = config(folder, tmp_path, kv_cache_file=path)
    assert "layers that see 8" in str(tier_identity(split)["cache layout"])
    assert tier_of(split) is not None
    # With a context no longer than the window all layers share a table.
    plain = config(folder, tmp_path, kv_cache_file=path, max_model_len=8)
    with pytest.raises(ConfigError, match="belongs to another engine: its cache layout is"):
        InProcessExecutor(plain)


def test_kernels_and_version_are_part_of_the_identity(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill import native
    from pagemill.worker import tier_identity as room

    settled = config(folder, tmp_path)
    one = tier_identity(settled)
    monkeypatch.setattr(room, "__version__", "another")
    assert tier_identity(settled)["version"] != one["version"]
    if native.extension() is not None:
        monkeypatch.setattr(native, "extension", lambda: None)
        assert tier_identity(settled)["kernel family"] == "plain torch" != one["kernel family"]
