"""Runs test classes in this process, as unittest would, and says how each test went."""

import contextlib
import unittest
import warnings
from types import ModuleType

from torch.testing._internal.common_distributed import TEST_SKIPS

from localtensor.torch_suites.bases import bases_on_rank_threads
from localtensor.torch_suites.rank_run import SuiteOptions


class _Kept(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.went = {}

    def _keep(self, test, how):
        name = test.id().split(".", 1)[1] if test.id().startswith("tests.") else test.id()
        self.went[".".join(name.split(".")[-2:])] = how

    def addSuccess(self, test):
        self._keep(test, "passed")

    def addError(self, test, err):
        self._keep(test, err[1])

    def addFailure(self, test, err):
        self._keep(test, err[1])

    def addSkip(self, test, reason):
        self._keep(test, f"skipped: {reason}")

    def addExpectedFailure(self, test, err):
        self._keep(test, "failed as expected")

    def addUnexpectedSuccess(self, test):
        self._keep(test, "passed, which nobody expected")


def went(*classes, how=None):
    """Each test of the classes, "Class.test", with how it went: a word, or the exception that it raised.

    With `how`, torch's bases are on rank threads meanwhile.
    """
    result = _Kept()
    with warnings.catch_warnings(), bases_on_rank_threads(how) if how else contextlib.nullcontext():
        warnings.simplefilter("ignore")  # as in a file of somebody else's: our own settings make them errors
        load = unittest.defaultTestLoader.loadTestsFromTestCase
        unittest.TestSuite(load(cls) for cls in classes).run(result)
    return result.went


def suites_of(module: ModuleType):
    return [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase) and cls.__module__ == module.__name__
    ]


QUICK = SuiteOptions(timeout=60)
GPU = next(TEST_SKIPS[name].message for name in ("multi-device-8", "multi-gpu-8") if name in TEST_SKIPS)
"""What torch says where 8 GPUs are wanted; the first name since 2.15."""
