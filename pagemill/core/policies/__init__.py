"""Policies of the scheduler by name: one file and one line each."""

from __future__ import annotations

from pagemill.core.policies.base import Policy
from pagemill.registry import Registry

POLICIES: Registry[type[Policy]] = Registry(
    "scheduling policy",
    {
        "fcfs": "pagemill.core.policies.fcfs:FirstComeFirstServed",
        "fair": "pagemill.core.policies.fair:Fair",
        "prefix": "pagemill.core.policies.prefix:LongestPrefixFirst",
        "priority": "pagemill.core.policies.priority:Priority",
    },
)
