"""A module as the statements at its top level, by the names that they bind."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scoped = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import binds a name to: a module, or `name` in it.

    `base` is the folder from which a relative import starts, and None for an absolute one.
    """

    dotted: str
    base: str | None
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A statement at the top level of a module; compared by identity."""

    path: str
    index: int
    node: ast.stmt
    binds: frozenset[str]

    @property
    def label(self) -> str:
        """What to call it: the name that it binds, if it is one."""
        return next(iter(self.binds)) if len(self.binds) == 1 else ""

    @property
    def lines(self) -> range:
        """The lines that it stands on, decorators included."""
        node = self.node
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        return range(first, (node.end_lineno or first) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """The units of a file, those that bind each name, and what each import in it binds, at its top level or within."""

    path: str
    units: tuple[Unit, ...]
    binders: dict[str, tuple[Unit, ...]]
    imports: dict[str, tuple[Imported, ...]]
    """By the name that an import at the top level, or within an `if` or `try` there, binds."""
    stars: tuple[Imported, ...]
    wanted: tuple[Imported, ...]
    """Every import of the file, those in functions too."""


def module_of(path: str, tree: ast.Module) -> Module:
    body = [node for node in tree.body if not (is_text(node) or _is_main(node))]
    units = tuple(Unit(path, i, node, frozenset(bound([node]))) for i, node in enumerate(body))
    binders: dict[str, tuple[Unit, ...]] = {}
    for unit in units:
        for name in unit.binds:
            binders[name] = (*binders.get(name, ()), unit)
    imports: dict[str, tuple[Imported, ...]] = {}
    stars: list[Imported] = []
    for node in here(body):
        for name, target in imported(node, path):
            if name == "*":
                stars.append(target)
            else:
                imports[name] = (*imports.get(name, ()), target)
    wanted = tuple(target for node in ast.walk(tree) for _, target in imported(node, path))
    return Module(path, units, binders, imports, tuple(stars), wanted)


def imported(node: ast.AST, path: str) -> Iterator[tuple[str, Imported]]:
    """Each name that an import of the file at `path` binds, `*` for all, and to what."""
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


def here(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes that belong to the scope of these statements: not what is within functions and classes."""
    stack: list[ast.AST] = list(reversed(body))
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Scoped):
            stack.extend(reversed([*node.decorator_list, *_outside(node)]))
        elif isinstance(node, ast.Lambda):
            stack.extend(d for d in [*node.args.defaults, *node.args.kw_defaults] if d is not None)
        else:
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def bound(body: list[ast.stmt], path: str = "") -> set[str]:
    """The names that these statements bind in their own scope."""
    names: set[str] = set()
    inner = {id(n) for node in here(body) if isinstance(node, COMPREHENSIONS) for n in _targets(node)}
    for node in here(body):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if id(node) not in inner:
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name):
                names.add(name)
            case ast.MatchStar(name=str() as name) | ast.MatchMapping(rest=str() as name):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                names.update(name for name, _ in imported(node, path) if name not in ("", "*"))
    return names


def chain_of(node: ast.AST) -> list[str]:
    """The names of `a.b.c`; empty if the node is anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or any other string that nobody uses."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_main(node: ast.stmt) -> bool:
    """Whether a statement is what only a script does."""
    match node:
        case ast.If(
            test=ast.Compare(
                left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]
            ),
            orelse=[],
        ):
            return True
    return False


def _outside(node: Scoped) -> list[ast.AST]:
    """What of a definition is evaluated where it stands: defaults, annotations, base classes."""
    if isinstance(node, ast.ClassDef):
        return [*node.bases, *node.keywords]
    return [node.args, *([node.returns] if node.returns else [])]


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    for generator in getattr(node, "generators", ()):
        yield from ast.walk(generator.target)
