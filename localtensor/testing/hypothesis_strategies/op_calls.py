"""Concrete calls of torch's ops, from torch's own test database, which takes seconds to open, on first use.

| torch part (under torch.testing._internal)                   | why                        | read on     | run on |
|---------------------------------------------------------------|----------------------------|-------------|--------|
| OpInfo.name, .variant_test_name, .op                          | which op, by which name    | 2.11 - 2.15 | 2.13   |
| OpInfo.supported_dtypes, .supports_autograd                   | what it can be asked for   | 2.11 - 2.15 | 2.13   |
| .input, .args, .kwargs of a sample                            | the arguments              | 2.11 - 2.15 | 2.13   |

`tests/localtensor/testing/hypothesis_strategies/test_draws_ops.py` names each part.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor._util.opinfo import drawn_samples, opinfo_list
from localtensor.layout.spec import shape_text
from localtensor.testing.hypothesis_strategies.values import BadDraw, check_count, check_dtype, print_repr

MOST_SAMPLES = 12
"""The number of samples used of one op and dtype."""
MOST_NUMEL = 20_000
"""The most elements of a tensor in a sample; samples with larger ones are skipped."""


@functools.cache
def opinfo_database() -> Mapping[str, Any]:
    """torch's OpInfos by full name, such as `add` and `div.floor_rounding`, in their own order."""
    return MappingProxyType({".".join(filter(None, (i.name, i.variant_test_name))): i for i in opinfo_list()})


def full_names(names: Sequence[str] | None, dtypes: Sequence[torch.dtype]) -> tuple[str, ...]:
    """Every op of these names, variants included, that supports one of the dtypes.

    Raises `BadDraw` for a name that is not in the database, and where no op is left.
    """
    known = opinfo_database()
    wanted = list(known) if names is None else [full for name in names for full in _names_of(name)]
    found = tuple(full for full in wanted if any(dtype in _dtypes(full) for dtype in dtypes))
    if not found:
        problem = f"none of them knows {', '.join(map(str, dtypes))}"
        raise BadDraw("op_calls", "names", names, problem, "Pass other names, or other dtypes.")
    return found


def _names_of(name: str) -> list[str]:
    known = opinfo_database()
    found = [name] if name in known else [full for full, info in known.items() if info.name == name]
    if not found:
        close = [full for full in known if name.lower() in full.lower()][:5] if isinstance(name, str) else []
        remedy = f"Did you mean {', '.join(close)}?" if close else "Names are those of torch's OpInfos, such as 'add'."
        raise BadDraw("op_calls", "names", name, "torch's database has no such op", remedy)
    return found


@functools.cache
def _dtypes(full: str) -> frozenset[torch.dtype]:
    return frozenset(opinfo_database()[full].supported_dtypes("cpu"))


def supports_dtype(full: str, dtype: torch.dtype) -> bool:
    """Whether torch lists this dtype as supported by the op."""
    return dtype in _dtypes(full)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of one op: `op(*args, **kwargs)`, which `call()` makes.  The name, dtype, number and seed make it again.

    `says` is the call as text.  If it is given, the sample must still match it: `BadDraw` is raised when another torch
    version has other samples, so that a kept example does not silently change.  The tensors are fresh, and belong to
    the holder of the value.

    >>> call = OpCall("add", torch.float32, 1)  # doctest: +SKIP
    >>> call  # doctest: +SKIP
    OpCall('add', torch.float32, 1, 0, 'add(f32[5,5], f32[5,5])')
    """

    name: str
    dtype: torch.dtype
    number: int
    seed: int = 0
    says: str = ""
    op: Callable[..., Any] = field(init=False, compare=False)
    args: tuple[Any, ...] = field(init=False, compare=False)
    kwargs: Mapping[str, Any] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        check_dtype("OpCall", self.dtype if self.dtype is not None else "None")
        check_count("OpCall", "number", self.number, 0)
        if self.name not in opinfo_database():
            _names_of(self.name)
            raise BadDraw("OpCall", "name", self.name, "it is several variants", f"Pass one: {_names_of(self.name)}.")
        args, kwargs = _copied(_sample(self.name, self.dtype, self.number, self.seed))
        object.__setattr__(self, "op", opinfo_database()[self.name].op)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        text = f"{self.name}({', '.join([*map(_value_text, args), *(f'{k}={_value_text(v)}' for k, v in kwargs.items())])})"
        if self.says not in ("", text):
            problem = f"in this torch it is {text}"
            raise BadDraw("OpCall", "says", self.says, problem, "Leave it out to take what this torch has.")
        object.__setattr__(self, "says", text)

    def call(self) -> Any:
        """The result of the op for these arguments."""
        return self.op(*self.args, **self.kwargs)

    _repr_pretty_ = print_repr

    def __repr__(self) -> str:
        return f"OpCall({self.name!r}, {self.dtype}, {self.number}, {self.seed}, {self.says!r})"


def _sample(name: str, dtype: torch.dtype, number: int, seed: int) -> tuple[Any, ...]:
    samples = _samples(name, dtype, seed)
    if not samples:
        problem = f"torch has no sample of it for {dtype} on a CPU"
        raise BadDraw("OpCall", "name", name, problem, "Pass another op, or another dtype.")
    return samples[number % len(samples)]


def sample_count(name: str, dtype: torch.dtype, seed: int) -> int:
    """The number of samples of an op for the dtype and seed."""
    return len(_samples(name, dtype, seed))


@functools.lru_cache(256)
def _samples(name: str, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], ...]:
    """The first samples of an op that are small enough, the same for a seed in any process."""
    info = opinfo_database()[name]
    if dtype not in _dtypes(name):
        return ()
    with _seeded(zlib.crc32(f"{seed} {name} {dtype}".encode())), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own samples
        with drawn_samples(info, "cpu", dtype) as samples:
            few = list(itertools.islice(samples, MOST_SAMPLES))
    found = [((sample.input, *sample.args), dict(sample.kwargs)) for sample in few]
    return tuple(one for one in found if _numel(one) <= MOST_NUMEL)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """While inside, every generator that the database draws from has this seed; their states are restored."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _numel(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return _numel(list(value.values()))
    return max(map(_numel, value), default=0) if isinstance(value, list | tuple) else 0


def _copied(value: Any) -> Any:
    """The value with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return shape_text(value.shape, value.dtype)
    if type(value) in (list, tuple):
        ends = "[]" if isinstance(value, list) else "()"
        return f"{ends[0]}{', '.join(map(_value_text, value))}{',' * (ends == '()' and len(value) == 1)}{ends[1]}"
    return getattr(value, "__name__", None) or repr(value)
