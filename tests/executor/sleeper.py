"""A child that is busy for a long time, whatever its parent says."""

from __future__ import annotations

import time

from pagemill.executor.child_process import end_with_parent, parent_connection


def main(fd: int) -> None:
    """Say that it runs, and sleep."""
    connection = parent_connection(fd)
    end_with_parent(connection)
    connection.send("begun")
    time.sleep(60)
