"""The resolution of a name in a module, through imports and re-exports, to a statement of the project or a name outside."""

from __future__ import annotations

import ast
import builtins
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from strategies.gate.changes.module_model import Imported, Module, Statement, chain_of
from strategies.gate.changes.project import ModulePlace, Version, parent_folders

MOST_IMPORTS = 40
"""Imports that the resolution of one name follows; it ends cycles of imports."""
MODULE_ATTRIBUTES = frozenset(
    {"__name__", "__package__", "__spec__", "__doc__", "__builtins__", "__debug__", "__annotations__"}
)


@dataclass(frozen=True, slots=True)
class Meaning:
    """One of: statements of the project that bind the name, a dotted name outside, a module of the project as a value,
    or (`unknown`) an unresolved name.  `rest` are the attributes that follow the name."""

    units: tuple[Statement, ...] = ()
    outside: str = ""
    module: str = ""
    unknown: str = ""
    rest: tuple[str, ...] = ()


class NameResolver:
    """Resolves names in one version."""

    def __init__(self, version: Version) -> None:
        self.version = version

    def mean(self, module: Module, chain: Sequence[str], depth: int = 0) -> list[Meaning]:
        """The meanings of a chain `a.b.c` at the top level of a module: several under an `if` or `try`."""
        name, rest = chain[0], tuple(chain[1:])
        binders = module.binders.get(name, ())
        if not binders or depth > MOST_IMPORTS:
            return [self._unbound(module, name, rest, depth)]
        if all(isinstance(unit.node, ast.Import | ast.ImportFrom) for unit in binders):
            target = module.imports[name][-1]
            place = self.version.find(target.dotted, target.base)
            own = place is not None and place.file == module.path and target.name == name  # from . import name
            part = self.version.below(place, name) if place is not None and own else None
            return self._inside(part, rest, depth + 1, name) if part else self.behind(target, rest, depth + 1)
        alias = _alias(binders)
        if alias:
            return self.mean(module, [*alias, *rest], depth + 1)
        found = [Meaning(units=binders, rest=rest)]
        for target in module.imports.get(name, ()):
            found += self.behind(target, rest, depth + 1)
        return found

    def behind(self, target: Imported, rest: tuple[str, ...], depth: int = 0) -> list[Meaning]:
        """The meanings of an import with the attributes `rest`."""
        place = self.version.find(target.dotted, target.base)
        if place is None:
            named = f"{'.' if target.base is not None else ''}{target.dotted}"
            whole = ".".join(filter(None, [named, target.name, *rest]))
            return [Meaning(outside=whole) if target.base is None else Meaning(unknown=whole)]
        names = (target.name, *rest) if target.name else rest
        return self._inside(place, names, depth, target.dotted)

    def _inside(self, place: ModulePlace, names: tuple[str, ...], depth: int, dotted: str) -> list[Meaning]:
        if not names:
            return [Meaning(module=place.file or place.folder)]
        if place.file:
            module = self.version.module(place.file)
            if names[0] in module.binders or self._starred(module, names[0], depth) is not None:
                return self.mean(module, names, depth + 1)
        below = self.version.below(place, names[0])
        if below is not None:
            return self._inside(below, names[1:], depth + 1, f"{dotted}.{names[0]}")
        if names[0] in MODULE_ATTRIBUTES:
            return [Meaning(outside=f"builtins.{names[0]}")]
        if not place.file:  # a folder that other projects may put modules in, too
            return [Meaning(outside=".".join([dotted, *names]))]
        return [Meaning(unknown=".".join(names))]

    def _unbound(self, module: Module, name: str, rest: tuple[str, ...], depth: int) -> Meaning:
        starred = self._starred(module, name, depth)
        if starred is not None:
            return Meaning(starred.units, starred.outside, starred.module, starred.unknown, (*starred.rest, *rest))
        if hasattr(builtins, name) or name in MODULE_ATTRIBUTES or name == "__file__":
            return Meaning(outside=".".join(["builtins", name, *rest]))
        outside = [star.dotted for star in module.stars if self.version.find(star.dotted, star.base) is None]
        if outside:
            return Meaning(outside=".".join([*outside, "*", name, *rest]))
        return Meaning(unknown=name, rest=rest)

    def _starred(self, module: Module, name: str, depth: int) -> Meaning | None:
        """The meaning that a star import gives the name; the last one wins."""
        if depth > MOST_IMPORTS:
            return None
        for star in reversed(module.stars):
            place = self.version.find(star.dotted, star.base)
            if place is None or not place.file or place.file == module.path:
                continue
            other = self.version.module(place.file)
            listed = _listed(other)
            public = name in listed if listed is not None else not name.startswith("_")
            if public and (name in other.binders or self._starred(other, name, depth + 1) is not None):
                return self.mean(other, [name], depth + 1)[0]
        return None


def imported_files(version: Version, start: Sequence[str], *, whole: bool = False) -> list[str]:
    """The files that are imported with these files, themselves included, sorted.

    `whole` includes every file of their packages, for a module that imports by computed names.
    """
    seen: set[str] = set()
    folders = tuple({posixpath.dirname(path) + "/" for path in start})
    todo = [*start, *(p for p in version.texts if whole and p.startswith(folders) and p.endswith(".py"))]
    while todo:
        path = todo.pop()
        if path in seen or path not in version.texts:
            continue
        seen.add(path)
        todo.extend(f"{folder}/__init__.py" for folder in parent_folders(path))
        for target in version.module(path).wanted:
            todo.extend(_files(version, target))
    return sorted(seen)


def _files(version: Version, target: Imported) -> list[str]:
    """The files that an import runs: its packages, the module, and a submodule that it names."""
    parts = target.dotted.split(".") if target.dotted else []
    places = [version.find(".".join(parts[: i + 1]), target.base) for i in range(len(parts))]
    if not parts:
        places = [version.find("", target.base)]
    last = places[-1]
    if last is not None and target.name:
        places.append(version.below(last, target.name))
    return [place.file for place in places if place is not None and place.file]


def _alias(binders: tuple[Statement, ...]) -> list[str]:
    """The chain that a name is an alias for: `SCALE = torch.ops.mine.scale`."""
    if len(binders) != 1:
        return []
    match binders[0].node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            chain = chain_of(value) if value is not None else []
            return [] if chain[:1] == [name] else chain
    return []


def _listed(module: Module) -> list[str] | None:
    """The names in `__all__`, where it is one list of strings."""
    binders = module.binders.get("__all__", ())
    if len(binders) == 1 and isinstance(binders[0].node, ast.Assign):
        try:
            listed = ast.literal_eval(binders[0].node.value)
        except ValueError:
            return None
        return [str(name) for name in listed]
    return None
