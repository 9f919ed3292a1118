"""A script of plain torch that shows under torchrun where a parallel program first differs from one device.

It imports the functions that `compare` was given, by module and name; a lambda or a function inside of a function is copied
with the values that it closes over, if their text makes them again.
"""

from __future__ import annotations

import ast
import inspect
import reprlib
import sys
import textwrap
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from localtensor.testing.compare.names import NameMap
from localtensor.testing.compare.programs import TrainingProgram
from localtensor.testing.compare.watch import Key

_OURS = {
    "FunctionModel": "Function", "parallel_function": "made_parallel", "_Shortened": "one_layer_each", "_Narrowed": "narrowed",
}  # fmt: skip
"""What stands in the script for a function or class of `compare` itself."""


class NoScript(Exception):
    """A program of which no script can be written; the text says why."""


def script_of(program: TrainingProgram, key: Key, bound: float, report: str, names: NameMap | None = None) -> str:
    """The script: it trains both programs, and ends with exit code 1 if the value `key` differs by more than `bound`.

    `names` are those of the ranks, if they call parameters or modules otherwise.

    Raises `NoScript` for a function that cannot be imported or copied.
    """
    writer = _Writer()
    given = {name: writer.expression(getattr(program, name)) for name in ("build", "parallelize", "batch")}
    given |= dict.fromkeys(("loss", "optimizer"), "None")
    given |= {
        name: writer.expression(value)
        for name, value in (("loss", program.loss), ("optimizer", program.optimizer))
        if value is not None
    }
    functions = "\n".join([*writer.lines, *(f"{name} = {text}" for name, text in given.items())])
    summary = textwrap.indent(report.replace("\\", "\\\\").replace('"""', "'''"), "    ").strip()
    constants = (
        f"MESH = {dict(program.mesh)!r}\nBATCH_AXES = {program.batch_axes!r}\nSTEPS, SEED, BOUND = "
        f"{program.steps}, {program.seed}, {bound!r}\n"
        f"STEP, KIND, NAME, CALL, LEAF = {tuple(key)!r}  # {key}\n" + _names_of(key, names)
    )
    template = (Path(__file__).parents[1] / "templates" / "compare_torchrun.py.txt").read_text(encoding="utf-8")
    for mark, text in (
        ("REPORT", summary),
        ("RANKS", str(program.ranks)),
        ("CONSTANTS", constants),
        ("FUNCTIONS", functions),
    ):
        template = template.replace(f"@{mark}@", text)
    return template


def _names_of(key: Key, names: NameMap | None) -> str:
    """The constants for the names of a value on both sides: several if it is put together, along DIM, in these shares."""
    alone: tuple[str, ...] = (key.name,)
    there, dim, shares = alone, 0, tuple[int, ...]()
    if names is not None:
        of_module = key.kind in ("input", "output", "gradient of the output")
        own = names.modules if of_module else names.parameters
        there = (next((name for name, other in own.items() if other == key.name), key.name),)
        for one in names.fused if not of_module else ():
            if one.name == key.name:
                dim, shares = one.dim, one.sizes
                alone, there = (one.parts, there) if one.on_ranks else (alone, one.parts)
    return f"ALONE, ON_RANKS, DIM, SHARES = {alone!r}, {there!r}, {dim}, {shares!r}  # the names on each side"


