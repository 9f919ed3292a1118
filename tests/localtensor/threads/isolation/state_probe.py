"""Sixty places in which a program keeps state: each rank writes its own value, all meet, and each reads again.

On processes a rank reads what it wrote.  `probe` runs on any kind of rank; a list of all that it read is its value.
"""

import abc
import asyncio
import builtins
import collections
import copyreg
import decimal
import enum
import functools
import gc
import json
import locale
import logging
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

COUNT, NAMED = 0, None
LIST, DICT, SET, NESTED = [], {}, set(), {"a": [1, {"b": 0}]}
ORDERED, DEFAULTS, TALLY = collections.OrderedDict(), collections.defaultdict(list), collections.Counter()
QUEUE = collections.deque()
OBJECT, VARIABLE = types.SimpleNamespace(value=0), ContextVar("lt_probe", default=0)
log = logging.getLogger("lt.probe")


class Base:
    value, shared = 0, {}

    @classmethod
    def count(cls):
        cls.value += 1
        return cls.value


class Derived(Base):
    pass


class Single:
    _instance = None

    def __new__(cls, rank=None):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.rank = rank
        return cls._instance


class Borg:
    _shared: ClassVar[dict] = {}

    def __init__(self):
        self.__dict__ = self._shared


class Meta(type):
    registry: ClassVar[dict] = {}

    def __new__(cls, name, bases, names):
        made = super().__new__(cls, name, bases, names)
        cls.registry[name] = made
        return made


class Color(enum.Enum):
    RED = 1


class Abstract(abc.ABC):  # noqa: B024
    known = 0


@dataclass
class Settings:
    values: list = field(default_factory=list)


SETTINGS = Settings()


class Box:
    def __init__(self):
        self.value = 0

    @functools.cached_property
    def cached(self):
        return dist.get_rank()


BOX = Box()


@functools.lru_cache
def cached(what):
    return dist.get_rank()


class Cached:
    @staticmethod
    @functools.cache
    def rank():
        return dist.get_rank()


def default(value=None, kept=[]):  # noqa: B006  # what is probed
    if value is not None:
        kept.append(value)
    return list(kept)


def counter():
    kept = []

    def count(value=None):
        if value is not None:
            kept.append(value)
        return list(kept)

    return count


closed_over = counter()


def attributed():
    return attributed.value


attributed.value = 0
REGISTRY = {}


def registered(function):
    REGISTRY[function.__name__] = function
    return function


@functools.singledispatch
def dispatched(value):
    return 0


def set_global(rank):
    global COUNT  # noqa: PLW0603  # what is probed
    COUNT += rank + 1


def set_env(rank):
    os.environ["LT_PROBE"] = str(rank)


def register(rank):
    registered(types.FunctionType((lambda: rank).__code__, globals(), f"made{rank}", None, (lambda: rank).__closure__))


def add_handler(rank):
    for _ in range(rank + 1):
        log.addHandler(logging.NullHandler())


def signals(rank):
    signal.signal(signal.SIGUSR1, lambda *_: rank)


def in_folder(rank):
    folder = Path(tempfile.gettempdir()) / f"lt-probe-{os.getpid()}-{rank}"  # other tests run at the same time
    folder.mkdir(exist_ok=True)
    os.chdir(folder)


change_umask = os.umask  # as after `from os import umask`


def call_umask(rank):
    change_umask(rank)


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


def helper(rank):
    thread = threading.Thread(target=set_in_thread, args=(rank,))
    thread.start()
    thread.join()


def set_in_thread(rank):
    global NAMED  # noqa: PLW0603
    NAMED = rank


def forward(rank):
    nn.Linear.forward = lambda self, x: rank


