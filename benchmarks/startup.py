"""How long things take to begin: `import pagemill`, `pagemill --help`, a server that answers.

    python -m benchmarks.startup

Medians over several runs after one warm-up; torch's own import is measured beside them.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from benchmarks import models

ROUNDS = 5


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


def main() -> None:
    """Measure and print."""
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


if __name__ == "__main__":
    main()
