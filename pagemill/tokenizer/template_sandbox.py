"""The jinja2 environment of chat templates, with limits on what a template may spend.

A template may come with a request, so a loop without end in it must not hold up the server. jinja2's
sandbox closes the doors to Python and limits `range`; it does not limit time or memory. Here every
rendering has a budget: loops, calls and the text that is built take from it, and a template that has
spent it ends with an error. Loops and `~` are counted by rewriting the parsed template, the rest
through hooks of the sandbox. Used by `chat_template.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000  # of a rendering: loop turns, calls, and text at so many characters a step:
CHARACTERS_PER_STEP = 20
STEPS_PER_CALL = 5
MAX_LENGTH = 10_000_000  # of one text or list that a template builds
MAX_POWER_BITS = 100_000

_LONG_NUMBER = re.compile(r"\d{7}")
_FORMAT_METHODS = ("format", "format_map")
_BUDGET = "_pagemill_budget"
_COUNTED = "_pagemill_counted"
_JOINED = "_pagemill_joined"


class Budget:
    """What one rendering has left."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Take steps from the budget; an empty one raises OverflowError."""
        self._left -= steps
        if self._left < 0:
            raise OverflowError(
                f"it runs on and on: over {MAX_STEPS} steps (loop turns, calls, text)"
            )

    def spend_text(self, length: int) -> None:
        """Take what a text of `length` characters costs."""
        if length > MAX_LENGTH:
            raise OverflowError(f"it builds something {length} long; the limit is {MAX_LENGTH}")
        self.spend(length // CHARACTERS_PER_STEP)


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here: text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, because a name set inside the block is unknown after it in the original too.
        return nodes.Scope(body, lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with a budget for each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            finalize=_count_output,
        )
        self.filters[_COUNTED] = _count_loop
        self.filters[_JOINED] = _join
        for name in ("center", "indent"):
            self.filters[name] = _bounded(self.filters[name])
        self.filters["format"] = _bounded_format

    def compile_template(self, source: str) -> jinja2.Template:
        """Parse, rewrite and compile; a template that is not valid raises TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, _COUNTED)
        for concat in list(tree.find_all(nodes.Concat)):
            parts = nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [_filter(parts, _JOINED)]
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    @staticmethod
    def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render with a fresh budget."""
        return template.render({**variables, _BUDGET: Budget()})

    def call(*arguments: Any, **keywords: Any) -> Any:
        """Call what a template calls. The positions are (self, context, callee, arguments...)."""
        _, context, callee, *given = arguments
        _budget(context).spend(STEPS_PER_CALL)
        if isinstance(getattr(callee, "__self__", None), str):
            _check_numbers([*given, *keywords.values()])
        return ImmutableSandboxedEnvironment.call(*arguments, **keywords)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `obj.attribute`."""
        if attribute in _FORMAT_METHODS:
            _check_format(obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up `obj[argument]`, which falls back on attributes."""
        if isinstance(argument, str) and argument in _FORMAT_METHODS:
            _check_format(obj)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 0
            if isinstance(right, int) and bits * abs(right) > MAX_POWER_BITS:
                raise OverflowError(f"a power over {MAX_POWER_BITS} bits")
        elif operator == "%":
            _check_format(left)
        elif operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                budget.spend_text(len(left) + len(right))
        else:
            budget.spend_text(_repeated_length(left, right))
        return super().call_binop(context, operator, left, right)


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _budget(context: Context) -> Budget:
    budget = context.resolve(_BUDGET)
    # A template may set the name itself; it gains nothing by it.
    if not isinstance(budget, Budget):
        raise OverflowError(f"{_BUDGET} is not a name for templates")
    return budget


@jinja2.pass_context
def _count_loop(context: Context, items: Any) -> Any:
    budget = _budget(context)
    if isinstance(items, Sized) and not isinstance(items, jinja2.Undefined):
        budget.spend(len(items))
        return items
    return _counted(budget, items)


def _counted(budget: Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.spend(1)
        yield item


@jinja2.pass_context
def _join(context: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _budget(context).spend_text(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_context
def _count_output(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        _budget(context).spend_text(len(value))
    return value


def _repeated_length(left: Any, right: Any) -> int:
    if isinstance(left, int):
        left, right = right, left
    if isinstance(right, int) and isinstance(left, str | list | tuple):
        return len(left) * right
    return 0


def _check_format(form: Any) -> None:
    """Refuse widths that make text out of nothing, as in '%999999999d'; `*` takes one from a value."""
    if isinstance(form, str) and ("%*" in form or _LONG_NUMBER.search(form)):
        raise OverflowError("a format with a width over 6 digits, or one taken from a value")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_LENGTH:
            raise OverflowError(f"the number {value} is over {MAX_LENGTH}")


def _bounded(original: Any) -> Any:
    """Return a filter that makes longer text by numbers, with a limit on the numbers."""

    def bounded(*arguments: Any, **keywords: Any) -> Any:
        _check_numbers([*arguments, *keywords.values()])
        return original(*arguments, **keywords)

    return bounded


def _bounded_format(form: Any, *arguments: Any, **keywords: Any) -> Any:
    _check_format(form)
    return do_format(form, *arguments, **keywords)
