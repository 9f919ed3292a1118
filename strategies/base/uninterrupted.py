"""A process without torch's noise, for a while: around one call that may be refused, or around a whole command."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def quiet(level: int = logging.CRITICAL) -> Iterator[None]:
    """While inside, no warning is heard, and no log up to this level.

    Torch logs every refusal and every submesh that might have been flattened: these are answers here.
    """
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(level)
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """What a command that judges does to its process: errors alone are logged, and torch computes on one thread.

    One thread: the tensors are small, the workers many, and they are forked from here.  It is undone when the command
    ends, since others may run in the process, tests for example.
    """
    threads = torch.get_num_threads()
    with quiet(logging.WARNING):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
