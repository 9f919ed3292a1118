"""Helpers for tests.  Each name is imported on first use.

assert_same                    two runs have equal results on each rank
draws                          Hypothesis strategies: meshes, specs, tensors, sharded values, op calls, programs, schedules
assert_rule, assert_sharding   a sharding rule under property-based test; rule_cases, check_case: with @given
RankThreads, on_rank_threads   tests written for torch's multi-process base classes, on rank threads
check_schedule                 the conformance test of a `Schedule`
"""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)
