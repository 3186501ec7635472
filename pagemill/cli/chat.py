"""`pagemill chat [MODEL]`: a conversation in the terminal, streamed.

/help lists the commands; Ctrl-C stops the answer that is being written and keeps what was said; Ctrl-D
ends. Lines may also come from a pipe. Prompts and remarks go to stderr, answers to stdout.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import typing
from contextlib import contextmanager, suppress
from typing import Any

from pagemill.cli.arguments import add_fields, add_model, settle
from pagemill.cli.sampling import add_sampling, sampling_values
from pagemill.engine_args import EngineArgs
from pagemill.errors import RequestError
from pagemill.log import setup_logging

if typing.TYPE_CHECKING:
    from pagemill.engine.llm_engine import LLMEngine
    from pagemill.sampling_params import SamplingParams

_HELP = """\
/help            this list
/reset           forget the conversation (the system text stays)
/system [TEXT]   set the system text and forget the conversation; without TEXT: none
/quit            end (so does Ctrl-D)
Ctrl-C           stop the answer being written"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --system, the sampling flags and the engine's."""
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system text of the conversation")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file, or the template itself"
    )
    add_sampling(parser, skip=("n",))
    add_fields(parser, EngineArgs)


def run(args: argparse.Namespace) -> int:
    """Talk until /quit or the end of input."""
    engine_args = settle(args, EngineArgs)
    sampling = sampling_values(args)
    setup_logging()
    from pagemill.engine.llm_engine import LLMEngine
    from pagemill.server.template_source import read_template

    template = read_template(args.chat_template) if args.chat_template is not None else None
    engine = LLMEngine.from_engine_args(engine_args)
    try:
        talk = Conversation(EngineAnswers(engine, sampling, template), system=args.system)
        _loop(talk, interactive=sys.stdin.isatty())
    finally:
        engine.shutdown()
    return 0


class Answers(typing.Protocol):
    """What a conversation needs of a model."""

    def stream(self, messages: list[dict[str, Any]]) -> typing.Iterator[str]:
        """Yield an answer piece by piece; closing the iterator stops it."""
        ...


class EngineAnswers:
    """Answers from an LLMEngine in this process, one at a time."""

    def __init__(
        self, engine: LLMEngine, sampling: dict[str, Any], chat_template: str | None = None
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._template = chat_template
        self._count = 0

    def stream(self, messages: list[dict[str, Any]]) -> typing.Iterator[str]:
        """Yield the answer's text as it comes; raises RequestError for what the model refuses."""
        tokenizer = self._engine.get_tokenizer()
        prompt = tokenizer.apply_chat_template(messages, chat_template=self._template)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        self._count += 1
        request_id = f"chat-{self._count}"
        self._engine.add_request(request_id, {"prompt_token_ids": ids}, self._params())
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.error:
                        raise RequestError(output.error)
                    yield output.outputs[0].text
        finally:
            self._engine.abort_request(request_id)
            while self._engine.has_unfinished_requests():
                self._engine.step()

    def _params(self) -> SamplingParams:
        from pagemill.sampling_params import RequestOutputKind, SamplingParams

        defaults = dict(self._engine.config.model.generation_config)
        values = {"max_tokens": None, **defaults, **self._sampling}
        return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)


class Conversation:
    """The turns so far, and the lines that change them."""

    def __init__(self, answers: Answers, *, system: str | None = None) -> None:
        self._answers = answers
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system text."""
        self.messages = []
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def handle(self, line: str) -> bool:
        """Act on one line of input; return False when the conversation ends."""
        text = line.strip()
        if not text:
            return True
        if text.startswith("/"):
            return self._command(text)
        self._ask(text)
        return True

    def _command(self, text: str) -> bool:
        word, _, rest = text.partition(" ")
        if word in ("/quit", "/exit"):
            return False
        if word == "/reset":
            self.reset()
            _remark("conversation forgotten")
        elif word == "/system":
            self._system = rest.strip() or None
            self.reset()
            _remark("system text set" if self._system else "system text removed")
        elif word == "/help":
            _remark(_HELP)
        else:
            _remark(f"unknown command {word}; /help lists them")
        return True

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        stream = self._answers.stream(self.messages)
        try:
            with _interrupts() as interrupted:
                for piece in stream:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
                    if interrupted.is_set():
                        break
            print(flush=True)
            if interrupted.is_set():
                _remark("stopped")
        except RequestError as error:
            # The turn that was refused is taken back, so that the next one is not refused with it.
            self.messages.pop()
            _remark(f"error: {error}")
            return
        finally:
            _close(stream)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


@contextmanager
def _interrupts() -> typing.Iterator[threading.Event]:
    """Note Ctrl-C instead of raising: an exception inside a step would leave the engine half way."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _close(stream: typing.Iterator[str]) -> None:
    if isinstance(stream, typing.Generator):
        stream.close()


def _loop(talk: Conversation, *, interactive: bool) -> None:
    """Read lines until the end of input. Ctrl-C at the prompt drops the line being typed."""
    if interactive:
        with suppress(ImportError):  # line editing and history, where Python was built with them
            import readline  # noqa: F401
        _remark("/help lists the commands; Ctrl-D ends")
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                _remark("")
            return
        except KeyboardInterrupt:
            _remark("" if interactive else "interrupted")
            if not interactive:
                raise
            continue
        if not talk.handle(line):
            return


def _remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
