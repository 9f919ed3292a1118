"""torch's own tests of DTensor and meshes in lockstep: each under our LocalTensorMode, beside how it ends torch's own way.

`python -m tests.tools.torch_lockstep [FILE ...] [--from DIR | --debian]`: a FILE is named as in torch's test/distributed, such as
tensor/test_math_ops.py.  They are downloaded for the installed torch's commit, or taken from DIR.  `--debian` takes those of torch 2.6.0
from Debian's source package, whatever torch is installed: what fails with it on gloo does not count.  A test passes torch's own way on gloo
processes, or in torch's LocalTensorMode if it is written for that; `--reference threads` takes rank threads in the place of processes,
which takes minutes instead of an hour.  What passes there and not in lockstep is listed with its reason.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor import common_dtensor

from localtensor.lockstep import in_place_of_torch
from tests.tools.torch_files import (
    FAILED,
    PASSED,
    SKIPPED,
    Kept,
    Verdict,
    debian_sources,
    limited,
    print_counts,
    print_others,
    read,
    run_pytest,
    source,
)

TENSOR = (
    "api", "attention", "common_rules", "convolution_ops", "dtensor", "dtensor_ops", "dynamic", "embedding_ops", "experimental_ops", "init",
    "math_ops", "matrix_ops", "op_strategy", "optimizers", "placement_types", "pointwise_ops", "random_ops", "redistribute", "tensor_ops",
    "utils", "view_ops", "experimental/test_local_map", "parallel/test_parallelize_api", "parallel/test_tp_examples",
    "parallel/test_tp_random_state", "parallel/test_tp_style",
)  # fmt: skip
FILES = (
    "test_device_mesh.py",
    "test_local_tensor.py",
    *(f"tensor/{name if '/' in name else f'test_{name}'}.py" for name in TENSOR),
)
OLD = (
    "test_device_mesh.py",
    "tensor/parallel/test_*.py",
    "_tensor/test_*.py",
    "_tensor/*/test_*.py",
)
"""The files of torch 2.6.0, by pattern: tests of `FILES` by another name, or by no longer another."""
SECONDS = 300  # for one test, in which processes may start
WAYS = ("lockstep", "threads", "torch")
BASES = {
    common_dtensor.DTensorTestBase: common_dtensor.LocalDTensorTestBase,
    common_dtensor.DTensorOpTestBase: common_dtensor.LocalDTensorOpTestBase,
    common_dtensor.DTensorContinuousTestBase: common_dtensor.LocalDTensorContinuousTestBase,
}
"""torch's bases of tests for several ranks, and its bases of the same tests under its LocalTensorMode."""


class RankTests:
    """A plugin of pytest: only tests of several ranks run, in lockstep if `lockstep`, each within a limit of seconds."""

    def __init__(self, *, lockstep: bool) -> None:
        self._lockstep = lockstep

    def pytest_pycollect_makeitem(self, collector: Any, obj: object) -> list[Any] | None:
        if not isinstance(obj, type) or not issubclass(obj, TestCase):
            return None
        if not issubclass(obj, tuple(BASES)):
            return None if hasattr(collector.obj, "LocalTensorMode") else []
        if self._lockstep:
            in_lockstep(obj)
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: object) -> Iterator[None]:
        with limited(SECONDS):
            return (yield)


def in_lockstep(cls: type) -> None:
    """Makes a class of tests of several ranks one of tests under the LocalTensorMode, as torch's `create_local_tensor_test_class` does."""
    for one in reversed(cls.__mro__):
        if one.__module__ == common_dtensor.__name__ or not issubclass(one, tuple(BASES)):
            continue
        if not issubclass(one, tuple(BASES.values())):
            one.__bases__ = tuple(BASES.get(base, base) for base in one.__bases__)
        elif "_in_lockstep" in vars(one) or one.__name__.endswith("WithLocalTensor"):
            continue
        one._in_lockstep = True  # type: ignore[attr-defined]
        for name, test in list(vars(one).items()):
            if name.startswith("test_") and callable(test):
                setattr(one, name, common_dtensor.make_wrapped(test, [lambda case: case._get_local_tensor_mode()]))


