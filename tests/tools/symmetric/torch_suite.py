"""torch's own tests of symmetric memory on rank threads, with the CPU in the place of the GPU.

`python -m tests.tools.symmetric.torch_suite [FILE]`: FILE is test/distributed/test_symmetric_memory.py of torch's sources.
Without it, the file of the installed torch's commit is downloaded.  What does not pass is listed with its reason.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal import common_cuda, common_distributed, common_utils

import localtensor as lt
from localtensor._util.patching import replaced
from localtensor.torch_suites.bases import is_suite
from tests.tools.torch_files import SECONDS, Collector, Verdict, print_counts, print_others, run_pytest, source

FILE = "test/distributed/test_symmetric_memory.py"
REFUSED, REPORTED = "refused", "reported"
KINDS: dict[type, str] = {
    lt.errors.NotServed: REFUSED,
    lt.errors.SymmetricRace: REPORTED,
    lt.errors.ReadUnwritten: REPORTED,
}


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


class OneProcessTests:
    """A plugin of pytest: tests of one process run on one rank."""

    def pytest_pycollect_makeitem(self, obj: object) -> None:
        if isinstance(obj, type) and issubclass(obj, common_utils.TestCase) and not is_suite(obj):
            for name in [name for name in vars(obj) if name.startswith("test_")]:
                setattr(obj, name, _on_one_rank(getattr(obj, name)))


def _on_one_rank(test: Any) -> Any:
    def run(self: Any) -> None:
        lt.run(lambda: test(self), ranks=1)

    return run


def run(text: str, ranks: int, names: str = "") -> list[Verdict]:
    """The verdict on each test of torch's file, or on those that pytest's expression `names` chooses."""
    suites = ["-k", names, "-p", "localtensor.torch_suites", "-o", f"suites_timeout={SECONDS}"]
    with devices_replaced(ranks):
        return run_pytest("test_symmetric_memory.py", on_cpu(text), Collector(KINDS), suites, OneProcessTests())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("-k", dest="names", default="", help="pytest's expression for names of tests")
    chosen = parser.parse_args()
    file = chosen.file
    text = source(FILE) if file is None else source(file.name, file.parent)
    verdicts = run(text, chosen.ranks, chosen.names)
    print_counts(f"{chosen.ranks} ranks", verdicts)
    print_others(verdicts)


if __name__ == "__main__":
    main()