ITEMS = {
    "module global": (set_global, lambda: COUNT),
    "global list": (LIST.append, lambda: LIST[:]),
    "list element": (lambda r: NESTED["a"].__setitem__(0, r), lambda: NESTED["a"][0]),
    "global dict": (lambda r: DICT.update({r: r}), lambda: dict(DICT)),
    "global set": (SET.add, lambda: sorted(SET)),
    "nested dict": (lambda r: NESTED["a"][1].update(b=r), lambda: NESTED["a"][1]["b"]),
    "OrderedDict": (lambda r: ORDERED.update({r: r}), lambda: list(ORDERED)),
    "defaultdict": (lambda r: DEFAULTS["x"].extend([r]), lambda: dict(DEFAULTS)),
    "deque": (QUEUE.append, lambda: list(QUEUE)),
    "Counter": (lambda r: TALLY.update([r]), lambda: dict(TALLY)),
    "object's attribute": (lambda r: setattr(OBJECT, "value", r), lambda: OBJECT.value),
    "own object's attribute": (lambda r: setattr(BOX, "value", r), lambda: BOX.value),
    "cached_property": (lambda r: BOX.cached, lambda: BOX.cached),
    "dataclass field": (lambda r: SETTINGS.values.extend([r]), lambda: SETTINGS.values[:]),
    "class attribute": (lambda r: [Base.count() for _ in range(r + 1)], lambda: Base.value),
    "attribute of a subclass": (lambda r: setattr(Derived, "value", r + 5), lambda: Derived.value),
    "new class attribute": (lambda r: setattr(Base, f"new{r}", r), lambda: [hasattr(Base, f"new{k}") for k in (0, 1)]),
    "dict of a class": (lambda r: Base.shared.update({r: r}), lambda: dict(Base.shared)),
    "singleton": (Single, lambda: Single().rank),
    "borg": (lambda r: setattr(Borg(), "rank", r), lambda: Borg().rank),
    "registry of a metaclass": (lambda r: Meta(f"Made{r}", (), {}), lambda: sorted(Meta.registry)),
    "enum member": (lambda r: setattr(Color.RED, "rank", r), lambda: Color.RED.rank),
    "abstract class": (lambda r: setattr(Abstract, "known", r), lambda: Abstract.known),
    "lru_cache": (lambda r: cached("x"), lambda: (cached("x"), cached.cache_info().currsize)),
    "lru_cache of a class": (lambda r: Cached.rank(), lambda: int(Cached.rank())),
    "mutable default": (default, default),
    "closure of a function": (closed_over, closed_over),
    "attribute of a function": (lambda r: setattr(attributed, "value", r), attributed),
    "registry by decorator": (register, lambda: sorted(REGISTRY)),
    "function replaced": (lambda r: globals().update(dispatched=lambda _: r), lambda: dispatched(1)),
    "global from a helper thread": (helper, lambda: NAMED),
    "builtins": (lambda r: setattr(builtins, "lt_probe", r), lambda: builtins.lt_probe),
    "builtins.print": (lambda r: setattr(builtins, "print", r), lambda: builtins.print),
    "function of the standard library": (lambda r: setattr(json, "dumps", r), lambda: json.dumps),
    "constant of an extension": (lambda r: setattr(math, "tau", r), lambda: math.tau),
    "method of torch.nn": (forward, lambda: nn.Linear(1, 1)(None)),
    "function of torch.distributed": (lambda r: setattr(dist, "lt_probe", r), lambda: dist.lt_probe),
    "log level": (lambda r: log.setLevel(10 + r), lambda: log.level),
    "log handlers": (add_handler, lambda: len(log.handlers)),
    "root log level": (lambda r: logging.root.setLevel(20 + r), lambda: logging.getLogger().level),
    "new logger": (lambda r: logging.getLogger(f"lt.new{r}"), lambda: [f"lt.new{k}" in logging.root.manager.loggerDict for k in (0, 1)]),
    "level name": (lambda r: logging.addLevelName(7, f"L{r}"), lambda: logging.getLevelName(7)),
    "logging.disable": (logging.disable, lambda: logging.root.manager.disable),
    "sys.path": (lambda r: sys.path.append(f"/{r}"), lambda: [f"/{k}" in sys.path for k in (0, 1)]),
    "sys.argv": (lambda r: sys.argv.append(f"--{r}"), lambda: sys.argv[-1]),
    "sys.modules": (lambda r: sys.modules.update({f"lt_{r}": sys}), lambda: [f"lt_{k}" in sys.modules for k in (0, 1)]),
    "working directory": (in_folder, lambda: os.path.basename(os.getcwd())[-1:]),
    "umask": (call_umask, umask),
    "environment": (set_env, lambda: os.environ["LT_PROBE"]),
    "recursion limit": (lambda r: sys.setrecursionlimit(3000 + r), lambda: sys.getrecursionlimit()),  # noqa: PLW0108  # ranks have their own
    "switch interval": (lambda r: sys.setswitchinterval(0.01 + r), lambda: round(sys.getswitchinterval(), 2)),
    "excepthook": (lambda r: setattr(sys, "excepthook", r), lambda: sys.excepthook),
    "threading.excepthook": (lambda r: setattr(threading, "excepthook", r), lambda: threading.excepthook),
    "gc threshold": (lambda r: gc.set_threshold(900 + r), lambda: gc.get_threshold()[0]),
    "gc enabled": (lambda r: gc.disable() if r else gc.enable(), gc.isenabled),
    "warning filters": (lambda r: warnings.simplefilter("ignore" if r else "error"), lambda: warnings.filters[0][0]),
    "socket timeout": (lambda r: socket.setdefaulttimeout(30.0 + r), socket.getdefaulttimeout),
    "temporary folder": (lambda r: setattr(tempfile, "tempdir", f"/{r}"), tempfile.gettempdir),
    "decimal precision": (lambda r: setattr(decimal.getcontext(), "prec", 9 + r), lambda: decimal.getcontext().prec),
    "context variable": (VARIABLE.set, VARIABLE.get),
    "event loop policy": (lambda r: setattr(asyncio, "lt_probe", r), lambda: asyncio.lt_probe),
    "copyreg": (lambda r: copyreg.pickle(Box, [int, str][r]), lambda: copyreg.dispatch_table[Box].__name__),
    "start method": (lambda r: multiprocessing.set_start_method(["spawn", "fork"][r], force=True), multiprocessing.get_start_method),
    "random": (random.seed, random.random),
    "numpy's random": (np.random.seed, lambda: float(np.random.rand())),
    "torch's random": (torch.manual_seed, lambda: torch.rand(1).item()),
    "default dtype": (lambda r: torch.set_default_dtype([torch.float64, torch.float32][r]), lambda: str(torch.get_default_dtype())),
    "print options of numpy": (lambda r: np.set_printoptions(precision=1 + r), lambda: str(np.array([1 / 3]))),
    "print options of torch": (lambda r: torch.set_printoptions(precision=1 + r), lambda: str(torch.tensor(1 / 3))),
    "threads of torch": (lambda r: torch.set_num_threads(1 + r), torch.get_num_threads),
    "locale": (lambda r: locale.setlocale(locale.LC_NUMERIC, ["C", "C.UTF-8"][r]), lambda: locale.setlocale(locale.LC_NUMERIC)),
    "signal handler": (signals, lambda: signal.getsignal(signal.SIGUSR1)(None, None)),
}  # fmt: skip


def probe():
    """What each item holds on this rank after all ranks have written: a value, or the name of the error that a write raised."""
    rank, read = dist.get_rank(), {}
    for name, (write, _) in ITEMS.items():
        dist.barrier()
        try:
            write(rank)
        except Exception as error:  # why: a refusal is an answer
            read[name] = type(error).__name__
    dist.barrier()
    for name, (_, look) in ITEMS.items():
        dist.barrier()
        if name not in read:
            read[name] = look()
    with suppress(OSError):
        os.rmdir(os.getcwd())
    return read


def state():
    """What the items hold in this process, where that can be read without a rank."""
    names = set(ITEMS) - {"singleton", "borg", "lru_cache", "lru_cache of a class", "cached_property", "signal handler"}
    found = {}
    for name in sorted(names):
        try:
            found[name] = ITEMS[name][1]()
        except Exception as missing:  # why: not all can be read here
            found[name] = type(missing).__name__
    return found
