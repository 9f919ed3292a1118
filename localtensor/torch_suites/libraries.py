"""Operators that a test defines itself, on rank threads: each rank defines them, as a process would, and finds its own.

torch has one registry for a process, and refuses an operator that is defined twice.  Here the first rank's definition
is for all; each rank's kernels are called on that rank; and all of them are gone when the run is over, as with the end
of a process.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from localtensor._util.ambient import running
from localtensor._util.patching import wrapped
from localtensor.threads.state.sharding_rules import importing
from localtensor.torch_suites.stores import is_rank

# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.library.Library._register_fake": "how a kernel for fake tensors is registered",
    "torch.library.Library._destroy": "a definition ends with the run, and not with the first rank that leaves it",
}

_TORCHS = ("aten", "prims", "prim", "c10d", "_c10d_functional", "_dtensor", "inductor", "quantized", "higher_order")


class _Run:
    """What the ranks of one run have defined."""

    def __init__(self) -> None:
        self.namespaces: set[str] = set()
        self.defined: dict[tuple[str, str], set[int]] = {}  # ranks that have it now
        self.kernels: dict[tuple[str, ...], dict[int, Callable[..., Any]]] = {}
        self.libraries: dict[int, Any] = {}

    def begin(self, original: Callable[..., None], lib: Any, ns: str, kind: str, *args: Any, **kwargs: Any) -> None:
        if kind == "DEF" and _a_tests(ns):
            kind = "FRAGMENT" if ns in self.namespaces else kind
            self.namespaces.add(ns)
        original(lib, ns, kind, *args, **kwargs)

    def define(self, original: Callable[..., Any], lib: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        if not _a_tests(lib.ns):
            return original(lib, schema, *args, **kwargs)
        known = self.defined.get((lib.ns, schema))
        if known is None or _rank() in known:  # a second time by one rank: torch refuses it
            answer = original(lib, schema, *args, **kwargs)
        else:
            answer = schema.partition("(")[0].strip()
        self.defined.setdefault((lib.ns, schema), set()).add(_rank())
        self.libraries[id(lib)] = lib
        return answer

    def impl(self, original: Callable[..., Any], lib: Any, op: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        where = (lib.ns, "impl", str(op), *map(str, args), *map(str, kwargs.items()))
        return self._kernel(original, lib, where, op, fn, *args, **kwargs)

    def fake(self, original: Callable[..., Any], lib: Any, op: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(original, lib, (lib.ns, "fake", str(op)), op, fn, *args, **kwargs)

    def _kernel(
        self, original: Any, lib: Any, where: tuple[str, ...], op: Any, fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _a_tests(lib.ns) or not isinstance(fn, types.FunctionType | types.MethodType):
            return original(lib, op, fn, *args, **kwargs)
        self.libraries[id(lib)] = lib
        by_rank = self.kernels.setdefault(where, {})
        first = not by_rank
        by_rank[_rank()] = fn
        return original(lib, op, _of_rank(fn, by_rank), *args, **kwargs) if first else None

    def leave(self, original: Callable[..., None], lib: Any) -> None:
        """The rank has left its definitions; the operators stay until the run is over."""
        if id(lib) not in self.libraries or not is_rank():
            original(lib)
            return
        for (ns, _), ranks in self.defined.items():
            if ns == lib.ns:
                ranks.discard(_rank())

    def end(self) -> None:
        for lib in reversed(self.libraries.values()):
            lib._destroy()
        self.libraries.clear()


@contextmanager
def one_registry() -> Iterator[None]:
    """While inside, ranks may define the same operators; afterwards none of them is there."""
    run, library = _Run(), torch.library.Library
    with ExitStack() as stack:
        for name, around in (
            ("__init__", run.begin),
            ("define", run.define),
            ("impl", run.impl),
            ("_register_fake", run.fake),
            ("_destroy", run.leave),
        ):
            stack.enter_context(wrapped(library, name, around))
        stack.callback(run.end)
        yield


def _a_tests(ns: str) -> bool:
    """Whether a test defines this now, on a rank: no module that is being imported, and nothing of torch's own."""
    return is_rank() and not importing() and ns not in _TORCHS


def _rank() -> int:
    simulation: Any = running()
    return int(simulation.rank())


def _of_rank(fn: Callable[..., Any], by_rank: dict[int, Callable[..., Any]]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return by_rank.get(_rank() if is_rank() else -1, fn)(*args, **kwargs)

    return kernel