def run_file(text: str, name: str, way: str, names: str, kept: Path) -> None:
    """Runs the tests of a file one of the `WAYS`; their verdicts are lines of the file `kept`."""
    context: AbstractContextManager[None] = in_place_of_torch() if way == "lockstep" else nullcontext()
    suites = ["-p", "localtensor.torch_suites", "-o", f"suites_timeout={SECONDS}"] if way == "threads" else []
    with context:
        run_pytest(name, text, Kept(kept), ["-k", names, *suites], RankTests(lockstep=way == "lockstep"))


def verdicts_of(path: str, way: str, options: Sequence[str], outcomes: Path | None) -> dict[str, Verdict]:
    """The verdict of each test of a file, which runs in a process of its own, and in one more after each crash.

    They are those of the folder `outcomes` if they are there, and are kept there otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "verdicts")
        whole = Path(outcomes or folder, f"{path.replace('/', '-')}.{way}.jsonl")
        if whole.exists():
            return {verdict.test: verdict for verdict in read(whole)}
        command = [
            sys.executable,
            "-m",
            "tests.tools.torch_lockstep",
            path,
            "--way",
            way,
            "--kept",
            str(kept),
            *options,
        ]
        while True:
            lines = len(read(kept))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode or len(read(kept)) == lines:
                break
        if done.returncode:
            print(f"{path}, {way}: {(done.stderr or done.stdout)[-1000:]}", file=sys.stderr)
        elif outcomes and kept.exists():
            whole.write_text(kept.read_text())
        return {verdict.test: verdict for verdict in read(kept)}


def print_comparison(reference: dict[str, Verdict], ours: dict[str, Verdict], way: str) -> None:
    """Prints how many tests pass by the reference, how many of these in lockstep, and the others by name."""
    passed = [test for test, verdict in reference.items() if verdict.outcome == PASSED]
    missing = Verdict("", FAILED, "it is not collected")
    found = [ours.get(test, missing)._replace(test=test) for test in passed]
    print_counts(f"reference {way}", list(reference.values()))
    print_counts("in lockstep, of those that pass by the reference", found)
    print_others(found)
    more = [test for test, verdict in ours.items() if verdict.outcome == PASSED and test not in passed]
    if more:
        print(f"passed in lockstep and not by the reference: {len(more)}")
        print_others(verdict for test, verdict in reference.items() if test in more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--from", dest="folder", type=Path, help="a folder of torch's test/distributed, or of files of these names"
    )
    sources.add_argument("--debian", action="store_true", help="Debian's source package of torch 2.6.0")
    parser.add_argument("-k", dest="names", default="", help="pytest's expression for names of tests")
    parser.add_argument("--reference", choices=("torch", "threads", "none"), default="torch")
    parser.add_argument(
        "--outcomes",
        type=Path,
        metavar="DIR",
        help="a folder that keeps the reference's outcomes, which are then not run again",
    )
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        for path in chosen.files:
            run_file(_text(path, chosen.folder), Path(path).name, chosen.way, chosen.names, chosen.kept)
        return
    files = chosen.files or FILES
    if chosen.debian:
        chosen.folder = debian_sources()
        files = chosen.files or [
            str(path.relative_to(chosen.folder)) for name in OLD for path in sorted(chosen.folder.glob(name))
        ]
    options = ["-k", chosen.names, *(["--from", str(chosen.folder)] if chosen.folder else [])]
    if chosen.outcomes:
        chosen.outcomes.mkdir(parents=True, exist_ok=True)
    reference: dict[str, Verdict] = {}
    ours: dict[str, Verdict] = {}
    for path in files:
        _text(path, chosen.folder)  # ends the program here, and not in each of its processes
        name = Path(path).stem
        for way, into in (("lockstep", ours), (chosen.reference, reference)):
            if way != "none":
                found = verdicts_of(path, way, options, chosen.outcomes if into is reference else None)
                into.update((f"{name}::{test}", one._replace(test=f"{name}::{test}")) for test, one in found.items())
                print_counts(f"{path}, {way}", list(found.values()))
    if chosen.reference == "none":
        print_others(verdict for verdict in ours.values() if verdict.outcome != SKIPPED)
    else:
        print_comparison(reference, ours, chosen.reference)


def _text(path: str, folder: Path | None) -> str:
    return source(path if folder else f"test/distributed/{path}", folder)


if __name__ == "__main__":
    main()
