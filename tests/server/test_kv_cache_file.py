"""A server with a cache file is ended, killed, and given a damaged file: the next one still answers right."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.server.harness import until
from tests.server.real_serve import Serve, ready, started

PROMPT = "".join(chr(97 + i * i % 23) for i in range(600))  # as many tokens
OTHER = "".join(chr(97 + i * i * i % 19) for i in range(600))


def words(tiny_llama: Path, path: Path) -> list[str]:
    # Whether copying pays is measured at start, and with a model so small that is close.
    return [str(tiny_llama), "--kv-cache-file", str(path), "--preemption-mode", "swap"]


def ask(serve: Serve, prompt: str) -> tuple[Any, int]:
    """Return the answer to a prompt, and how many of its tokens were found in the cache."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 1, "seed": 1}
    response = httpx.post(f"{serve.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill(serve: Serve) -> None:
    """Kill the server and its engine at once."""
    engine = serve.engine_pid()
    os.killpg(serve.process.pid, signal.SIGKILL)
    serve.process.wait(30)
    until(lambda: not Path(f"/proc/{engine}").exists())


def test_a_restarted_server_answers_known_prompts_whatever_ended_the_one_before(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tier"
    given = words(tiny_llama, path)
    with ready(*given) as serve:
        first, num_found = ask(serve, PROMPT)
        assert num_found == 0
        assert serve.end(signal.SIGTERM) == 0, serve.log
    with ready(*given) as serve:
        again, num_found = ask(serve, PROMPT)
        assert again == first
        assert 500 < num_found < 600
        other, num_found = ask(serve, OTHER)
        assert num_found == 0
        kill(serve)
    with ready(*given) as serve:
        for prompt, expected in ((PROMPT, first), (OTHER, other)):
            answer, num_found = ask(serve, prompt)
            assert answer == expected
            assert 500 < num_found < 600
        assert serve.end(signal.SIGTERM) == 0, serve.log

    data = bytearray(path.read_bytes())
    for at in range(4096 + 200, len(data), 512):  # something of every block
        data[at] ^= 1
    path.write_bytes(data)
    with ready(*given) as serve:
        for prompt, expected in ((PROMPT, first), (OTHER, other)):
            assert ask(serve, prompt)[0] == expected
        assert serve.end(signal.SIGTERM) == 0, serve.log
    damage = [line for line in serve.log if "damaged" in line]
    assert damage and len(damage) <= 2, serve.log  # one line a step that met any, not one a block

    path.write_bytes(b"something else" + bytes(data))
    with started(*given) as serve:
        assert serve.process.wait(120) == 1
    until(lambda: any("is not a file of pagemill's" in line for line in serve.log))
    assert not any("Traceback" in line for line in serve.log)
    assert path.read_bytes().startswith(b"something else")


def test_a_file_of_another_engine_is_refused_and_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "tier"
    with ready(*words(tiny_llama, path), "--dtype", "float32") as serve:
        assert serve.end(signal.SIGTERM) == 0, serve.log
    with started(*words(tiny_llama, path), "--dtype", "bfloat16") as serve:
        assert serve.process.wait(120) == 1
    until(lambda: any("belongs to another engine: its dtype" in line for line in serve.log))
