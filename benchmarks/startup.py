"""How long things take to begin: `import pagemill`, `pagemill --help`, an `LLM`, a server that answers.

    python -m benchmarks.startup [--only-llm]

Medians over several runs after one warm-up; torch's own import is measured beside them. An `LLM` is ready
so many seconds after torch was imported, its files in the page cache.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from benchmarks import models, random_models

ROUNDS = 5
_LLM_ROUNDS = 3
_LLM = """
import sys, time
import torch
start = time.perf_counter()
from pagemill import LLM
LLM(sys.argv[1], dtype=sys.argv[2], max_model_len=2048)
print(time.perf_counter() - start)
"""


def median_wall_s(command: list[str]) -> float:
    """Return the median wall seconds of a command over ROUNDS runs, after one that is not counted."""
    walls = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        walls.append(time.perf_counter() - start)
    return statistics.median(walls[1:])


def server_ready_s(folder: str) -> float:
    """Start `pagemill serve`, wait for /ready, stop it; return the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pagemill", "serve", folder, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while True:
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with code {server.returncode}")
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1).close()
                    return time.perf_counter() - start
                except (urllib.error.URLError, OSError):
                    time.sleep(0.02)
        finally:
            server.terminate()
            server.wait()


def llm_ready_s(folder: str, dtype: str) -> list[float]:
    """Return the seconds from `import torch` to a ready `LLM`, sorted, after one run that is not counted."""
    times = []
    for _ in range(_LLM_ROUNDS + 1):
        command = [sys.executable, "-c", _LLM, folder, dtype]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        times.append(float(done.stdout.split()[-1]))
    return sorted(times[1:])


def measure_llms() -> None:
    """Print the times of the two models that a target speaks of."""
    smollm2, llama = str(models.smollm2_folder()), str(random_models.model_folder("llama-1b"))
    for name, folder, dtype in (
        ("SmolLM2-135M", smollm2, "bfloat16"),
        ("SmolLM2-135M", smollm2, "float32"),
        ("Llama-3.2-1B's shape", llama, "bfloat16"),
    ):
        times = llm_ready_s(folder, dtype)
        print(
            f"LLM ready               {statistics.median(times):6.3f} s after import torch "
            f"({times[0]:.2f}-{times[-1]:.2f}; {name}, {dtype})",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only-llm", action="store_true", help="leave the other figures out")
    if parser.parse_args().only_llm:
        measure_llms()
        return
    python = sys.executable
    folder = str(models.smollm2_gguf())
    bare = median_wall_s([python, "-c", "pass"])
    print(f"python -c pass          {bare:6.3f} s")
    print(
        f"import pagemill         {median_wall_s([python, '-c', 'import pagemill']) - bare:6.3f} s (less the interpreter)"
    )
    print(f"pagemill --help         {median_wall_s([python, '-m', 'pagemill', '--help']):6.3f} s")
    print(
        f"import torch            {median_wall_s([python, '-c', 'import torch']) - bare:6.3f} s (less the interpreter)"
    )
    for what, path in (("GGUF", folder), ("safetensors, bf16", str(models.smollm2_folder()))):
        ready = statistics.median(server_ready_s(path) for _ in range(3))
        print(f"serve ready             {ready:6.3f} s ({os.path.basename(path)}, {what})")
    measure_llms()


if __name__ == "__main__":
    main()
