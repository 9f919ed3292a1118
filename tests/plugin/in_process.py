"""pytest run within this process, which keeps what that run imported.

pytester forgets every module that its run imported first.  A second copy of one of torch's would have registers and
caches of its own, while what the first copy has put in place goes on working.
"""

import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  # half of it comes in with the first optimizer, and the other half not in every run


class _Keeper:
    def pytest_unconfigure(self, config):
        self.modules = dict(sys.modules)


def in_process(pytester, *options):
    """What `pytester.runpytest_inprocess` gives; the modules of its own test files are forgotten, no others."""
    keeper = _Keeper()
    result = pytester.runpytest_inprocess(*options, plugins=[keeper])
    for name, module in keeper.modules.items():
        if Path(pytester.path) not in Path(getattr(module, "__file__", None) or "/").parents:
            sys.modules.setdefault(name, module)
    return result
