"""What tests have the ranks of a pool do: run a repro script as torchrun would, and tell of themselves."""

import contextlib
import io
import logging
import sys
from unittest import mock

import torch.distributed as dist


def run_script(text: str) -> tuple[int, str]:
    """Exit code and what it printed.  The group that is there stands for the one that the script would make."""
    printed, code = io.StringIO(), 0
    kept = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with contextlib.redirect_stdout(printed), kept:
        try:
            exec(compile(text, "repro.py", "exec"), {"__name__": "__main__"})
        except SystemExit as left:
            code = int(left.code or 0)
    sys.stdout.flush()
    return code, printed.getvalue()


def logs_errors() -> bool:
    return logging.getLogger("torch").isEnabledFor(logging.ERROR)
