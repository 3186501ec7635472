"""How a request wants to be served, checked: priority, tenant, deadlines, arrival. Called by the input processor."""

from __future__ import annotations

from pagemill.core.policies import POLICIES
from pagemill.errors import RequestError
from pagemill.messages import RequestDeadlines, ServiceTerms
from pagemill.sampling_params import shown

PRIORITIES = (-(2**31), 2**31 - 1)
LONGEST_S = 1e9  # of a timeout: some thirty years
AHEAD_S = 3600.0  # by which another machine's clock may be ahead of ours


def check_terms(terms: ServiceTerms, policy: str) -> None:
    """Raise RequestError for terms that cannot be, or that the scheduling policy does not look at."""
    _check_priority(terms.priority, policy)
    if not isinstance(terms.tenant, str):
        raise RequestError(f"tenant is {shown(terms.tenant)}; it must be a string", param="tenant")
    _check_timeout("start_timeout", terms.start_timeout)
    _check_timeout("request_timeout", terms.request_timeout)


def check_arrival(arrival_time: object, now: float) -> None:
    """Raise RequestError for a time of arrival that is none; `now` is that of `time.time`.

    It says whose turn it is: one that never comes would starve its request.
    """
    is_number = isinstance(arrival_time, (int, float)) and not isinstance(arrival_time, bool)
    if is_number and 0 <= arrival_time <= now + AHEAD_S:  # type: ignore[operator]
        return
    raise RequestError(
        f"arrival_time is {shown(arrival_time)}; it must be a moment in seconds as time.time() gives it, from 0 "
        f"to at most {AHEAD_S:g} s from now, or left out for now",
        param="arrival_time",
    )


def deadlines_of(terms: ServiceTerms, now: float) -> RequestDeadlines | None:
    """Return the moments that the timeouts of a request made at `now` mean; None: there are none."""
    start, end = terms.start_timeout, terms.request_timeout
    if start is None and end is None:
        return None
    return RequestDeadlines(
        since=now,
        start_by=None if start is None else now + start,
        end_by=None if end is None else now + end,
    )


def _check_priority(priority: object, policy: str) -> None:
    low, high = PRIORITIES
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_whole or not low <= priority <= high:  # type: ignore[operator]
        raise RequestError(
            f"priority is {shown(priority)}; it must be a whole number from {low} to {high}",
            param="priority",
        )
    if priority != 0 and not POLICIES.load(policy).uses_priority:
        raise RequestError(
            f"priority is {shown(priority)}, but the engine's scheduling_policy {policy!r} does not "
            "look at it; leave it at 0, or start the engine with scheduling_policy 'priority'",
            param="priority",
        )


def _check_timeout(name: str, seconds: object) -> None:
    if seconds is None:
        return
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if is_number and 0 < seconds <= LONGEST_S:  # type: ignore[operator]
        return
    raise RequestError(
        f"{name} is {shown(seconds)}; it must be a number of seconds greater than 0 and at most "
        f"{LONGEST_S:g}, or left out for no limit",
        param=name,
    )
