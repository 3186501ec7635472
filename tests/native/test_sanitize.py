"""What `make sanitize` calls clean: the processes here only pretend to have tested something."""

from __future__ import annotations

import sys

import pytest

from tests.native.builds import ROOT
from tests.native.sanitize import TESTS, Check, Outcome, files_of, run, summary


def pretend(code: str) -> Outcome:
    return run(Check("pretended", [sys.executable, "-c", code], {"SHOWN": "yes"}, " passed"))


def test_what_ends_well_and_has_passed_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os; print(os.environ['SHOWN'], os.environ['UBSAN_OPTIONS']); print('3 passed')"
    outcome = pretend(code)
    assert outcome.clean and outcome.said == "3 passed"
    assert capsys.readouterr().out.startswith("pretended: clean, 3 passed, ")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('3 passed'); exit(1)", "ended with status 1"),
        ("import os; print('3 passed', flush=True); os.abort()", "ended with status -6"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
        ("print('4 skipped')", "4 skipped"),
        ("pass", "a finding"),
    ],
)
def test_what_fails_is_killed_or_has_tested_nothing_is_not_clean(
    code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = pretend(f"import sys; print('a finding', file=sys.stderr); {code}")
    assert not outcome.clean and outcome.said == said
    told = capsys.readouterr().out
    assert told.startswith(f"pretended: NOT CLEAN, {said}, ") and "a finding" in told


def test_one_line_says_what_was_clean_and_what_was_not() -> None:
    good, bad = Outcome("driver", True, "", 1.0), Outcome("threads", False, "", 1.0)
    assert summary([good, good], 300) == "sanitize: clean: driver, driver; 2 checks, 5 min"
    told = summary([good, bad], 300)
    assert told == "sanitize: NOT CLEAN: threads; clean: driver; 2 checks, 5 min"


def test_every_file_of_operations_is_checked() -> None:
    files = files_of(TESTS)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests/ops").glob("test_*.py")} < set(
        files
    )
    assert len(files) == len(set(files)) and all((ROOT / name).exists() for name in files)
    assert files_of(["tests/ops/test_norm.py"]) == ["tests/ops/test_norm.py"]
