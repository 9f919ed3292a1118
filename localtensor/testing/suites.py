"""Test classes written for torch's own bases, on rank threads: for files that can be edited.

    class TestMine(RankThreads, DTensorTestBase):   # the mixin first
        @with_comms
        def test_sum(self): ...

    @on_rank_threads
    class TestTheirs(MultiProcessTestCase): ...

Nothing else of the class changes: `self.rank`, `world_size`, `with_comms`, `init_pg`, skips and exit codes are
torch's.  The bases are MultiProcessTestCase (DTensorTestBase), MultiThreadedTestCase (DTensorOpTestBase) and
MultiProcContinuousTest (DTensorContinuousTestBase).  A class that overrides how its processes start or join keeps its
own way.  For files that cannot be edited there is `pytest -p localtensor.torch_suites FILE`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, overload

from localtensor.threads.run import limit_from_environment
from localtensor.torch_suites.bases import is_suite, replace_methods
from localtensor.torch_suites.rank_run import TIMEOUT, SuiteOptions

_Class = TypeVar("_Class", bound=type)


class RankThreads:
    """The first base of a test class whose tests run on rank threads.

    `rank_schedule`, `rank_seed` and `rank_timeout` (seconds for a test, 0: no limit; LOCALTENSOR_TIMEOUT overrides it)
    are arguments of the class: `class TestMine(RankThreads, DTensorTestBase, rank_schedule="shuffled:7")`.
    """

    def __init_subclass__(
        cls, rank_schedule: str = "round_robin", rank_seed: int = 0, rank_timeout: float = TIMEOUT, **kwargs: object
    ) -> None:
        super().__init_subclass__(**kwargs)
        if is_suite(cls):
            replace_methods(cls, SuiteOptions(rank_schedule, rank_seed, limit_from_environment(rank_timeout)))


@overload
def on_rank_threads(cls: _Class) -> _Class: ...
@overload
def on_rank_threads(*, schedule: str = ..., seed: int = ..., timeout: float = ...) -> Callable[[_Class], _Class]: ...
def on_rank_threads(
    cls: object = None, *, schedule: str = "round_robin", seed: int = 0, timeout: float = TIMEOUT
) -> Any:
    """A class decorator: the tests of the class run on rank threads.

    `schedule` is a text as after `Replay:` in a failure; `timeout` is in seconds for a test, 0 for no limit.  Raises
    `NotASuite` for a class over none of torch's bases, `NoTime` for an invalid limit.
    """

    def decorate(cls: object) -> Any:
        replace_methods(cls, SuiteOptions(schedule, seed, limit_from_environment(timeout)))
        return cls

    return decorate if cls is None else decorate(cls)
