"""A child process ends with its parent."""

from __future__ import annotations

from pagemill.executor.child_process import kill_child, start_child


def test_a_child_whose_parent_is_gone_ends_whatever_it_does() -> None:
    child, connection = start_child("tests.executor.sleeper")
    try:
        assert connection.recv() == "begun"
        assert child.poll() is None
        connection.close()  # as the system does when a process ends
        assert child.wait(30) == 1
    finally:
        kill_child(child)
