"""Clients that do not read: what waits for them has a bound, then they are disconnected; others notice nothing."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import termios
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemill.server.unread import UnreadWatch
from tests.server.harness import until
from tests.server.real_serve import Serve, asked_of, ready
from tests.server.test_serving import COMPLETIONS, send_request

NUM_CLIENTS = 24
NUM_TOKENS = 1000


def unreading_client(port: int, body: dict[str, Any]) -> socket.socket:
    """Return a client that has sent a request and reads nothing, and for which the system keeps little."""
    client = socket.socket()
    client.settimeout(20)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 512)
    client.connect(("127.0.0.1", port))
    send_request(client, body)
    return client


def long_stream(**fields: Any) -> dict[str, Any]:
    usage = {"include_usage": True, "continuous_usage_stats": True}  # events of some length
    body = {"prompt": "x", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    return body | {"stream": True, "stream_options": usage} | fields


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_streams_that_nobody_reads_cost_little_memory_and_say_all_when_they_are_read(
    serve: Serve,
) -> None:
    with asked_of(serve) as server:
        server.wait_idle()
        alone = server.post(COMPLETIONS, long_stream(stream=False, stream_options=None)).json()
        before, told = memory_bytes(serve.process.pid), server.metric("generation_tokens_total")
        clients = [unreading_client(serve.port, long_stream()) for _ in range(NUM_CLIENTS)]
        all_told = told + NUM_CLIENTS * NUM_TOKENS
        until(lambda: server.metric("generation_tokens_total") >= all_told, timeout_s=120)
        assert memory_bytes(serve.process.pid) - before < 7 << 20
        with clients[0] as first:
            assert streamed_text(first) == alone["choices"][0]["text"]
        for client in clients[1:]:
            client.close()
        server.wait_idle()


def streamed_text(client: socket.socket) -> str:
    """Read a stream of completions to its end."""
    parts = []
    with client.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"data: [DONE]"):
                return "".join(parts)
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                parts += [choice["text"] for choice in chunk["choices"]]
    raise AssertionError("the stream has no end")


def test_a_client_that_reads_nothing_is_disconnected_and_counted_and_a_second_signal_waits_for_nobody(
    tiny_llama: Path,
) -> None:
    words = (str(tiny_llama), "--send-timeout", "0.5", "--shutdown-timeout", "1000000")
    with ready(*words) as serve, asked_of(serve) as server:
        # The stream has far more to say, when the system's buffers are full, than it can in half a second.
        stream = long_stream(n=8, temperature=1, max_tokens=1900, logprobs=20)
        whole = long_stream(logprobs=20, stream=False, stream_options=None)
        clients = [unreading_client(serve.port, body) for body in (stream, whole)]
        with httpx.stream("POST", serve.url + COMPLETIONS, json=long_stream(), timeout=60) as other:
            events = [line for line in other.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert sum('"text":' in event for event in events) > 100
        until(lambda: sum("has read nothing for" in line for line in serve.log) == 2)
        server.wait_idle()
        assert server.metric("request_success_total", finished_reason="abort") == 1
        for client in clients:
            client.close()

        body = long_stream(max_tokens=1900)
        with httpx.stream("POST", serve.url + COMPLETIONS, json=body, timeout=60) as last:
            next(last.iter_lines())
            engine = serve.engine_pid()
            serve.process.send_signal(signal.SIGTERM)
            until(lambda: any("once more leaves at once" in line for line in serve.log))
            assert serve.end(signal.SIGTERM) == 0, serve.log
        assert not Path(f"/proc/{engine}").exists()


class Transport(asyncio.Transport):
    """A transport with so many bytes to send."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.is_aborted = False
        self.socket: socket.socket | None = None

    def get_write_buffer_size(self) -> int:
        """Return what waits."""
        return self.size

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the socket, if it has one."""
        return self.socket if name == "socket" else default

    def abort(self) -> None:
        """Note that it was closed."""
        self.is_aborted = True


class Client:
    """A connection."""

    def __init__(self) -> None:
        self.transport: Any = Transport()


def test_the_time_without_reading_counts_while_as_much_waits() -> None:
    slow, gone, idle = clients = [Client(), Client(), Client()]
    now = 0.0
    watch = UnreadWatch(clients, 10.0, lambda: now)
    for second in range(60):
        now = float(second)
        slow.transport.size = 100_000 - 10 * (second // 9)
        gone.transport.size = 500 if second >= 20 else 0
        watch.look()
        assert gone.transport.is_aborted == (second >= 30)
    assert not slow.transport.is_aborted
    assert not idle.transport.is_aborted


def bytes_in_system(own: socket.socket) -> int:
    """Return how much of what was sent the other side has not taken."""
    held = array.array("i", [0])
    fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, held)
    return held[0]


def test_who_reads_from_the_systems_buffer_alone_is_left_alone() -> None:
    """The system takes more of us only when a good part of its buffer went: what waits here stays the same."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        reader = socket.socket()
        reader.settimeout(20)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        reader.connect(port.getsockname())
        writer, _ = port.accept()
    with reader, writer:
        writer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                writer.send(bytes(1 << 16))
        slow, gone = Client(), Client()
        slow.transport.size = gone.transport.size = 66_000
        slow.transport.socket = writer
        now = 0.0
        watch = UnreadWatch([slow, gone], 10.0, lambda: now)
        for second in range(0, 28, 4):
            now = float(second)
            held = bytes_in_system(writer)
            while bytes_in_system(writer) == held:  # the system tells of no less than some packets
                assert reader.recv(1 << 12)
            watch.look()
            assert gone.transport.is_aborted == (second >= 12)
        assert not slow.transport.is_aborted
        for second in range(28, 60, 4):
            now = float(second)
            watch.look()
        assert slow.transport.is_aborted


@pytest.mark.parametrize(("timeout_s", "pause_s"), [(1e-9, 0.01), (1.0, 0.25), (1e9, 1.0)])
def test_however_short_the_time_is_there_is_a_pause_between_two_looks(
    timeout_s: float, pause_s: float
) -> None:
    assert UnreadWatch([], timeout_s).pause_s == pause_s


def test_it_looks_again_and_again_until_it_is_cancelled() -> None:
    gone = Client()
    gone.transport.size = 500

    async def watched() -> None:
        watch = asyncio.create_task(UnreadWatch([gone], 0.05).run())
        while not gone.transport.is_aborted:
            await asyncio.sleep(0.01)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch

    asyncio.run(asyncio.wait_for(watched(), 20))
