"""Everything around the answers: clients that leave, keys, probes, defaults, the engine's death."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pagemill.errors import ConfigError
from pagemill.server.listening import listen
from pagemill.server.serving import Serving
from pagemill.server.settings import ServerArgs
from pagemill.version import __version__
from tests.server.harness import MODEL, Running, running_app, running_server, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "dots", "max_tokens": 400}


@pytest.fixture
def slow() -> Iterator[Running]:
    """A server whose steps take a moment, with counters at zero."""
    with running_server() as running:
        running.executor.delay_s = 0.005
        yield running


def raw_request(port: int, body: dict[str, Any], path: str = COMPLETIONS) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    send_request(client, body, path)
    return client


def send_request(client: socket.socket, body: dict[str, Any], path: str = COMPLETIONS) -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    client.sendall(head.encode() + content)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_client_that_vanishes_frees_its_blocks(slow: Running, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 400, "stream": stream, "n": 2, "temperature": 1}
    body |= (
        {"prompt": "dots"}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "dots"}]}
    )
    client = raw_request(slow.port, body, path)
    if stream:
        assert client.recv(100)
    until(lambda: slow.metric("num_requests_running") > 0)
    client.close()
    slow.wait_idle()
    assert slow.metric("request_success_total", finished_reason="abort") == 1
    assert len(slow.executor.steps) < 300


def test_client_that_vanishes_ends_all_its_prompts(slow: Running) -> None:
    client = raw_request(slow.port, {**LONG, "prompt": ["dots", "more", "most"]})
    until(lambda: slow.metric("num_requests_running") >= 3)
    client.close()
    slow.wait_idle()
    assert slow.metric("request_success_total", finished_reason="abort") == 3


def test_five_aborts_show_as_five_and_started_is_the_sum_of_all_ends(slow: Running) -> None:
    clients = [raw_request(slow.port, {**LONG, "stream": True}) for _ in range(5)]
    for client in clients:
        assert client.recv(100)
        client.close()
    assert slow.post(COMPLETIONS, {"prompt": "say:a"}).status_code == 200
    slow.wait_idle()
    assert slow.metric("request_success_total", finished_reason="abort") == 5
    assert slow.metric("request_success_total") == 6


def test_official_client_leaves_a_stream_early(slow: Running) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="x", max_retries=0) as client:
        with client.completions.create(model=MODEL, stream=True, **LONG) as stream:  # type: ignore[call-overload]
            next(iter(stream))
        slow.wait_idle()
    assert slow.metric("request_success_total", finished_reason="abort") == 1


def test_many_streams_at_once_get_their_own_texts(server: Running) -> None:
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        chunks = server.chunks(COMPLETIONS, {"prompt": f"say:client {i}", "max_tokens": 30})
        texts[i] = "".join(c["choices"][0]["text"] for c in chunks)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: f"client {i}" for i in range(30)}


def test_api_key_is_asked_for_everywhere_but_at_the_probes() -> None:
    with running_server(ServerArgs(api_key=["secret", "other"])) as server:
        for path in ("/v1/models", "/v1/nothing"):
            assert server.get(path).status_code == 401
        refused = server.post(COMPLETIONS, {"prompt": "say:a"})
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        for wrong in ("Bearer secre", "Basic secret", "secret", "Bearer", "Bearer sécret"):
            header = {"Authorization": wrong.encode()}
            response = server.http.get("/v1/models", headers=header)
            assert response.status_code == 401
        for key in ("secret", "other"):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
                assert client.models.list().data[0].id == MODEL
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert server.get(path).status_code == 200


def test_models_name_what_is_served(server: Running, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert server.get("/v1/models/other").status_code == 404


def test_served_name_replaces_the_model_s() -> None:
    with running_server(served_model_name="org/nice") as server:
        assert server.get("/v1/models").json()["data"][0]["id"] == "org/nice"
        assert server.get("/v1/models/org/nice").status_code == 200
        answer = server.post(COMPLETIONS, {"prompt": "say:a", "model": "org/nice"}).json()
        assert answer["model"] == "org/nice"
        assert server.post(COMPLETIONS, {"prompt": "x", "model": MODEL}).status_code == 404


def test_defaults_of_the_model_fill_absent_fields_and_are_told() -> None:
    defaults = {"temperature": 0.0, "max_tokens": 3}
    with running_server(generation_config=defaults) as server:
        assert server.post(COMPLETIONS, {"prompt": "x"}).json()["choices"][0]["text"] == "..."
        four = {"prompt": "x", "max_tokens": 4}
        assert server.post(COMPLETIONS, four).json()["choices"][0]["text"] == "...."
        greedy = server.post(COMPLETIONS, {"prompt": "x", "n": 2})
        assert greedy.json()["error"]["param"] == "n"
        card = server.get("/v1/models").json()["data"][0]
        assert card["default_sampling_params"] == defaults


def test_probes_and_version(server: Running) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/ready").json()["status"] == "ready"
    assert server.get("/version").json() == {"version": __version__}
    metrics = server.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "pagemill:num_requests_running" in metrics.text


def test_before_the_engine_is_there_everything_but_the_version_is_503() -> None:
    serving = Serving(ServerArgs(), MODEL)
    with running_app(serving) as port:
        url = f"http://127.0.0.1:{port}"
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            assert httpx.get(url + path).status_code == 503
        answer = httpx.post(url + COMPLETIONS, json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
        assert answer.headers["retry-after"] == "1"
        assert httpx.get(url + "/version").status_code == 200


def test_death_of_the_engine_ends_open_streams_with_an_error_event_and_is_503() -> None:
    with running_server() as server:
        server.executor.delay_s = 0.005
        server.executor.fail_at = 20
        response = server.post(COMPLETIONS, {**LONG, "stream": True})
        events = [e for e in response.text.split("\n\n") if e]
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert "the script ends here" in error["message"]
        for path in ("/health", "/ready"):
            assert server.get(path).status_code == 503
        answer = server.post(COMPLETIONS, {"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_the_engine_cannot_finish_is_an_error_for_it_alone(stream: bool) -> None:
    with running_server() as server:
        server.executor.errors[tuple(b"bad")] = "logits are not finite in float32"
        response = server.post(COMPLETIONS, {"prompt": "bad", "stream": stream})
        assert "logits are not finite" in response.text
        if not stream:
            assert response.status_code == 500
        good = server.post(COMPLETIONS, {"prompt": "say:good"})
        assert good.json()["choices"][0]["text"] == "good"


def test_browsers_may_call_from_the_allowed_origins() -> None:
    with running_server(ServerArgs(allowed_origins=["https://a.example"], api_key=["k"])) as server:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        preflight = server.http.options(COMPLETIONS, headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = server.http.options(COMPLETIONS, headers={**headers, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_root_path_of_a_proxy_is_taken_into_account() -> None:
    with running_server(ServerArgs(root_path="/llm", api_key=["k"])) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models").status_code == 401


def test_each_request_is_one_log_line_unless_that_is_off(
    own_log: pytest.LogCaptureFixture,
) -> None:
    own_log.set_level(logging.INFO, logger="pagemill")
    with running_server() as server:
        server.post(COMPLETIONS, {"prompt": "say:a"})
        until(lambda: any("POST /v1/completions 200" in m for m in own_log.messages))
    own_log.clear()
    with running_server(ServerArgs(disable_log_requests=True)) as server:
        server.post(COMPLETIONS, {"prompt": "say:a"})
    assert not any("/v1/completions" in m for m in own_log.messages)


def test_address_in_use_is_an_error_that_names_the_port() -> None:
    from pagemill.errors import ConfigError

    with listen("127.0.0.1", 0) as bound:  # its server does not serve yet
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*--port"):
            listen("127.0.0.1", port)


def test_tokenize_and_detokenize_are_each_other_s_inverse(server: Running) -> None:
    tokens = server.post("/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert tokens["tokens"] == list("héllo".encode())
    assert tokens["token_strs"][0] == "h"
    assert tokens["max_model_len"] == 512
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "héllo"}


def test_client_that_leaves_amid_its_body_is_a_499_and_no_error(
    own_log: pytest.LogCaptureFixture,
) -> None:
    own_log.set_level(logging.INFO, logger="pagemill")
    with running_server() as server:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            send_half_a_body(server.port, path).close()
            until(lambda path=path: any(f"POST {path} 499" in m for m in own_log.messages))  # type: ignore[misc]
        assert server.post(COMPLETIONS, {"prompt": "say:a"}).status_code == 200
    assert not [record for record in own_log.records if record.levelno >= logging.ERROR]


def test_line_breaks_in_a_path_forge_no_log_line(own_log: pytest.LogCaptureFixture) -> None:
    own_log.set_level(logging.INFO, logger="pagemill")
    with running_server() as server:
        server.get("/v1/x%0aINFO%20forged%1b[31m")
        until(lambda: any("forged" in m for m in own_log.messages))
    (line,) = (m for m in own_log.messages if "forged" in m)
    assert line.isprintable()


def send_half_a_body(port: int, path: str) -> socket.socket:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(head.encode() + b'{"prompt": ')
    return client


def test_long_texts_and_long_lists_of_ids_go_through_both_ways(server: Running) -> None:
    text = "héllo " * 2000
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert tokens == list(text.encode())
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for wrong in (-1, 10**6):
        refused = server.post("/detokenize", {"tokens": [*tokens, wrong]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    for prompt in (text, tokens):
        refused = server.post(COMPLETIONS, {"prompt": prompt})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert str(len(tokens)) in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_request_whose_time_is_over_gets_504(slow: Running, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 400, "request_timeout": 0.05}
    body |= (
        {"prompt": "dots"}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "dots"}]}
    )
    answer = slow.post(path, body)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert "request_timeout is 0.05 s" in error["message"]
    *_, last = slow.chunks(path, body)
    assert last["error"]["code"] == "deadline_exceeded"
    slow.wait_idle()
    assert slow.metric("request_deadline_exceeded_total", deadline="end") == 2


def test_server_s_own_timeouts_hold_where_a_body_has_none() -> None:
    with running_server(ServerArgs(start_timeout=1e-6, request_timeout=100.0)) as server:
        assert server.post(COMPLETIONS, {"prompt": "say:x"}).status_code == 504
        own = {"prompt": "say:x", "start_timeout": 100}
        assert server.post(COMPLETIONS, own).status_code == 200


def tenants_of(serving: Serving, calls: list[tuple[str, dict[str, str]]], port: int) -> list[str]:
    """Send a request for each (user, headers); return the tenants that the engine was told."""
    seen: list[str] = []
    stream = serving.engine.stream

    def watched(request: Any) -> Any:
        seen.append(request.tenant)
        return stream(request)

    serving.engine.stream = watched  # type: ignore[method-assign]
    for user, headers in calls:
        body = {"prompt": "say:x", "user": user}
        url = f"http://127.0.0.1:{port}{COMPLETIONS}"
        assert httpx.post(url, json=body, headers=headers).status_code == 200
    return seen


def test_tenant_is_the_api_key_where_there_are_several_and_else_the_user() -> None:
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("one", "two")}
    with running_server(ServerArgs(api_key=["one", "two"])) as server:
        calls = [("u", keys["one"]), ("v", keys["two"])]
        assert tenants_of(server.serving, calls, server.port) == ["one", "two"]
    with running_server(ServerArgs(api_key=["one"])) as server:
        calls = [("u", keys["one"]), ("", keys["one"])]
        assert tenants_of(server.serving, calls, server.port) == ["u", ""]
    with running_server() as server:
        assert tenants_of(server.serving, [("u", {})], server.port) == ["u"]


@pytest.mark.parametrize("field", ["start_timeout", "request_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_server_timeout_is_greater_than_0(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} is"):
        ServerArgs(**{field: value}).check()
