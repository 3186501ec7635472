"""The documents agree with the tree: links lead somewhere, named rooms and commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert dead == []


def test_rooms_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## The parts and their rooms") :]
    rooms = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", table)
    assert len(rooms) > 20
    folders = [ROOT / "pagemill", ROOT / "pagemill" / "tokenizer", ROOT]
    missing = [room for room in rooms if not any((folder / room).exists() for folder in folders)]
    assert missing == []


def test_files_named_in_adding_exist() -> None:
    text = (ROOT / "docs" / "adding.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)+(?:__init__|[a-z_]+)\.py)`", text)
    homes = (ROOT / "pagemill", ROOT)
    missing = [name for name in named if not any((home / name).exists() for home in homes)]
    assert named and missing == []


def test_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = set(re.findall(r"`(?:pagemill |bench )([a-z-]+)", readme)) - {"bench", "import"}
    run = subprocess.run(
        [sys.executable, "-m", "pagemill", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    benches = {"latency", "throughput"}
    missing = [c for c in commands - benches if not re.search(rf"\b{c}\b", run.stdout)]
    assert missing == []


def test_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
