"""A chat template cannot hold up the server: what it spends has a limit."""

from __future__ import annotations

import tracemalloc

import pytest

from pagemill.errors import RequestError
from pagemill.tokenizer.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "hi"}]
DOUBLING = "{% set n = namespace(s='xx') %}{% for i in range(60) %}"


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) | map('string') %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% set x = 'x' * 9999999 %}{% endfor %}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% set _pagemill_budget = 1 %}{% for x in [1] %}{% endfor %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
]
HUGE = [
    DOUBLING + "{% set n.s = n.s + n.s %}{% endfor %}",
    DOUBLING + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    DOUBLING + "{% set n.s = n.s * 9 %}{% endfor %}",
    DOUBLING + "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * [1] }}",
    "{% set n = 99999999 %}{{ 9 ** n }}",
    "{% set n = 999 %}{{ (9 ** n) ** n }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "{{ '{:>999999999}'['format'](1) }}",
    "{{ ('{:>999999999}' | attr('format'))(1) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'.center(width=999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x' | indent(999999999) }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_template_ends_with_an_error(source: str) -> None:
    with pytest.raises(RequestError, match="OverflowError"):
        render_chat(source, MESSAGES)


@pytest.mark.parametrize("source", HUGE)
def test_template_that_fills_the_memory_ends_before_it_does(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="OverflowError|cannot be compiled"):
            render_chat(source, MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


def test_counting_changes_no_loop() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.last }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}"
        "{% for x in nothing %}x{% else %}empty{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    assert render_chat(source, MESSAGES) == "1/1TrueTruea1Noneempty12"


def test_budget_is_fresh_for_each_rendering() -> None:
    source = "{% for x in range(90000) %}{% for y in range(15) %}{% endfor %}{% endfor %}done"
    assert [render_chat(source, MESSAGES) for _ in range(3)] == ["done"] * 3


def test_long_conversations_fit_the_budget() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 400
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    assert len(render_chat(source, messages)) > 4_000_000


def test_ordinary_formats_work() -> None:
    source = "{{ '%05d|%s' % (7, 'a') }} {{ '%.2f' | format(1.234) }} {{ '{:>4}'.format(5) }} {{ 2 ** 10 }}"
    assert render_chat(source, MESSAGES) == "00007|a 1.23    5 1024"
