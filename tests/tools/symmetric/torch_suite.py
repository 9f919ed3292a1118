"""torch's own tests of symmetric memory on rank threads, with the CPU in the place of the GPU.

`python -m tests.tools.symmetric.torch_suite [FILE]`: FILE is test/distributed/test_symmetric_memory.py of torch's sources.
Without it, the file of the installed torch's commit is downloaded.  What does not pass is listed with its reason.
"""

import argparse
import re
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import SkipTest

import pytest
import torch
from torch.testing._internal import common_cuda, common_distributed, common_utils

import localtensor as lt
from localtensor._util.patching import replaced
from localtensor.torch_suites.bases import is_suite

ADDRESS = "https://raw.githubusercontent.com/pytorch/pytorch/{commit}/test/distributed/test_symmetric_memory.py"
SECONDS = 60  # for one test
PASSED, REFUSED, REPORTED, SKIPPED, FAILED = "passed", "refused", "reported", "skipped", "failed"


class Verdict(NamedTuple):
    """How one test has ended, and for what reason if it has not passed."""

    test: str
    outcome: str
    reason: str = ""


def download() -> str:
    """The tests of the installed torch.  Raises OSError."""
    with urllib.request.urlopen(ADDRESS.format(commit=torch.version.git_version), timeout=SECONDS) as answer:
        return str(answer.read().decode())


def on_cpu(text: str) -> str:
    """The source with each name of the device "cuda" replaced.

    >>> on_cpu('torch.ones(2, device="cuda:0").to("cuda") is cuda')
    'torch.ones(2, device="cpu").to("cpu") is cuda'
    """
    return re.sub(r"([\"'])cuda(:\d+)?\1", r"\1cpu\1", text)


def _same(function: Any) -> Any:
    return function


def _wants(ranks: int) -> Callable[..., Any]:
    """torch's `skip_if_lt_x_gpu` where each rank has a device."""

    def wants(least: int, **_: object) -> Any:
        return _same if least <= ranks else pytest.mark.skip(f"needs {least} ranks")

    return wants


@contextmanager
def devices_replaced(ranks: int) -> Iterator[None]:
    """Inside the block torch's decorators take the CPU for a GPU of each rank."""
    parts = (
        (common_distributed, "skip_if_lt_x_gpu", _wants(ranks)),
        (common_distributed, "requires_multicast_support", lambda: _same),
        (common_distributed, "PLATFORM_SUPPORTS_SYMM_MEM", True),
        (common_distributed.MultiProcContinuousTest, "device_type", classmethod(lambda _: "cpu")),
        (common_utils, "requires_cuda_p2p_access", lambda: _same),
        (common_utils, "requires_cuda", _same),
        (common_utils, "get_cycles_per_ms", lambda *_: 1.0),
        (common_cuda, "SM89OrLater", True),
        (torch.cpu, "device_count", lambda: ranks),
        (torch.cuda, "set_device", lambda device: None),
    )
    with ExitStack() as stack:
        for owner, name, ours in parts:
            stack.enter_context(replaced(owner, name, ours))
        yield


class Collector:
    """A plugin of pytest: tests of one process run on one rank, and each outcome is kept with its reason."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    def pytest_pycollect_makeitem(self, obj: object) -> None:
        if isinstance(obj, type) and issubclass(obj, common_utils.TestCase) and not is_suite(obj):
            for name in [name for name in vars(obj) if name.startswith("test_")]:
                setattr(obj, name, _on_one_rank(getattr(obj, name)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo else None
            self.verdicts.append(Verdict(item.nodeid.partition("::")[2], *_outcome(error)))
        return report


def _on_one_rank(test: Any) -> Any:
    def run(self: Any) -> None:
        lt.run(lambda: test(self), ranks=1)

    return run


def _outcome(error: BaseException | None) -> tuple[str, str]:
    """The outcome of a test by its error, and the reason: the cause's, where a rank raised it."""
    if error is None:
        return PASSED, ""
    cause = error.__cause__ or error
    if isinstance(error, pytest.skip.Exception | SkipTest):
        return SKIPPED, str(error)
    said = str(cause).partition("To execute this test")[0]  # torch's TestCase adds how to
    reason = f"{type(cause).__name__}: {' '.join(said.split())}"
    kinds = {lt.errors.NotServed: REFUSED, lt.errors.SymmetricRace: REPORTED, lt.errors.ReadUnwritten: REPORTED}
    return kinds.get(type(cause), FAILED), reason


def run(text: str, ranks: int, names: str = "") -> list[Verdict]:
    """The verdict on each test of torch's file, or on those that pytest's expression `names` chooses."""
    collector = Collector()
    with tempfile.TemporaryDirectory() as folder, devices_replaced(ranks):
        file = Path(folder, "test_symmetric_memory.py")
        file.write_text(on_cpu(text))
        options = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", f"--rootdir={folder}", "-k", names]
        suites = ["-p", "localtensor.torch_suites", "-o", f"suites_timeout={SECONDS}"]
        code = pytest.main([*options, *suites, str(file)], plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}: the file does not fit torch {torch.__version__}?")
    return collector.verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("-k", dest="names", default="", help="pytest's expression for names of tests")
    chosen = parser.parse_args()
    try:
        text = chosen.file.read_text() if chosen.file else download()
    except OSError as error:
        sys.exit(f"{chosen.file or 'the download'}: {error}. Name the file of torch's sources.")
    verdicts = run(text, chosen.ranks, chosen.names)
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(f"torch {torch.__version__}, {chosen.ranks} ranks, {len(verdicts)} tests:", dict(sorted(counts.items())))
    for verdict in verdicts:
        if verdict.outcome != PASSED:
            print(f"  {verdict.test}: {verdict.outcome}: {verdict.reason[:300]}")


if __name__ == "__main__":
    main()
