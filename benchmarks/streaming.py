"""Streams of the real server: tokens a second, gaps between tokens, and the processor time of each side.

    python -m benchmarks.streaming [--clients 1,16,64] [--tokens 128] [--rounds 3] [--root DIR --root DIR]
        [--words "" --words "--distributed-executor-backend mp"]

Starts `pagemill serve` with SmolLM2-135M, once for each source tree (`--root`, default this one) and each
`--words` that serve gets besides, all of them before the first figure; between its turns a server is stopped with SIGSTOP. A round is one turn of each: so many
clients, in one process with plain sockets, each stream a completion of so many tokens, all at once. Gaps are
between two events of one stream, first tokens left out. Processor time is that of the HTTP and of the engine's process, a
token. Printed are medians over the rounds, of the 99th percentile the least too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import models

_READY = re.compile(rb"ready: serving \S+ on http://127\.0\.0\.1:(\d+)")
_HERE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Figures:
    """One turn."""

    tokens_per_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    http_ms: float  # processor time a token
    engine_ms: float


class Server:
    """A running `pagemill serve` of one source tree."""

    def __init__(self, root: Path, threads: int, extra: Sequence[str]) -> None:
        command = [
            sys.executable, "-m", "pagemill", "serve", str(models.smollm2_folder()), "--host", "127.0.0.1", "--port", "0",
            "--num-threads", str(threads), "--dtype", "bfloat16", "--max-model-len", "2048",
            "--kv-cache-memory-bytes", "1GiB", "--disable-log-requests", *extra,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert self.process.stdout is not None
        log = b""
        while (match := _READY.search(log)) is None:
            line = self.process.stdout.readline()
            assert line, log.decode()
            log += line
        self.port = int(match[1])
        self.children = _descendants(self.process.pid)

    def pause(self, number: signal.Signals) -> None:
        """Stop both processes, or let them go on."""
        for pid in (self.process.pid, *self.children):
            os.kill(pid, number)

    def seconds(self) -> tuple[float, float]:
        """Return the processor time so far of HTTP and engine."""
        return _seconds(self.process.pid), sum(_seconds(pid) for pid in self.children)

    def end(self) -> None:
        """End the server in good order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def _descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for path in tasks for child in path.read_text().split()]
    return own + [one for child in own for one in _descendants(child)]


def _seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _stream(port: int, index: int, num_tokens: int) -> list[float]:
    """Return the moments at which the tokens of one stream came."""
    body = json.dumps(
        {"prompt": f"{index}: once upon a time", "max_tokens": num_tokens, "ignore_eos": True,
         "stream": True, "temperature": 0, "return_token_ids": True}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    moments: list[float] = []
    rest = b""
    while b"[DONE]" not in rest:
        data = await reader.read(65536)
        assert data, rest
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        moments += [now] * sum(b'"choices"' in one for one in events)
        rest = events[-1] if events and b"[DONE]" in events[-1] else rest
    writer.close()
    return moments


async def _streams(port: int, num_clients: int, num_tokens: int) -> list[list[float]]:
    return await asyncio.gather(*(_stream(port, i, num_tokens) for i in range(num_clients)))


def turn(server: Server, num_clients: int, num_tokens: int) -> Figures:
    """Serve all clients once."""
    before, start = server.seconds(), time.perf_counter()
    streams = asyncio.run(_streams(server.port, num_clients, num_tokens))
    wall = time.perf_counter() - start
    http, engine = (b - a for a, b in zip(before, server.seconds(), strict=True))
    gaps = [1e3 * (b - a) for s in streams for a, b in zip(s[1:], s[2:], strict=False)]
    cuts = statistics.quantiles(gaps, n=100)
    total = num_clients * num_tokens
    return Figures(total / wall, cuts[49], cuts[98], 1e3 * http / total, 1e3 * engine / total)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="1,16,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--root", type=Path, action="append")
    parser.add_argument("--words", action="append", help="more words for serve")
    arguments = parser.parse_args()
    kinds = [(r, w) for r in arguments.root or [_HERE] for w in arguments.words or [""]]
    servers: list[Server] = []
    try:
        for root, words in kinds:
            servers.append(Server(root.resolve(), arguments.threads, words.split()))
            turn(servers[-1], 4, 16)
            servers[-1].pause(signal.SIGSTOP)
        for num_clients in (int(word) for word in arguments.clients.split(",")):
            results: list[list[Figures]] = [[] for _ in servers]
            for _ in range(arguments.rounds):
                for server, figures in zip(servers, results, strict=True):
                    server.pause(signal.SIGCONT)
                    figures.append(turn(server, num_clients, arguments.tokens))
                    server.pause(signal.SIGSTOP)
            for (root, words), figures in zip(kinds, results, strict=True):
                print(f"{num_clients:4d} clients  {_line(figures)}  {root} {words}", flush=True)
    finally:
        for server in servers:
            server.pause(signal.SIGCONT)
            server.end()


def _line(figures: list[Figures]) -> str:
    def middle(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in figures))

    best = min(one.gap_p99_ms for one in figures)
    return (
        f"{middle('tokens_per_s'):7.1f} tokens/s  gap p50 {middle('gap_p50_ms'):6.2f} "
        f"p99 {middle('gap_p99_ms'):6.2f} (least {best:6.2f}) ms  processor a token: "
        f"HTTP {middle('http_ms'):5.3f}, engine {middle('engine_ms'):5.3f} ms"
    )


if __name__ == "__main__":
    main()
