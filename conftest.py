"""Two Hypothesis profiles, `--slow`, and torch on one thread.  Fixtures live beside the tests that use them."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Read when torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from _pytest.assertion import rewrite
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

LONGEST = (
    "end_to_end/test_readme", "localtensor/lockstep/patches/test_compiling", "properties/test_rank_program_laws",
    "strategies/sweep/test_session_machine", "localtensor/runner/test_torchrun", "strategies/validation/assertions/test_api",
    "localtensor/testing/compare/test_compare", "end_to_end/browser/test_report_page", "strategies/validation/test_planted",
    "strategies/gate/test_plan", "strategies/sweep/test_session", "localtensor/testing/compare/test_scripts",
    "strategies/base/test_worker_pool", "strategies/ops/test_every_rule",
    "localtensor/testing/hypothesis_strategies/test_draws", "strategies/validation/assertions/test_typecheck_hook",
    "localtensor/pytest_plugin/test_init", "strategies/programs/test_chained_chained_validation", "strategies/cli/test_app",
    "tools/rankbugs/test_corpus", "end_to_end/programs/test_checkpoints", "end_to_end/programs/test_tensor_parallel",
    "localtensor/errors/test_base", "properties/test_dtensor_lockstep_law", "localtensor/threads/test_rank_world",
    "localtensor/threads/symmetric/test_kernels",
)  # fmt: skip
"""The files of tests that take longest, by processor time: they come first where several workers share the files."""

torch.set_num_threads(1)  # xdist's workers are the parallelism; more threads only make them wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """In a fresh clone each of the workers rewrites the asserts of its share of what it collects, and reads those of the others.

    Otherwise all of them would rewrite all files, at the same time.  Private parts of pytest, tried on 9.0 and 9.2; without
    them collecting takes longer.
    """
    share = getattr(config, "workerinput", None)
    if share is None or sys.dont_write_bytecode or not hasattr(rewrite, "_rewrite_test"):
        return
    asked = [Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args]
    found = [file for path in asked for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    files = sorted({*found})
    for file in files[int(share["workerid"].removeprefix("gw")) :: share["workercount"]]:
        cached = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if not cached.exists() and rewrite.try_makedirs(cached.parent):
            digest, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, cached)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    """What collecting makes stays to the end: the collector need not look at it, nor a fork copy what it looked at."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # -k and -m choose first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a long file that comes last would be waited for by all other workers
        order = {config.rootpath / f"tests/{name}.py": at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path, len(order)))
    if config.getoption("--slow"):
        return
    named = any("[" in argument for argument in config.args)
    left = [] if named else _beyond_few(items)
    config.hook.pytest_deselected(items=left)
    unwanted = {*map(id, left)}
    items[:] = [item for item in items if id(item) not in unwanted]
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: give --slow to run it"))


def _beyond_few(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of each test marked `few(n)` but for n, the first and others that are spread evenly."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = []
    for every in cases.values():
        (n,) = every[0].get_closest_marker("few").args
        kept = {len(every) * number // n for number in range(n)} if len(every) > n else {*range(len(every))}
        left += [item for number, item in enumerate(every) if number not in kept]
    return left
