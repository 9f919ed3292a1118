"""What a command that judges does to its process, and undoes when it ends: others may run in it, tests for example."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While inside, torch computes on one thread, and its warnings and its log up to WARNING are not heard.

    One thread: the tensors are small, the workers many, and they are forked from here.  As a decorator it is around
    the whole command.
    """
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            logging.disable(level)
            torch.set_num_threads(threads)
