"""A module as its top-level statements, by the names that they bind."""

from __future__ import annotations

import ast
import dis
import inspect
import posixpath
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Imported:
    """The target of an import: a module, or `name` in it.

    `base` is the folder from which a relative import starts, None for an absolute one.
    """

    dotted: str
    base: str | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Scopes:
    """The scopes of the names in a statement, by its compiled code; all other names are its locals."""

    binds: frozenset[str] = frozenset()
    """Names that it binds at the top level of its module."""
    rebound: frozenset[str] = frozenset()
    """Names that its functions bind there by `global`."""
    module: frozenset[str] = frozenset()
    """Names that are looked up in the module."""
    attributes: frozenset[str] = frozenset()
    """Names that are looked up in a class body that binds them, and only then in the module."""
    kept: frozenset[str] = frozenset()
    """Names that other code may use: parameters, class attributes, and locals that share a name with something else."""


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """A statement at the top level of a module; compared by identity."""

    path: str
    index: int
    node: ast.stmt
    binds: frozenset[str]
    scopes: Scopes = Scopes()

    @property
    def label(self) -> str:
        """The name that it binds; "" if it binds none or several."""
        return next(iter(self.binds)) if len(self.binds) == 1 else ""

    @property
    def lines(self) -> range:
        """The lines that it stands on, decorators included."""
        node = self.node
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        return range(first, (node.end_lineno or first) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """The statements of a file, those that bind each name, and its imports."""

    path: str
    units: tuple[Statement, ...]
    binders: dict[str, tuple[Statement, ...]]
    imports: dict[str, tuple[Imported, ...]]
    """By the name that an import at the top level, or within an `if` or `try` there, binds."""
    stars: tuple[Imported, ...]
    wanted: tuple[Imported, ...]
    """Every import of the file, those in functions too."""


def module_of(path: str, tree: ast.Module) -> Module:
    """The module at `path`, without docstrings and without its `if __name__ == "__main__"`."""
    body = [node for node in tree.body if not (is_string_statement(node) or _is_main(node))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scopes = [scopes_of(node) for node in body]
    units = tuple(Statement(path, i, node, scopes[i].binds, scopes[i]) for i, node in enumerate(body))
    binders: dict[str, tuple[Statement, ...]] = {}
    for unit in units:
        for name in unit.binds:
            binders[name] = (*binders.get(name, ()), unit)
    imports: dict[str, tuple[Imported, ...]] = {}
    stars: list[Imported] = []
    for node in _statements(body):
        for name, target in imports_of(node, path):
            if name == "*":
                stars.append(target)
            else:
                imports[name] = (*imports.get(name, ()), target)
    wanted = tuple(target for node in ast.walk(tree) for _, target in imports_of(node, path))
    return Module(path, units, binders, imports, tuple(stars), wanted)


def imports_of(node: ast.AST, path: str) -> Iterator[tuple[str, Imported]]:
    """Each name that an import of the file at `path` binds, `*` for all, and its target."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            yield alias.asname or whole, Imported(whole, None)
            if whole != alias.name:
                yield "", Imported(alias.name, None)
    elif isinstance(node, ast.ImportFrom):
        base = None
        if node.level:
            base = posixpath.dirname(path)
            for _ in range(node.level - 1):
                base = posixpath.dirname(base)
        for alias in node.names:
            name = "" if alias.name == "*" else alias.name
            yield alias.asname or alias.name, Imported(node.module or "", base, name)


def _statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """These statements and those nested in them that run in the same scope."""
    for node in body:
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            for name in ("body", "handlers", "cases", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, []))


BY_NAME = re.compile(r"(LOAD|STORE|DELETE)_(NAME|GLOBAL|FROM_DICT_OR_GLOBALS)")
COMPILER_NAMES = frozenset({"__annotate__", "__conditional_annotations__"})
"""Names that the compiler itself binds."""


def scopes_of(node: ast.stmt) -> Scopes:
    """The scopes of the names in a top-level statement.  It is compiled, never run."""
    whole = compile(ast.Module([node], []), "", "exec", dont_inherit=True, optimize=0)
    binds, rebound, module, attributes, kept, own = (set[str]() for _ in range(6))
    todo: list[tuple[CodeType, bool]] = [(whole, False)]
    while todo:
        code, late = todo.pop()
        function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        late = late or (function and (code.co_name == "<lambda>" or not code.co_name.startswith("<")))
        used = [(m, str(one.argval)) for one in dis.get_instructions(code) if (m := BY_NAME.fullmatch(one.opname))]
        stored = {name for m, name in used if m[1] != "LOAD"}
        if not function and code is not whole:  # the body of a class
            here = {name for m, name in used if m[1] != "LOAD" and m[2] == "NAME"}
            attributes |= here
            used = [(m, name) for m, name in used if m[2] != "NAME" or name not in here]
            stored -= here
        (rebound if late else binds).update(stored)
        module.update(name for _, name in used)
        variadic = [flag for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS) if code.co_flags & flag]
        kept.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + len(variadic)])
        own.update(code.co_varnames, code.co_cellvars, code.co_freevars)
        todo += [(inner, late) for inner in code.co_consts if isinstance(inner, CodeType)]
    kept |= attributes | (own & module)
    return Scopes(*map(frozenset, (binds - COMPILER_NAMES, rebound, module, attributes, kept)))


def may_be_among(name: str, names: Iterable[str]) -> bool:
    """Whether one of `names` may be that name: in a class, the compiler mangles `__name` to `_Class__name`."""
    return name in names or (name.startswith("__") and any(other.endswith(name) for other in names))


def chain_of(node: ast.AST) -> list[str]:
    """The names of `a.b.c`; empty if the node is anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def is_string_statement(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or another string without effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_main(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'"
