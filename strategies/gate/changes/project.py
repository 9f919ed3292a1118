"""A project's Python files, today and at a revision, and the source lines of registered rule functions.

A `Version` is the files at one time, and resolves dotted names among them.  A `Project` is the folder of the files.
"""

from __future__ import annotations

import ast
import functools
import posixpath
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch

from strategies.base.git import NoGit, NoRepository, Repository, blob_name, repository
from strategies.gate.changes.module_model import Module, module_of
from strategies.torch_api import dtensor


@dataclass(frozen=True, slots=True)
class FunctionPlace:
    """The first line of a function, decorators included; `name` is its qualified name."""

    file: str
    line: int
    name: str


ProjectFunctions = Mapping[str, Sequence[tuple[str, FunctionPlace]]]
"""The functions of each overload that are in the project, with their paths in it."""


def rule_functions(ops: Collection[str] | None = None) -> dict[str, list[FunctionPlace]]:
    """The registered rule functions of each overload, or of each of `ops`: the author's function first, then its
    wrappers."""
    found: dict[str, list[FunctionPlace]] = defaultdict(list)
    written: dict[int, tuple[FunctionPlace, ...]] = {}  # by identity: many ops share one function
    for (_, op), registered in dtensor.registered_functions().items():
        if ops is not None and str(op) not in ops:
            continue
        if id(registered) not in written:
            written[id(registered)] = tuple(dict.fromkeys(_written(registered, set())))
        found[str(op)] += [w for w in written[id(registered)] if w not in found[str(op)]]
    return dict(found)


def _written(registered: object, seen: set[int]) -> Iterator[FunctionPlace]:
    """`register_sharding` keeps the author's function in a partial, a single-dim strategy in `.func`; decorators wrap it."""
    if id(registered) in seen or isinstance(registered, type) or not callable(registered):
        return
    seen.add(id(registered))
    if isinstance(registered, functools.partial):
        inner = [*registered.args, *registered.keywords.values(), registered.func]
    elif isinstance(registered, MethodType):
        inner = [registered.__func__]
    elif isinstance(registered, FunctionType):
        inner = [getattr(registered, "__wrapped__", None), *_cells(registered)]
    else:
        inner = [getattr(registered, "func", None), type(registered).__call__]
    for value in inner:
        yield from _written(value, seen)
    if isinstance(registered, FunctionType):
        code = registered.__code__
        yield FunctionPlace(code.co_filename, code.co_firstlineno, registered.__qualname__)


def _cells(function: FunctionType) -> list[Any]:
    """The functions in a function's closure: that of a decorator's inner function holds the decorated one."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # an empty cell: the name was never bound
            continue
    return [v for v in values if isinstance(v, FunctionType | MethodType | functools.partial)]


Trees = dict[tuple[str, bytes, bytes], ast.Module | None]
STUB = "__init__.pyi"


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """A module: its file, or (`file` empty) a folder without an `__init__.py`."""

    file: str
    folder: str
    """The folder of its submodules; empty for a module that can have none."""


class Version:
    """The files of one version by path, with slashes, and the folders of its import path, in order.

    `shared` caches parsed files by content, for all versions that are given the same.
    """

    def __init__(self, texts: Mapping[str, bytes], roots: Sequence[str], shared: Trees) -> None:
        self.texts, self.roots = texts, tuple(roots)
        self.unparsed: set[str] = set()
        self._folders = {folder for path in texts for folder in parent_folders(path)}
        self._modules: dict[str, Module] = {}
        self._shared = shared

    def module(self, path: str) -> Module:
        """The module in that file.  If the file is no Python, it has no statements, and its path is in `unparsed`."""
        if path not in self._modules:
            tree = self.tree(path)
            if tree is None:
                self.unparsed.add(path)
            self._modules[path] = module_of(path, tree or ast.Module([], []))
        return self._modules[path]

    def tree(self, path: str) -> ast.Module | None:
        """The tree of that file.  For a lazy `__init__.py` the imports of its stub come first, as they count less."""
        text, stub = self.texts[path], b""
        if path.endswith("__init__.py") and b"__getattr__" in text:
            stub = self.texts.get(f"{path}i", b"")
        if (path, text, stub) not in self._shared:
            self._shared[path, text, stub] = _parsed(text, stub)
        return self._shared[path, text, stub]

    def find(self, dotted: str, base: str | None) -> ModulePlace | None:
        """The module of that name; `base` is the folder that a relative import starts from, None for an absolute one."""
        if base is not None and not dotted:
            return self._at(base) if base else None
        relative = dotted.replace(".", "/")
        for root in self.roots if base is None else (base,):
            place = self._at(posixpath.join(root, relative) if root else relative)
            if place is not None:
                return place
        return None

    def below(self, place: ModulePlace, name: str) -> ModulePlace | None:
        """A submodule."""
        return self._at(posixpath.join(place.folder, name)) if place.folder else None

    def _at(self, path: str) -> ModulePlace | None:
        if f"{path}/__init__.py" in self.texts:
            return ModulePlace(f"{path}/__init__.py", path)
        if f"{path}.py" in self.texts:
            return ModulePlace(f"{path}.py", "")
        return ModulePlace("", path) if path in self._folders else None


def _parsed(text: bytes, stub: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for instance of an invalid escape in a user's file
        try:
            tree = ast.parse(text)
            compile(tree, "", "exec", dont_inherit=True)  # finds errors such as `return` outside of a function
            offered = [node for node in ast.parse(stub).body if isinstance(node, ast.Import | ast.ImportFrom)]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    for node in offered:
        node.lineno = node.end_lineno = 0  # on no line of the file
    return ast.Module([*offered, *tree.body], [])


def parent_folders(path: str) -> Iterator[str]:
    """The folders that the file lies in."""
    folder = posixpath.dirname(path)
    while folder:
        yield folder
        folder = posixpath.dirname(folder)


TORCH, JUDGED = Path(torch.__file__).resolve().parent, "distributed/tensor"
"""The folder of DTensor's rules; the rest of torch is outside, also where torch is the project."""


