"""Where a function of torch stands: the registered function of an op, seen through torch's factories.

Most strategies are closures that a factory makes for an op.  Where a closure holds another strategy (that of the functional
op for its `out=` form, a dim map of a view), the inner one is the place.  Where it holds a list of rules, the name of that
list in its module is the `detail`.

| torch part (under torch.distributed.tensor)                  | read on     | run on |
|----------------------------------------------------------------|-------------|--------|
| the registries of `dtensor.registered_functions`               | 2.11 - 2.15 | 2.13   |
| ._decompositions.DecompShardingStrategy._propagate_through_decomp | 2.11 - 2.15 | 2.13   |
| ._op_dispatcher._dispatch_fast_path_python_tail, .wrap         | by feature     | 2.13   |
| ._try_replicate_spec_for_scalar_tensor, unwrap_to_op_info       | by feature     | 2.13   |
| torch._decomp.decomposition_table, OpOverload._can_decompose   | 2.11 - 2.15 | 2.13   |

`tests/strategies/torch_api/test_counterfactuals.py` checks each part by name.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._decompositions import DecompShardingStrategy

import localtensor
import strategies
from strategies.base.time_limit import DoesNotReturn, TimeLimit
from strategies.torch_api.dtensor import propagator, registry_of


@dataclass(frozen=True, slots=True, order=True)
class CodePlace:
    """A function: its name, `torch/...py` (or the file's name, outside of torch), its line, and what a factory gave it."""

    name: str
    file: str
    line: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}{f' with {self.detail}' if self.detail else ''} ({self.file}:{self.line})"


_TABLES = {
    "single-dim strategy": "op_single_dim_strategy_funcs",
    "op strategy": "op_strategy_funcs",
    "rule": "op_to_rules",
}


@functools.cache
def registered_place(op: torch._ops.OpOverload) -> CodePlace | None:
    """The place of the function that decides the op's placements: its strategy, or else its decomposition."""
    how = registry_of(op)
    if how == "decomposition":
        return decomposition_place(op)
    if not how:
        return None
    found = getattr(propagator(), _TABLES[how])[op]
    return place_of(found if isinstance(found, functools.partial) else getattr(found, "func", found))


def decomposition_place(op: torch._ops.OpOverload) -> CodePlace:
    """The place of the op's decomposition; that of a composite kernel in C++ has no file."""
    function = decomposition_table.get(op)
    if function is not None:
        return place_of(inspect.unwrap(function))
    return CodePlace(f"{op._schema.name.replace('::', '.')} (CompositeImplicitAutograd)", "", 0)


def place_of(function: Any) -> CodePlace:
    """The place of a function or method, through partials and factories."""
    inner, detail = _seen_through(function)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__).replace(".<locals>", "")
    name = _table_entry(inner) or name if name == "<lambda>" else name
    if code is None:
        return CodePlace(name, "", 0, detail)
    return CodePlace(name, _shown_file(code.co_filename), code.co_firstlineno, detail)


NO_RETURN = "no return"
"""The words that begin the error of a call that does not return; the limit and the function in which it stays follow."""
_RULE_FOLDERS = ("torch/distributed/tensor/", "torch/_decomp/", "torch/_prims", "torch/_refs/")
"""Where torch's rules and decompositions stand: a call that stays in other parts of torch, such as a compiler, is slow."""
_OURS = tuple(str(Path(package.__file__ or "").parent) + os.sep for package in (localtensor, strategies))
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


def stuck_place(codes: Sequence[CodeType]) -> CodePlace | None:
    """The innermost function of a rule or a decomposition, of torch or of a user, in which a call stays.

    None where the call stays in a function of ours or in another part of torch: that is slow, and says nothing about a rule.
    """
    for code in reversed(codes):
        file = _shown_file(code.co_filename)
        is_rule = file.startswith(_RULE_FOLDERS)
        if code.co_filename.startswith(_OURS) or (file.startswith("torch/") and not is_rule):
            return None
        if is_rule or not code.co_filename.startswith(("<", *_INSTALLED)):
            return CodePlace(code.co_name, file, code.co_firstlineno)
    return None


def rule_limit(seconds: float) -> TimeLimit:
    """A limit of processor time for calls that may stay in a rule; other calls may take longer."""
    return TimeLimit(seconds, lambda codes: stuck_place(codes) is not None)


def no_return_error(stuck: DoesNotReturn) -> str:
    """The error of a call that a `rule_limit` has interrupted."""
    return f"{NO_RETURN} within {stuck.seconds:g} s of processor time from {stuck_place(stuck.codes)}"


