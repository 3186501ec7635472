"""The command line: `main`, and the table of commands.

A command is one file of this room with `add_arguments(parser)` and `run(args) -> int`, and one line in
`COMMANDS`. Only the chosen command's file is imported, so `pagemill --help` costs nothing. Exit codes:
0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from pagemill.cli.streams import drop_output, prepare_streams
from pagemill.errors import PagemillError
from pagemill.version import __version__

# Name as typed -> (module, what it does). A name of two words is a command of a group.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("pagemill.cli.serve", "serve a model over HTTP (OpenAI's API)"),
    "generate": ("pagemill.cli.generate", "continue prompts and print the text"),
    "chat": ("pagemill.cli.chat", "talk to a model in the terminal"),
    "plan": ("pagemill.cli.plan", "say what a model needs and what fits, before loading it"),
    "pull": ("pagemill.cli.pull", "fetch a named model into the cache"),
    "bench latency": ("pagemill.cli.bench_latency", "time one batch from prompt to last token"),
    "bench throughput": ("pagemill.cli.bench_throughput", "tokens a second over many requests"),
    "collect-env": ("pagemill.cli.collect_env", "print what a bug report needs"),
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse, whose own printing keeps quiet about a full disk or a reader that is gone."""

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except PagemillError as error:
        print(f"pagemill: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # the reader of our output went away: `pagemill ... | head`
        drop_output()
        return EXIT_FAILED
    except OSError as error:
        print(f"pagemill: error: cannot read or write: {error}", file=sys.stderr)
        drop_output()
        return EXIT_FAILED


def _dispatch(words: list[str]) -> int:
    try:
        return _run(words)
    except SystemExit as end:  # argparse ends --help with 0 and wrong usage with 2
        return end.code if isinstance(end.code, int) else EXIT_FAILED


def _run(words: list[str]) -> int:
    name = _command_name(words)
    if name is None:
        return _top_level(words)
    module = importlib.import_module(COMMANDS[name][0])
    parser = _Parser(
        prog=f"pagemill {name}",
        usage="%(prog)s [arguments]; see %(prog)s --help",
        description=COMMANDS[name][1],
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args, unknown = parser.parse_known_args(words[len(name.split()) :])
    if unknown:
        parser.error(_unknown_flag(parser, unknown[0]))
    code: int = module.run(args)
    return code


def _command_name(words: list[str]) -> str | None:
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            return name
    return None


def _top_level(words: list[str]) -> int:
    """Answer what is no command: --help, --version, a group's name, a mistake."""
    first = words[0] if words else "--help"
    group = [name for name in COMMANDS if name.split()[0] == first and " " in name]
    if first in ("-h", "--help"):
        print(_help_text(list(COMMANDS)))
        return 0
    if first in ("-V", "--version"):
        print(f"pagemill {__version__}")
        return 0
    if group:
        if len(words) > 1 and words[1] in ("-h", "--help"):
            print(_help_text(group))
            return 0
        said = " ".join(words[:2])
        print(f"pagemill: error: {said!r} is incomplete or unknown", file=sys.stderr)
        print(_help_text(group), file=sys.stderr)
        return EXIT_USAGE
    known = sorted({name.split()[0] for name in COMMANDS})
    near = difflib.get_close_matches(first, known, n=1, cutoff=0.0)[0]
    print(
        f"pagemill: error: unknown command {first!r}; did you mean {near!r}? "
        f"Known: {', '.join(known)}",
        file=sys.stderr,
    )
    return EXIT_USAGE


def _help_text(names: list[str]) -> str:
    width = max(len(name) for name in names)
    lines = ["usage: pagemill COMMAND [arguments]", "", "commands:"]
    lines += [f"  {name:<{width}}  {COMMANDS[name][1]}" for name in names]
    lines += [
        "",
        "pagemill COMMAND --help says what a command takes; --version prints the version.",
    ]
    return "\n".join(lines)


def _unknown_flag(parser: argparse.ArgumentParser, word: str) -> str:
    known = [flag for action in parser._actions for flag in action.option_strings]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    near = difflib.get_close_matches(word.split("=")[0], known, n=1, cutoff=0.0)
    return f"unknown flag {word!r}; did you mean {near[0]!r}?"