@dataclass(frozen=True, slots=True)
class Project:
    """A folder and its Python files, by path within it; `git` is None where there is no repository."""

    top: Path
    files: tuple[str, ...]
    git: Repository | None = None

    def path_of(self, file: str | None) -> str:
        """A file's path within the project; empty if it is none of its Python files."""
        if not file or not Path(file).is_absolute():
            return ""
        for path in (Path(file), Path(file).resolve()):
            if path.is_relative_to(self.top) and path.relative_to(self.top).as_posix() in self.files:
                return path.relative_to(self.top).as_posix()
        return ""

    def roots(self, modules: Iterable[str], folder: Path | None = None) -> list[str]:
        """The project's folders on the import path: those of these modules, then those on `sys.path`."""
        places = [str(folder)] if folder else []
        places += [_root(name, sys.modules[name].__file__ or "") for name in modules if name in sys.modules]
        places += [entry or "." for entry in sys.path]
        found = []
        for place in places:
            path = Path(place).resolve()
            if place and path.is_relative_to(self.top):
                relative = path.relative_to(self.top).as_posix()
                found.append("" if relative == "." else relative)
        return list(dict.fromkeys(found))

    def today(self, roots: list[str], trees: Trees) -> Version:
        return Version({path: (self.top / path).read_bytes() for path in self.files}, roots, trees)

    def at(self, commit: str, now: Version, trees: Trees) -> Version:
        """The same at a commit of its repository."""
        assert self.git is not None, "only a project in a repository has commits"
        blobs = {path: blob for path, blob in self.git.blobs(commit).items() if is_project_file(self.top, path)}
        same = {p for p, blob in blobs.items() if p in now.texts and blob_name(now.texts[p], blob) == blob}
        old = self.git.contents(sorted({blob for path, blob in blobs.items() if path not in same}))
        texts = {path: now.texts[path] if path in same else old[blob] for path, blob in blobs.items()}
        return Version(texts, now.roots, trees)


def project_of_repository(git: Repository) -> Project:
    """The project of all Python files that git knows or would add."""
    return Project(git.top, tuple(path for path in git.files() if is_project_file(git.top, path)), git)


def is_project_file(top: Path, path: str) -> bool:
    """Whether a path is a Python file of the project, or a package's stub, and not in an environment within it."""
    if not path.endswith((".py", STUB)) or "site-packages" in path.split("/"):
        return False
    file = top / path
    return not file.is_relative_to(TORCH) or file.is_relative_to(TORCH / JUDGED)


def project_of_module(name: str) -> Project | None:
    """The project of an imported module: its repository, or its top-level package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return None
    found, root = project_of_file(file), _root(name, str(Path(file).resolve()))
    if found or not root:
        return found
    top, package = Path(root), name.partition(".")[0]
    paths = [path.relative_to(top).as_posix() for path in sorted((top / package).rglob("*.py*"))]
    paths = [path for path in paths if path.endswith((".py", STUB))]
    return Project(top, (*paths, *([f"{package}.py"] if (top / f"{package}.py").is_file() else [])))


def project_of_file(file: str) -> Project | None:
    """The project of a file's repository; None where git does not know the file."""
    try:
        project = project_of_repository(repository(Path(file).resolve().parent))
    except (NoRepository, NoGit):
        return None
    return project if project.path_of(file) else None


def _root(name: str, file: str) -> str:
    """The folder from which a module was imported, by its name and its file; empty if the two do not fit."""
    stem = posixpath.splitext(Path(file).as_posix())[0].removesuffix("/__init__")
    parts = name.replace(".", "/")
    return stem.removesuffix(f"/{parts}") if stem.endswith(f"/{parts}") else ""


def start_files(project: Project, module: str | None, written: ProjectFunctions) -> list[str]:
    """The files from which rules are reached: that of the rules module, and those of the rule functions, sorted."""
    files = {path for many in written.values() for path, _ in many}
    if module is not None:
        files.add(project.path_of(getattr(sys.modules.get(module), "__file__", None)))
    return sorted(files - {""})
