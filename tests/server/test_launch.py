"""A server that is told to end does, whatever its clients do, and tells those that it can why."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import signal
import socket
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest

from pagemill.errors import ConfigError
from pagemill.server.launch import _Server
from pagemill.server.listening import listen
from pagemill.server.serving import Serving
from pagemill.server.settings import ServerArgs
from pagemill.server.template_source import read_template
from tests.server.harness import until
from tests.server.real_serve import ready
from tests.server.test_serving import COMPLETIONS, raw_request, send_half_a_body
from tests.server.test_unread import long_stream, unreading_client


def test_one_signal_ends_the_server_whatever_the_clients_do(
    tiny_llama: Path, tmp_path: Path
) -> None:
    tier = tmp_path / "tier"
    words = ("--shutdown-timeout", "0.3", "--kv-cache-file", str(tier))
    with ready(str(tiny_llama), *words, "--preemption-mode", "swap") as serve:
        engine = serve.engine_pid()
        known = {"prompt": "abc" * 100, "max_tokens": 4}
        keeps_alive = httpx.Client(base_url=serve.url, timeout=60)
        assert keeps_alive.post(COMPLETIONS, json=known).status_code == 200
        body = long_stream(max_tokens=1900, n=2, temperature=1)
        silent = unreading_client(serve.port, body)
        half = send_half_a_body(serve.port, COMPLETIONS)
        head = socket.create_connection(("127.0.0.1", serve.port), timeout=20)
        head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-")
        whole = raw_request(serve.port, {**body, "stream": False, "stream_options": None})
        with httpx.stream("POST", serve.url + COMPLETIONS, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            serve.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"code":"shutting_down"' in events[-2] and "--shutdown-timeout" in events[-2]
        answers = [client.recv(10_000) for client in (half, whole)]
        assert [answer.split(b"\r\n")[0] for answer in answers] == [
            b"HTTP/1.1 503 Service Unavailable"
        ] * 2
        assert head.recv(100) == b""
        assert serve.process.wait(60) == 0, serve.log
        for client in (silent, half, head, whole, keeps_alive):
            client.close()
    until(lambda: not Path(f"/proc/{engine}").exists())
    assert not any("Traceback" in line for line in serve.log), serve.log
    with tier.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it open
    assert tier.stat().st_size > 4096  # the known prompt's blocks


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_shutdown_timeout_is_a_number_of_seconds(value: float) -> None:
    ServerArgs(shutdown_timeout=0).check()
    with pytest.raises(ConfigError, match="shutdown_timeout is"):
        ServerArgs(shutdown_timeout=value).check()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_send_timeout_is_greater_than_0(value: float) -> None:
    with pytest.raises(ConfigError, match="send_timeout is"):
        ServerArgs(send_timeout=value).check()


@pytest.mark.parametrize("field", ["uds", "ssl_keyfile", "ssl_certfile"])
def test_a_name_that_no_file_can_have_is_refused_by_field(field: str) -> None:
    given = {"ssl_certfile": "c"} if field == "ssl_keyfile" else {}
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match=f"^{field} is .*; it must be a path"):
            ServerArgs(**{**given, field: name}).check()


def test_names_that_mean_nothing_to_the_system_are_refused_by_field() -> None:
    for template in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="^chat_template .* cannot be read"):
            read_template(template)
    for host in ("a\0b", "a..b", "\ud800"):
        with pytest.raises(ConfigError, match="^host is "):
            listen(host, 0)


def test_a_port_that_is_taken_while_the_server_starts_is_named_with_what_to_do() -> None:
    async def fails() -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    async def body(settings: ServerArgs, bound: socket.socket | None) -> None:
        server = _Server(Serving(settings, "m"), Future(), bound)
        await server._ended(asyncio.ensure_future(fails()))

    at = ServerArgs(host="127.0.0.1", port=8123)
    words = "^cannot listen on 127.0.0.1 port 8123: Address already in use; choose another --port"
    with listen("127.0.0.1", 0) as bound, pytest.raises(ConfigError, match=words):
        asyncio.run(body(at, bound))
    with pytest.raises(ConfigError, match="^cannot listen on a/socket: .*; choose another --uds"):
        asyncio.run(body(ServerArgs(uds="a/socket"), None))
