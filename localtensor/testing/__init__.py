"""Tools for tests, yours and ours.  This is their door: each name opens its room on first use.

same         assert_same: two runs left the same on each rank
draws        Hypothesis strategies: meshes, specs, tensors, sharded values, op calls, rank programs, schedules
rule_tests   assert_rule, assert_sharding: a sharding rule under property-based test; rule_cases, check_case: with @given
suites       RankThreads, on_rank_threads: tests written for torch's multi-process base classes, on rank threads
reference    check_op, rank_by_rank: an op in lockstep held against a plain loop over the ranks; that loop
schedules    check_schedule: the full examination of a `Schedule`
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    import localtensor.testing.hypothesis_strategies.api as draws  # noqa: F401  # a room that is a door itself
    from localtensor.testing.compare_runs import assert_same as assert_same
    from localtensor.testing.lockstep_reference import check_op as check_op
    from localtensor.testing.lockstep_reference import rank_by_rank as rank_by_rank
    from localtensor.testing.rules.api import assert_rule as assert_rule
    from localtensor.testing.rules.api import assert_sharding as assert_sharding
    from localtensor.testing.rules.api import check_case as check_case
    from localtensor.testing.rules.api import rule_cases as rule_cases
    from localtensor.testing.rules.case import RuleCase as RuleCase
    from localtensor.testing.rules.errors import WrongRule as WrongRule
    from localtensor.testing.schedule_contract import check_schedule as check_schedule
    from localtensor.testing.suites import RankThreads as RankThreads
    from localtensor.testing.suites import on_rank_threads as on_rank_threads

__all__ = [
    "RankThreads",
    "RuleCase",
    "WrongRule",
    "assert_rule",
    "assert_same",
    "assert_sharding",
    "check_case",
    "check_op",
    "check_schedule",
    "on_rank_threads",
    "rank_by_rank",
    "rule_cases",
]

_ROOM = {
    "RankThreads": "localtensor.testing.suites",
    "RuleCase": "localtensor.testing.rules.case",
    "WrongRule": "localtensor.testing.rules.errors",
    "assert_rule": "localtensor.testing.rules.api",
    "assert_same": "localtensor.testing.compare_runs",
    "assert_sharding": "localtensor.testing.rules.api",
    "check_case": "localtensor.testing.rules.api",
    "check_op": "localtensor.testing.lockstep_reference",
    "check_schedule": "localtensor.testing.schedule_contract",
    "on_rank_threads": "localtensor.testing.suites",
    "rank_by_rank": "localtensor.testing.lockstep_reference",
    "rule_cases": "localtensor.testing.rules.api",
}


def __getattr__(name: str) -> _typing.Any:
    if name == "draws":
        return _importlib.import_module("localtensor.testing.hypothesis_strategies.api")
    if name not in _ROOM:
        raise AttributeError(f"module 'localtensor.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
