"""The real `pagemill serve` with a tiny real model: the official client, a hundred streams, leavers, ends."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.harness import Running, until
from tests.server.real_serve import ROOT, Serve, asked_of, ready, started
from tests.server.test_serving import raw_request, send_half_a_body

COMPLETIONS = "/v1/completions"


@pytest.fixture
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def server(serve: Serve) -> Iterator[Running]:
    with asked_of(serve) as running:
        yield running
        running.wait_idle()


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0} | fields
    return client.completions.create(**given)


def test_plain(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"
    assert complete(client).choices[0].text == answer.choices[0].text


def test_streamed_text_is_the_plain_one(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=60).choices[0].text
    pieces = [c.choices[0].text for c in complete(client, max_tokens=60, stream=True)]
    assert "".join(pieces) == whole
    assert len(pieces) > 1


def test_chat_streamed_and_plain(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    fields: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream)
    assert text == whole.choices[0].message.content


def test_three_samples_of_one_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    first = complete(client, n=3, temperature=1, seed=11)
    again = complete(client, n=3, temperature=1, seed=11)
    texts = [c.text for c in first.choices]
    assert len(set(texts)) == 3
    assert [c.text for c in again.choices] == texts


def test_logprobs_and_echo(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2, echo=True, max_tokens=3).choices[0]
    assert choice.text.startswith("hello")
    assert choice.logprobs.tokens[:5] == list("hello")
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == 5 + 3
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_stop_string_cuts_the_text(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40, logit_bias={ord("q"): 2.5}).choices[0].text
    stop = text[3:5]
    at = text.index(stop)
    choice = complete(client, max_tokens=40, logit_bias={ord("q"): 2.5}, stop=stop).choices[0]
    assert (choice.text, choice.finish_reason) == (text[:at], "stop")


def test_official_client_leaves_a_stream(client: openai.OpenAI, server: Running) -> None:
    before = server.metric("request_success_total", finished_reason="abort")
    with complete(client, max_tokens=1900, stream=True) as stream:
        next(iter(stream))
    server.wait_idle()
    assert server.metric("request_success_total", finished_reason="abort") == before + 1


def test_a_hundred_streams_at_once_all_get_the_text_they_get_alone(serve: Serve) -> None:
    async def text(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=f"client {i % 10}", max_tokens=24, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_texts() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{serve.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            alone = [await text(client, i) for i in range(10)]
            together = await asyncio.gather(*(text(client, i) for i in range(100)))
        return alone, list(together)

    alone, together = asyncio.run(all_texts())
    assert together == alone * 10


def test_clients_that_vanish_leave_nothing_running_and_five_aborts(
    serve: Serve, server: Running
) -> None:
    server.wait_idle()
    before = server.metric("request_success_total", finished_reason="abort")
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    for stream in (True, True, True, False, False):
        client = raw_request(serve.port, {**body, "stream": stream})
        if stream:
            assert client.recv(200)
        # Alone on the server, so that what runs is this request and not the one before.
        until(lambda: server.metric("num_requests_running") > 0)
        client.close()
        server.wait_idle()
    assert server.metric("request_success_total", finished_reason="abort") == before + 5
    assert server.metric("kv_cache_usage_perc") == 0


def test_bad_requests_do_not_disturb_the_engine(server: Running) -> None:
    for fields in ({"temperature": "hot"}, {"stop_token_ids": [-1]}, {"prompt": [10**6]}):
        for stream in (False, True):
            body = {"prompt": "x", "stream": stream} | fields
            response = server.post(COMPLETIONS, body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(fields))
    assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_http_process_holds_no_torch_and_the_engine_process_does(serve: Serve) -> None:
    assert "libtorch" not in serve.maps(serve.process.pid)
    assert "libtorch" in serve.maps(serve.engine_pid())


def test_example_of_the_official_client_runs(serve: Serve) -> None:
    script = ROOT / "examples" / "openai_client.py"
    run = subprocess.run(
        [sys.executable, str(script), f"{serve.url}/v1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_log_has_one_line_a_request_and_says_what_was_settled(serve: Serve) -> None:
    httpx.get(f"{serve.url}/v1/models")
    until(lambda: any("GET /v1/models 200" in line for line in serve.log))
    assert not any("GET /ready" in line or "GET /metrics" in line for line in serve.log)
    assert any("max_model_len = 2048" in line for line in serve.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_and_its_engine_with_exit_code_0(
    tiny_llama: Path, number: signal.Signals
) -> None:
    with ready(str(tiny_llama)) as serve:
        engine = serve.engine_pid()
        assert serve.end(number) == 0, serve.log
        assert not Path(f"/proc/{engine}").exists()


def test_signal_to_the_whole_group_lets_a_stream_end_whole_and_waits_for_no_half_body(
    tiny_llama: Path,
) -> None:
    with ready(str(tiny_llama)) as serve:
        half = send_half_a_body(serve.port, COMPLETIONS)
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", serve.url + COMPLETIONS, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.killpg(serve.process.pid, signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert b" 503 " in half.recv(10_000).split(b"\r\n")[0]
        half.close()
        assert serve.process.wait(30) == 0, serve.log


@pytest.mark.parametrize("moment", ["engine started", "port answers"])
def test_signal_while_the_model_loads_ends_both_processes_with_exit_code_0(
    tiny_llama: Path, moment: str
) -> None:
    with started(str(tiny_llama)) as serve:
        until(lambda: bool(serve.children()), timeout_s=60)
        (engine,) = serve.children()
        if moment == "port answers":
            (port,) = _listening_ports(serve.process.pid)
            assert httpx.get(f"http://127.0.0.1:{port}/version", timeout=60).status_code == 200
        assert serve.end(signal.SIGTERM) == 0, serve.log
    until(lambda: not Path(f"/proc/{engine}").exists())


def test_death_of_the_engine_process_ends_the_stream_with_an_error_and_the_server_with_1(
    tiny_llama: Path,
) -> None:
    with ready(str(tiny_llama)) as serve:
        body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", serve.url + COMPLETIONS, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(serve.engine_pid(), signal.SIGKILL)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"error"' in events[-2] and "SIGKILL" in events[-2]
        assert serve.process.wait(30) == 1
        assert any("the engine is gone" in line for line in serve.log)


def test_signal_right_after_the_death_of_the_engine_hides_it_not(tiny_llama: Path) -> None:
    with ready(str(tiny_llama)) as serve:
        os.kill(serve.engine_pid(), signal.SIGKILL)
        assert serve.end(signal.SIGTERM) == 1
        until(lambda: any("gone" in line and "SIGKILL" in line for line in serve.log))


def test_death_of_the_engine_ends_the_server_even_if_clients_neither_send_nor_read(
    tiny_llama: Path,
) -> None:
    with ready(str(tiny_llama)) as serve:
        half = send_half_a_body(serve.port, COMPLETIONS)
        body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        silent = raw_request(serve.port, {**body, "logprobs": 20})
        until(lambda: silent.recv(1) != b"")
        os.kill(serve.engine_pid(), signal.SIGKILL)
        assert serve.process.wait(30) == 1
        half.close()
        silent.close()


def test_model_that_does_not_exist_is_one_line_and_exit_code_1() -> None:
    with started("no/such-model-here") as serve:
        assert serve.process.wait(120) == 1
    until(lambda: any("no/such-model-here" in line for line in serve.log))
    assert not any("Traceback" in line for line in serve.log)


def test_address_in_use_is_one_line_and_exit_code_1(tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "pagemill", "serve", str(tiny_llama)]
        run = subprocess.run(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
        )
    assert run.returncode == 1
    assert f"pagemill: error: cannot listen on 127.0.0.1 port {port}" in run.stderr
    assert "Traceback" not in run.stderr


def test_unix_socket(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with started(str(tiny_llama), "--uds", str(path)) as serve:
        until(path.exists, timeout_s=60)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x") as http:
            assert http.get("/version").status_code == 200
            until(lambda: http.get("/ready").status_code == 200, timeout_s=120)
        assert serve.end(signal.SIGTERM) == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls(tiny_llama: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=str(certificate))
    words = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    with ready(str(tiny_llama), *words) as serve:
        assert serve.url.startswith("https://")
        assert httpx.get(f"{serve.url}/health", verify=trust).status_code == 200
        assert serve.end(signal.SIGTERM) == 0


def test_missing_certificate_is_one_line_and_exit_code_1(tiny_llama: Path) -> None:
    with started(str(tiny_llama), "--ssl-certfile", "nowhere.pem") as serve:
        assert serve.process.wait(60) == 1
    assert "pagemill: error: ssl_certfile" in serve.log[-1]


def _listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on."""
    inodes = {
        os.readlink(fd).removeprefix("socket:[").removesuffix("]")
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if fd.exists() or fd.is_symlink()
    }
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and row[9] in inodes]
    return [int(row[1].partition(":")[2], 16) for row in listening]


def test_speculation_answers_the_same_over_http_and_is_counted(
    tiny_llama: Path, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"prompt": "abcabcabcabc", "max_tokens": 40, "logprobs": 1, "seed": 3}
    sampled = asked | {"temperature": 1}
    plain = [complete(client, **asked).choices[0], complete(client, **sampled).choices[0]]
    config = '{"method": "suffix", "adaptive_length": false}'
    words = ("--served-model-name", "tiny", "--speculative-config", config)
    with (
        ready(str(tiny_llama), *words) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as other,
    ):
        for _ in range(2):  # the second time both answers are known
            told = [complete(other, **asked).choices[0], complete(other, **sampled).choices[0]]
            assert told == plain
        page = httpx.get(f"{running.url}/metrics").text
    (accepted,) = re.findall(
        r"^pagemill:spec_decode_num_accepted_tokens_total{.*} (.*)$", page, re.M
    )
    assert float(accepted) >= 40
