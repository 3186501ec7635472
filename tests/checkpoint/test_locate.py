"""What a model's name means, and what an unknown one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagemill import checkpoint
from pagemill.errors import CheckpointError, ConfigError, PagemillError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Stand in for the hub: each call is recorded and fails as without a network."""
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_existing_folder_and_gguf_file_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint.locate(str(tmp_path)) == tmp_path
    file = tmp_path / "x.gguf"
    file.touch()
    assert checkpoint.locate(str(file)) == file
    assert checkpoint.locate(str(tmp_path)) == tmp_path


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert checkpoint.locate("~/m") == tmp_path / "m"


def test_folder_with_one_gguf_is_that_file_and_with_two_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert checkpoint.locate(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        checkpoint.locate(str(tmp_path))


def test_other_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.touch()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*give a \.gguf file"):
        checkpoint.locate(str(file))


def test_pulled_name_is_found(own_cache: Path) -> None:
    folder = own_cache / "models" / "my-model"
    folder.mkdir(parents=True)
    (folder / "w.gguf").touch()
    assert checkpoint.locate("my-model") == folder / "w.gguf"


def test_pullable_name_says_how_to_pull_it_and_asks_no_hub(hub_calls: list[Any]) -> None:
    with pytest.raises(ConfigError, match="pagemill pull smollm2-135m-instruct"):
        checkpoint.locate("smollm2-135m-instruct")
    assert hub_calls == []


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "x.gguf", "has space"])
def test_path_that_does_not_exist_asks_no_hub(hub_calls: list[Any], name: str) -> None:
    with pytest.raises(ConfigError, match="no folder, no file, and no pulled model.*pagemill pull"):
        checkpoint.locate(name)
    assert hub_calls == []


@pytest.mark.parametrize("name", ["", "a\0b", "../../etc", "..."])
def test_odd_names_are_config_errors(
    hub_calls: list[Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative name may well exist beside the checkout
    with pytest.raises(PagemillError):
        checkpoint.locate(name)


def test_hub_id_without_network_says_what_was_tried_and_what_to_do(hub_calls: list[Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.locate("someone/some-model", revision="v2", download_dir="/d")
    text = str(caught.value)
    for part in ("someone/some-model", "no folder", "no pulled model", "'v2'", "no network"):
        assert part in text
    assert "pagemill pull" in text
    ((name, options),) = hub_calls
    assert (name, options["revision"], options["cache_dir"]) == ("someone/some-model", "v2", "/d")


def test_hub_download_never_asks_for_pickled_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json", "model.safetensors", "pytorch_model.bin", "model.pt", "tokenizer.model",
        "original/consolidated.00.pth", "consolidated.safetensors", "vocab.txt", "tokenizer.json",
        "chat_template.jinja", "text_encoder/model.safetensors", "1_Pooling/config.json", "run.py",
    ]  # fmt: skip
    kept: list[str] = []

    def snapshot_download(name: str, **options: Any) -> str:
        allow, ignore = options["allow_patterns"], options["ignore_patterns"]
        kept.extend(filter_repo_objects(files, allow_patterns=allow, ignore_patterns=ignore))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert checkpoint.locate("gpt2") == tmp_path
    assert kept == [
        "config.json", "model.safetensors", "tokenizer.model", "vocab.txt", "tokenizer.json",
        "chat_template.jinja", "1_Pooling/config.json",
    ]  # fmt: skip


def test_real_hub_client_offline_is_a_checkpoint_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="hub gave no model 'someone/nothing'"):
        checkpoint.locate("someone/nothing", download_dir=str(tmp_path / "hub"))


def test_opening_what_does_not_exist_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.open_checkpoint(tmp_path / "nothing")


def test_import_brings_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, pagemill.checkpoint, pagemill.checkpoint.gguf_reader, pagemill.checkpoint.pull;"
        "print([m for m in ('torch', 'numpy', 'huggingface_hub', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
