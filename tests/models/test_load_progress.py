"""What is seen of a model while its weights are read."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import struct
import termios

import pytest

from pagemill.checkpoint import open_checkpoint
from pagemill.models import load_progress, loader
from pagemill.models.load_progress import LoadProgress
from tests.models.conftest import load


def test_the_log_says_how_far_loading_is(tiny_pair, own_log, monkeypatch) -> None:
    monkeypatch.setattr(load_progress, "_LINE_EVERY_S", 0.0)
    own_log.set_level(logging.INFO, logger="pagemill")
    load(tiny_pair("llama-tied")[0])
    shares = [
        int(found[1]) for m in own_log.messages if (found := re.search(r"loading .*\((\d+)%\)", m))
    ]
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert shares[-1] >= 80


def test_a_short_load_says_nothing(tiny_pair, own_log) -> None:
    own_log.set_level(logging.INFO, logger="pagemill")
    load(tiny_pair("llama-tied")[0])
    assert not [m for m in own_log.messages if m.startswith("loading")]


@pytest.mark.parametrize("name", ["llama-tied", "mistral", "gpt2"])
def test_every_byte_of_the_files_is_counted(tiny_pair, name, monkeypatch) -> None:
    counted = []

    class Counting(LoadProgress):
        def add(self, size_bytes: int) -> None:
            counted.append(size_bytes)
            super().add(size_bytes)

    monkeypatch.setattr(loader, "LoadProgress", Counting)
    folder = tiny_pair(name)[0]
    load(folder)
    infos = open_checkpoint(folder).infos()
    assert len(counted) == len(infos)
    assert sum(counted) == sum(info.size_bytes for info in infos.values())


def test_a_terminal_gets_a_bar(monkeypatch) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(load_progress.sys, "stderr", terminal)
        monkeypatch.setattr(load_progress, "_SHOWN_AFTER_S", 0.0)
        with LoadProgress("some-model", 4 << 20) as progress:
            progress.add(3 << 20)
            progress.add(1 << 20)
        terminal.flush()
        text = ""  # a terminal hands on what is written bit by bit
        while "100%" not in text and select.select([ours], [], [], 10)[0]:
            text += os.read(ours, 1 << 16).decode(errors="replace")
    os.close(ours)
    assert "Loading some-model" in text
    assert "100%" in text
