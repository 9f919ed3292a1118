"""pytest run within this process, which keeps what that run imported.

pytester forgets every module that its run imported first.  A second copy of one of torch's would have registers and
caches of its own, while what the first copy has put in place goes on working.
"""

import sys
from pathlib import Path


class _Keeper:
    def pytest_unconfigure(self, config):
        self.modules = dict(sys.modules)


class _Nothing:
    def restore(self):
        """In place of the snapshot with which pytester forgets, at its end, what came in since its beginning."""


def in_process(pytester, *options):
    """What `pytester.runpytest_inprocess` gives; the modules of its own test files are forgotten, no others."""
    keeper, temporary = _Keeper(), Path(pytester.path).parent  # under which every test of this session has its folder
    result = pytester.runpytest_inprocess(*options, plugins=[keeper])
    for name, module in keeper.modules.items():
        if temporary not in Path(getattr(module, "__file__", None) or "/").parents:
            sys.modules.setdefault(name, module)
    pytester._sys_modules_snapshot = _Nothing()
    return result
