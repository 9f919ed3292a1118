"""Two Hypothesis profiles, `--slow`, and torch on one thread.  Fixtures live beside the tests that use them."""

import gc
import os
import signal

# Read when torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# "default": small, and the same draws in every run, so that CI is red for a reason only.
# "nightly": other draws each time; by HYPOTHESIS_PROFILE=nightly or --hypothesis-profile=nightly.
settings.register_profile("default", max_examples=20, derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with `&` by a shell: the tests of Ctrl-C need it back
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = [
    "strategies/propagation/overlay/autoload.py",  # importing it puts our rules into DTensor for the whole process
    "localtensor/torch_suites",  # a package that names a plugin: collecting it would load that: tests/localtensor/torch_suites has its example
]

torch.set_num_threads(1)  # xdist's workers are the parallelism; more threads only make them wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_finish() -> None:
    """What collecting made stays to the end: the collector need not look at it, nor a fork copy what it looked at."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: give --slow to run it"))
