"""The file of the host tier: what was written is read, and nothing else ever is."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pagemill.batch.tier_file import HEADER_BYTES, MAGIC, TierFile
from pagemill.errors import ConfigError

SLOT = 300
RECORD = 4096
IDENTITY: dict[str, Any] = {"model": "abc", "dtype": "float32", "adapter": None}


def block(seed: int) -> list[bytearray]:
    """Return the parts of a block."""
    draw = random.Random(seed)
    return [bytearray(draw.randbytes(100)), bytearray(draw.randbytes(200))]


def name(seed: int) -> bytes:
    return seed.to_bytes(16, "big")


def empty() -> list[bytearray]:
    return [bytearray(100), bytearray(200)]


def lasting(path: Path, num_slots: int = 16, **changes: Any) -> TierFile:
    return TierFile.lasting(str(path), SLOT, num_slots, {**IDENTITY, **changes})


def filled(path: Path, count: int = 4) -> None:
    file = lasting(path)
    for slot in range(count):
        file.write(slot, name(slot + 1), block(slot))
    file.close()


def assert_holds(file: TierFile, slot: int, seed: int) -> None:
    parts = empty()
    assert file.read(slot, parts)
    assert parts == block(seed)


def test_a_temporary_file_leaves_nothing_and_gives_back_what_was_written(tmp_path: Path) -> None:
    file = TierFile.temporary(str(tmp_path / "new"), SLOT)
    assert not (tmp_path / "new").exists(), "made before its first use"
    file.write(7, None, block(1))
    file.write(2, name(2), block(2))
    assert_holds(file, 7, 1)
    assert_holds(file, 2, 2)
    assert list((tmp_path / "new").iterdir()) == []
    assert not file.read(3, empty()), "nothing was written there"
    file.close()
    file.close()


def test_a_slot_holds_what_was_written_last(tmp_path: Path) -> None:
    file = TierFile.temporary(str(tmp_path), SLOT)
    for seed in range(3):
        file.write(0, name(seed), block(seed))
    assert_holds(file, 0, 2)
    file.close()


def test_named_blocks_are_found_again_oldest_first_and_nameless_ones_are_not(
    tmp_path: Path,
) -> None:
    file = lasting(tmp_path / "t")
    assert file.kept == []
    for slot, seed in ((3, 3), (0, 1), (5, 5)):
        file.write(slot, name(seed), block(seed))
    file.write(1, None, block(9))
    file.write(3, name(4), block(4))
    file.close()
    again = lasting(tmp_path / "t")
    assert again.kept == [(0, name(1)), (5, name(5)), (3, name(4))]
    assert_holds(again, 3, 4)
    again.write(0, name(8), block(8))
    again.close()
    third = lasting(tmp_path / "t", num_slots=4)
    assert third.kept == [(3, name(4)), (0, name(8))], "slots past the end are not looked at"
    third.close()


def test_forgotten_blocks_are_not_found_again_but_still_read(tmp_path: Path) -> None:
    file = lasting(tmp_path / "t")
    file.write(0, name(1), block(1))
    file.forget()
    assert_holds(file, 0, 1)
    file.write(1, name(2), block(2))
    file.close()
    again = lasting(tmp_path / "t")
    assert again.kept == [(1, name(2))]
    again.close()


def test_all_names_are_forgotten_also_those_behind_the_slots_that_were_opened(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t"
    filled(path, 8)
    file = lasting(path, num_slots=2)
    assert len(file.kept) == 2
    file.forget()
    file.close()
    again = lasting(path)
    assert again.kept == []
    again.write(3, name(9), block(9))
    again.close()
    third = lasting(path)
    assert third.kept == [(3, name(9))], "and what comes later is found"
    third.close()


def test_a_damaged_generation_is_no_generation(tmp_path: Path) -> None:
    path = tmp_path / "t"
    filled(path)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES - 64] ^= 1
    path.write_bytes(data)
    file = lasting(path)
    assert file.kept == []
    file.close()


def test_forgetting_is_on_the_disk_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lasting(tmp_path / "t")
    flushed: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.pread(fd, HEADER_BYTES, 0)))
    file.forget()
    assert flushed == [(tmp_path / "t").read_bytes()]
    file.close()


@pytest.mark.parametrize("where", [0, 20, 20, 24, 32, 38, 64, 163, 363])
def test_one_flipped_bit_is_never_read_as_truth(tmp_path: Path, where: int) -> None:
    """In the name, the stamp, the generation, either sum, or the first, a middle or the last byte of the block."""
    path = tmp_path / "t"
    filled(path)
    offset = HEADER_BYTES + RECORD + where
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)
    file = lasting(path)
    assert_holds(file, 0, 0)
    assert not file.read(1, empty())
    assert_holds(file, 2, 2)
    file.close()


def test_damage_while_the_file_is_open_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "t"
    filled(path)
    file = lasting(path)
    assert len(file.kept) == 4
    with path.open("r+b") as other:  # a whole, right record: of another slot
        record = path.read_bytes()[HEADER_BYTES : HEADER_BYTES + RECORD]
        other.seek(HEADER_BYTES + RECORD)
        other.write(record)
    assert not file.read(1, empty())
    file.close()


@pytest.mark.parametrize("size", [0, len(MAGIC), 30, HEADER_BYTES - 1])
def test_an_empty_file_or_one_of_ours_cut_in_its_header_is_begun(tmp_path: Path, size: int) -> None:
    path = tmp_path / "t"
    filled(path)
    os.truncate(path, size)
    file = lasting(path)
    assert file.kept == []
    file.write(0, name(1), block(1))
    assert_holds(file, 0, 1)
    file.close()


@pytest.mark.parametrize("size", [HEADER_BYTES, HEADER_BYTES + 20, HEADER_BYTES + RECORD + 100])
def test_a_file_cut_in_its_records_keeps_those_that_are_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "t"
    filled(path)
    os.truncate(path, size)
    file = lasting(path)
    whole = (size - HEADER_BYTES) // RECORD
    for slot in range(4):
        assert file.read(slot, empty()) == (slot < whole)
    file.close()


def test_a_file_cut_while_it_is_open_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "t"
    filled(path)
    file = lasting(path)
    os.truncate(path, HEADER_BYTES + RECORD)
    assert_holds(file, 0, 0)
    assert not file.read(2, empty())
    file.write(2, name(7), block(7))
    assert_holds(file, 2, 7)
    file.close()


@pytest.mark.parametrize("key", [*IDENTITY, "slot_bytes", "something new"])
def test_a_file_of_another_engine_is_refused_with_what_differs(tmp_path: Path, key: str) -> None:
    path = tmp_path / "t"
    filled(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"its {key} is .*, this engine's is") as caught:
        lasting(path, **{key: "other"})
    assert "Name another file, or remove it" in str(caught.value)
    assert path.read_bytes() == before


def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    for content in (b"chapter one", MAGIC[:1], MAGIC[:3], MAGIC[:-1], MAGIC[:-1] + b"?", b"\0"):
        path.write_bytes(content)
        with pytest.raises(
            ConfigError, match="not a file of pagemill's.*name another, or remove it"
        ):
            lasting(path)
        assert path.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ConfigError, match="no regular file"):
            lasting(special)
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        lasting(tmp_path)
    with pytest.raises(
        ConfigError, match="cannot be opened: .*name a file in a folder that exists"
    ):
        lasting(tmp_path / "nowhere" / "t")


def test_settings_within_settings_are_named_and_many_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t"
    rotary = {"rope_theta": 1e4, "rope_scaling": None}
    lasting(path, rotary=rotary).close()
    with pytest.raises(ConfigError, match="its rotary rope_theta is 10000.0, this engine's is 5.0"):
        lasting(path, rotary={**rotary, "rope_theta": 5.0})
    with pytest.raises(
        ConfigError, match="its rotary rope_theta is 10000.0, this engine's is none"
    ):
        lasting(path, rotary={"rope_scaling": None})
    with pytest.raises(
        ConfigError, match=r"its model is .*; its dtype is .*; its a is .*; 2 more differ"
    ):
        lasting(path, rotary=rotary, model="m", dtype="d", a=1, b=2, c=3)


def test_a_file_of_another_format_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "t"
    before = b"pagemill kv tier 1\n" + bytes(4096)
    path.write_bytes(before)
    with pytest.raises(ConfigError, match="another version of pagemill: its format is 1, this"):
        lasting(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES - 10, HEADER_BYTES, HEADER_BYTES + 1])
@pytest.mark.parametrize("then", ["forget", "write", "read"])
def test_whoever_cuts_a_file_that_is_open_is_told_of_and_the_next_start_takes_it(
    tmp_path: Path, size: int, then: str, own_log: pytest.LogCaptureFixture
) -> None:
    own_log.set_level(logging.WARNING, logger="pagemill")
    path = tmp_path / "t"
    filled(path)
    file = lasting(path)
    os.truncate(path, size)
    for _ in range(2):
        if then == "forget":
            file.forget()
        elif then == "write":
            file.write(0, name(7), block(7))
        else:
            assert not file.read(2, empty())
    (line,) = own_log.messages
    assert f"{path} has {size} bytes and had" in line and "something else has cut it" in line
    file.close()
    again = lasting(path)
    assert again.kept == ([(0, name(7))] if then == "write" else [])
    again.close()


def test_whoever_removes_a_file_that_is_open_is_told_of_once(
    tmp_path: Path, own_log: pytest.LogCaptureFixture
) -> None:
    own_log.set_level(logging.WARNING, logger="pagemill")
    file = lasting(tmp_path / "t")
    (tmp_path / "t").unlink()
    for seed in range(3):
        file.write(seed, name(seed), block(seed))
    assert_holds(file, 2, 2)
    (line,) = own_log.messages
    assert "was removed or replaced" in line
    file.close()


def test_two_engines_do_not_share_a_file(tmp_path: Path) -> None:
    file = lasting(tmp_path / "t")
    with pytest.raises(ConfigError, match="in use by another engine"):
        lasting(tmp_path / "t")
    file.close()
    lasting(tmp_path / "t").close()


def test_a_file_that_nobody_closed_is_let_go_with_its_engine(tmp_path: Path) -> None:
    file = lasting(tmp_path / "t")
    file.write(0, name(1), block(1))
    del file
    again = lasting(tmp_path / "t")
    assert again.kept == [(0, name(1))]
    again.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error_of_the_write() -> None:
    file = TierFile(lambda: os.open("/dev/full", os.O_RDWR), SLOT, "/dev/full")
    with pytest.raises(OSError) as caught:
        file.write(0, name(1), block(1))
    assert caught.value.errno == errno.ENOSPC
    assert not file.read(0, empty())
    file.close()


def test_a_write_that_fails_in_the_middle_leaves_nothing_to_believe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lasting(tmp_path / "t")
    file.write(0, name(1), block(1))
    whole = os.pwritev

    def half(fd: int, parts: Any, offset: int) -> int:
        whole(fd, [parts[0], memoryview(parts[1])[:50]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        with pytest.raises(OSError):
            file.write(0, name(2), block(2))
    assert not file.read(0, empty())
    file.close()
    again = lasting(tmp_path / "t")
    assert not again.read(0, empty())
    again.close()


_WRITER = """
import random, sys
from tests.batch.test_tier_file import block, lasting, name
from pathlib import Path
file, seed = lasting(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
while True:
    file.write(seed % 16, name(seed), block(seed))
    seed += 1
"""


def test_killed_at_random_moments_while_writing_it_never_tells_a_lie(tmp_path: Path) -> None:
    draw = random.Random(3)
    path = tmp_path / "t"
    found = 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(1 + draw.randrange(10**6))],
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(draw.random() * 0.02)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        file = lasting(path)
        for slot, kept in file.kept:
            parts = empty()
            if file.read(slot, parts):
                assert parts == block(int.from_bytes(kept, "big"))
                found += 1
        file.close()
    assert found > 10
