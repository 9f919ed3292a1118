"""A pytest plugin: tests written for torch's own distributed bases run on rank threads, unchanged.

It is loaded before the test module, by `pytest -p localtensor.torch_suites FILE`, for files that cannot be edited.
"""

from contextlib import ExitStack

import pytest

from localtensor.errors import NoTime
from localtensor.threads.run import limit_from_environment
from localtensor.torch_suites.bases import bases_on_rank_threads
from localtensor.torch_suites.rank_run import TIMEOUT, SuiteOptions

_PATCHES = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("suites_timeout", f"seconds for one test on rank threads (default {TIMEOUT:g}, 0: no limit)")


def pytest_configure(config: pytest.Config) -> None:
    timeout = str(config.getini("suites_timeout"))
    try:
        how = SuiteOptions(
            config.getoption("localtensor_schedule", None) or "round_robin",  # of localtensor.pytest_plugin
            int(config.getoption("localtensor_seed", None) or 0),
            limit_from_environment(float(timeout) if timeout else TIMEOUT),
        )
    except (ValueError, NoTime):
        raise pytest.UsageError("suites_timeout and LOCALTENSOR_TIMEOUT are numbers of seconds") from None
    stack = config.stash[_PATCHES] = ExitStack()
    stack.enter_context(bases_on_rank_threads(how))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash.get(_PATCHES, ExitStack()).close()
