"""Tools for tests, yours and ours.  This is their door: each name opens its room on first use.

same         assert_same: two runs left the same on each rank
draws        Hypothesis strategies: meshes, specs, tensors, sharded values, op calls, rank programs, schedules
rule_tests   assert_rule, assert_sharding: a sharding rule under property-based test; rule_cases, check_case: with @given
             (of the package `strategies`)
suites       RankThreads, on_rank_threads: tests written for torch's multi-process base classes, on rank threads
reference    check_op, rank_by_rank: an op in lockstep held against a plain loop over the ranks; that loop
schedules    check_schedule: the full examination of a `Schedule`
"""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)