def refusal_text(error: str) -> str:
    """The reason of a finding where every rank raises, or none returns."""
    stays = error.startswith(NO_RETURN)
    said = f"no rank returns{error.removeprefix(NO_RETURN)}" if stays else f"every rank raises {error}"
    return f"{said}; the op takes the whole tensors"


def without_numbers(error: str) -> str:
    """An error with `#` for each number, and for each list of them: a fault has one text in tensors of any shape.

    >>> without_numbers("its piece has shape (2, 1), S(0) of (2, 1, 1) is (1, 1, 1)")
    'its piece has shape (#), S(#) of (#) is (#)'
    """
    lists = re.sub(r"([(\[])#(, ?#)*,?([)\]])", r"\1#\3", re.sub("-?[0-9]+", "#", error))
    return re.sub(r"(?<!\w)([(\[])([)\]])", r"\1#\2", lists)  # no dims at all: but for `amax()`, a function


def no_return_place(reason: str) -> CodePlace | None:
    """The function in which a call stays, by the reason of a finding; None where the reason is another one."""
    found = re.search(r"returns? within [\d.]+ s of processor time from (\S+) \(([^:()]+):(\d+)\)", reason)
    return CodePlace(found[1], found[2], int(found[3])) if found else None


def raising_place(trace: str) -> CodePlace | None:
    """The innermost function of DTensor in the traceback of an error, by its module and its name; None where there is none."""
    frames = re.findall(r'File "([^"]*[/\\]torch[/\\]distributed[/\\]tensor[/\\][^"]*)", line (\d+), in (\S+)', trace)
    if not frames:
        return None
    file, line, name = frames[-1]
    module = file.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return CodePlace(f"{module}.{name}", _shown_file(file), int(line))


def _shown_file(name: str) -> str:
    _, found, rest = name.replace("\\", "/").rpartition("/torch/")
    return f"torch/{rest}" if found else name.replace("\\", "/").rpartition("/")[2]


def _seen_through(function: Any) -> tuple[Any, str]:
    """The innermost strategy that a closure holds, and the name of the list of rules that it holds, or ""."""
    detail = ""
    for _ in range(8):
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):  # register_sharding wraps the user's function so
            function = next(filter(inspect.isfunction, function.args), function.func)
            continue
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "original" in names and function.__closure__:  # a patch of ours, which has the name of what it calls
            function = function.__closure__[names.index("original")].cell_contents
            continue
        held = list(_held(function))
        listed = [name for value in held if isinstance(value, list) and (name := _global_name(function, value))]
        detail = listed[0] if listed else detail
        factory = getattr(function, "__qualname__", "").rpartition("<locals>")[0]
        inner = [v for v in held if inspect.isfunction(v) and v.__module__.startswith("torch.") and v is not function]
        inner = [v for v in inner if not v.__qualname__.startswith(factory)] if factory else []  # not its helpers
        if len(inner) != 1:
            return function, detail
        function = inner[0]
    return function, detail


def _held(function: Any) -> Iterator[Any]:
    """What a closure holds, and the defaults of its parameters."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()


def _global_name(function: Any, value: list[Any]) -> str:
    """The name of this very list in the function's module; `A + B` for a concatenation; else how it prints."""
    scope = vars(sys.modules.get(function.__module__, torch))
    exact = [name for name, other in scope.items() if other is value]
    if exact:
        return exact[0]
    return str(value) if value else ""


def _table_entry(function: Any) -> str:
    """The entry that holds this very function in a table of its module, `dim_maps[squeeze]`, or ""."""
    for name, table in vars(sys.modules.get(function.__module__, torch)).items():
        if isinstance(table, dict):
            for key, value in table.items():
                if value is function:
                    return f"{name}[{getattr(key, '__name__', key)}]"
    return ""


def dispatcher_place() -> CodePlace:
    """The part of the dispatcher that makes DTensors of the ranks' results."""
    dispatcher: Any = type(DTensor._op_dispatcher)
    return place_of(getattr(dispatcher, "_dispatch_fast_path_python_tail", dispatcher.wrap))


def tracer_place() -> CodePlace:
    """The part of DTensor that traces a decomposition once for the placements."""
    return place_of(DecompShardingStrategy._propagate_through_decomp)


def arguments_place() -> CodePlace:
    """The part of the dispatcher that takes a plain tensor among DTensors as a replica, or refuses it."""
    dispatcher: Any = type(DTensor._op_dispatcher)
    return place_of(getattr(dispatcher, "_try_replicate_spec_for_scalar_tensor", dispatcher.unwrap_to_op_info))


def native_dispatcher_place() -> CodePlace:
    """The part of the dispatcher that is native code, and makes the key of a call before any rule is looked for."""
    return CodePlace("DTensor's dispatch of a call (C++)", "", 0)