class _Writer:
    """Writes functions as text; `lines` define what the texts need."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[int, str] = {}
        self._modules: dict[str, str] = {}

    def expression(self, value: Any) -> str:
        """An expression that makes this value again.  Raises `NoScript`."""
        if isinstance(value, partial):
            parts = [self.expression(one) for one in (value.func, *value.args)]
            parts += [f"{name}={self.expression(one)}" for name, one in value.keywords.items()]
            return f"partial({', '.join(parts)})"
        if isinstance(value, list | tuple | dict | str | bool | int | float | type(None) | torch.dtype):
            return self._literal(value)
        if id(value) in self._known:
            return self._known[id(value)]
        if (ours := _OURS.get(getattr(value, "__qualname__", ""))) is not None and _is_ours(value):
            return ours
        if is_dataclass(value) and _is_ours(type(value)):  # a program that was made smaller
            parts = [self.expression(getattr(value, one.name)) for one in fields(value)]
            return f"partial({_OURS[type(value).__qualname__]}, {', '.join(parts)})"
        if (found := _importable(value)) is not None:
            module, name = found
            return f"{self._module(module)}.{name}"
        if isinstance(value, FunctionType):
            return self._copied(value)
        if isinstance(value, Tensor | tuple | dict):
            raise NoScript(f"{reprlib.repr(value)} is a value, and a script needs a function that makes it")
        raise NoScript(f"{reprlib.repr(value)} is neither a function nor a class that can be imported")

    def _literal(self, value: Any) -> str:
        try:
            if isinstance(value, torch.dtype) or ast.literal_eval(repr(value)) == value:
                return repr(value)
        except (ValueError, SyntaxError):
            pass
        raise NoScript(f"{value!r} has no text that makes it again")

    def _module(self, module: str) -> str:
        """The name in the script of an imported module."""
        if module not in self._modules:
            name = self._modules[module] = f"module_{len(self._modules)}"
            self.lines += [f"{name} = importlib.import_module({module!r})"]
            root = _root_of(module)
            if root is not None:
                self.lines.insert(-1, f"sys.path.insert(0, {root!r})")
        return self._modules[module]

    def _copied(self, function: FunctionType) -> str:
        """The name of a copy of a function, in the namespace of its module."""
        text = _source_of(function)
        module = _module_of(function)
        closed = {
            name: self.expression(cell.cell_contents)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        }
        name = self._known[id(function)] = f"function_{len(self._known)}"
        namespace = f"{{**vars({self._module(module)}), {', '.join(f'{n!r}: {e}' for n, e in closed.items())}}}"
        if isinstance(ast.parse(text).body[0], ast.FunctionDef):
            self.lines += [f"scope = {namespace}", f"exec({text!r}, scope)", f"{name} = scope[{function.__name__!r}]"]
        else:
            self.lines += [f"{name} = eval({text!r}, {namespace})"]
        return name


def _is_ours(value: Any) -> bool:
    return str(value.__module__).startswith("localtensor.testing.compare") and value.__qualname__ in _OURS


def _module_of(value: Any) -> str:
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module not in sys.modules:
        raise NoScript(f"{value!r} belongs to no module that can be imported")
    if module == "__main__":
        file = getattr(sys.modules[module], "__file__", None)
        if file is None:
            raise NoScript(f"{value!r} was typed in, and stands in no file")
        return Path(file).stem
    return module


def _importable(value: Any) -> tuple[str, str] | None:
    """The module and name under which a function or class is found; None if it is not."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return (_module_of(value), name) if found is value else None


def _root_of(module: str) -> str | None:
    """The folder from which a module is imported, if it is the user's."""
    loaded = sys.modules.get(module) or sys.modules["__main__"]
    file = getattr(loaded, "__file__", None)
    if file is None or module.partition(".")[0] in sys.stdlib_module_names or module.partition(".")[0] == "torch":
        return None
    path = Path(file).resolve()
    above = module.count(".") + (path.name == "__init__.py")
    return str(path.parents[above])


def _source_of(function: FunctionType) -> str:
    """The text of a lambda, or of a function with its decorators."""
    try:
        lines, first = inspect.findsource(function)
    except OSError:
        raise NoScript(f"{function.__qualname__} stands in no file") from None
    tree = ast.parse("".join(lines))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda | ast.FunctionDef) and _is_code(node, function.__code__)
    ]
    if len(found) != 1:
        raise NoScript(f"{len(found)} functions of line {first + 1} may be {function.__qualname__}")
    text = ast.get_source_segment("".join(lines), found[0], padded=True) or ""
    return f"({text.strip()})" if isinstance(found[0], ast.Lambda) else textwrap.dedent(text)


def _is_code(node: ast.Lambda | ast.FunctionDef, code: CodeType) -> bool:
    """Whether this part of the tree is what the code was made of."""
    if isinstance(node, ast.FunctionDef) and node.name != code.co_name:
        return False
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    if first != code.co_firstlineno or isinstance(node, ast.Lambda) != (code.co_name == "<lambda>"):
        return False
    if isinstance(node, ast.FunctionDef):
        return True
    made = next(one for one in compile(ast.Expression(node), "", "eval").co_consts if isinstance(one, CodeType))
    return _used(made) == _used(code)


def _used(code: CodeType) -> tuple[object, ...]:
    """Its own names, those from outside (alone a name that is closed over is global), and constants."""
    constants = [repr(one) for one in code.co_consts if not isinstance(one, CodeType)]
    return code.co_varnames, {*code.co_names, *code.co_freevars}, sorted(constants)
