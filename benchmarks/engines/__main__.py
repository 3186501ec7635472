"""The engine's end of the pipe: `python -m benchmarks.engines MODULE OPTIONS`.

Loads benchmarks/engines/MODULE.py with OPTIONS (JSON), says so in a JSON line, then answers each line
"case round" with the figures of that turn as a JSON line. Ends when its input does. Started by
`benchmarks.engines.process`, in the engine's own virtual environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys

from benchmarks import work
from benchmarks.engines.base import Engine, EngineOptions


def main() -> None:
    """Serve lines until the input ends."""
    # A process group of its own can be stopped as a whole, whatever an engine starts. In the caller's
    # session still, so that the kernel ends a stopped engine when its caller is gone.
    os.setpgid(0, 0)
    module, options = sys.argv[1], EngineOptions(**json.loads(sys.argv[2]))
    # Libraries print, some of them from C: answers get a descriptor that nobody else knows.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        engine: Engine = importlib.import_module(f"benchmarks.engines.{module}").load(options)
        print(json.dumps({"version": engine.version}), file=answers, flush=True)
        for line in sys.stdin:
            case, round = line.split()
            jobs = work.make(case, round)
            turn = work.figures(case, jobs, engine.run(jobs))
            print(json.dumps(turn), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # some engines hang in their own clean-up, and there is nothing left to keep


if __name__ == "__main__":
    main()
