"""What the rules of overloads depend on in one version of a project; for today's version also as digests.

A digest covers all that the verdict on an overload depends on: it is the same only while nothing of that has changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strategies.gate.changes import project as changed_project
from strategies.gate.changes.dependency_slice import RuleNames, Slice, Slicer, roots_of
from strategies.gate.changes.index import StatementIndex
from strategies.gate.changes.module_model import Function, Statement, is_string_statement
from strategies.gate.changes.name_resolution import imported_files
from strategies.gate.changes.normal_form import UNBOUND
from strategies.gate.changes.project import Project, ProjectFunctions, Version, rule_functions, start_files

FILE_READERS = (
    "builtins.open", "builtins.__file__", "io.open", "importlib.resources", "pkgutil.get_data", "glob.", "ctypes.",
    "os.listdir", "os.scandir", "os.walk", "subprocess.", "sqlite3.", "numpy.load", "numpy.fromfile", "torch.load",
    "torch.jit.load", "torch.ops.load_library", "torch.utils.cpp_extension", "torch.classes.load_library",
)  # fmt: skip
"""Names by which code reads files of any kind."""
FILE_METHODS = (".read_text", ".read_bytes", ".open", ".iterdir", ".rglob")
"""Methods of paths that read files."""
COMPUTED_IMPORTS = (
    "importlib.import_module", "builtins.__import__", "pkgutil.walk_packages", "pkgutil.iter_modules", "sys.modules",
    "importlib.util", "runpy.",
)  # fmt: skip
"""Names by which modules are imported by computed names."""
IMPORTERS = frozenset({"importlib", "pkgutil", "runpy"})
"""Modules that import others by computed names: then every file of a package may be imported."""
NATIVE = ("torch.ops.load_library", "torch.utils.cpp_extension", "ctypes.")
"""Names by which code loads native ops."""
TORCH_NAMESPACES = ("aten.", "prim.", "prims.", "c10d.", "_c10d_functional.")
"""The namespaces of torch's own ops."""


@dataclass(frozen=True, slots=True)
class RuleDependencies:
    """What an overload's rule depends on: a slice, why files of any kind matter ("" if they do not), and doubts.

    `lost` are statements with its rule functions to which no registration leads.  `foreign`: neither the project nor
    torch defines the op.
    """

    slice: Slice
    reads: str
    doubts: tuple[str, ...]
    lost: tuple[Statement, ...]
    foreign: bool = False


class VersionView:
    """The part of a version that the files `start` import; `sampler` is the file whose `samples` gives the calls of user's ops."""

    def __init__(
        self, version: Version, start: Sequence[str], written: ProjectFunctions | None = None, sampler: str = ""
    ) -> None:
        self.version, self.written, self.sampler = version, written or {}, sampler
        self.files = imported_files(version, start)
        wanted = {target.dotted.partition(".")[0] for path in self.files for target in version.module(path).wanted}
        if wanted & IMPORTERS:
            self.files = imported_files(version, start, whole=True)

    @functools.cached_property
    def index(self) -> StatementIndex:
        return StatementIndex(self.version, self.files)

    def functions(self, op: str) -> list[Statement]:
        """The statements that hold the overload's rule functions, by their lines: for today's version only."""
        return list(dict.fromkeys(unit for unit, _ in self._holding(op)))

    def makers(self, op: str) -> list[Statement]:
        """Those of them that are functions around the rule function."""
        made = [u for u, line in self._holding(op) if isinstance(u.node, Function) and line != u.lines.start]
        return list(dict.fromkeys(made))

    @functools.cached_property
    def _names(self) -> dict[str, frozenset[str]]:
        """The names of the statements that hold the rule functions of each overload."""
        return {
            op: frozenset(u.label for u in self.functions(op) if u.label and isinstance(u.node, Function))
            for op in self.written
        }

    def rules(self, op: str) -> RuleNames:
        """The names of its rule functions and of the others': for today's version only."""
        own = self._names.get(op, frozenset())
        return RuleNames(own, frozenset().union(*(many for other, many in self._names.items() if other != op)) - own)

    def _holding(self, op: str) -> Iterator[tuple[Statement, int]]:
        for path, w in self.written.get(op, ()):
            if path in self.version.texts:
                yield from ((u, w.line) for u in self.version.module(path).units if w.line in u.lines)

    def seen(
        self, op: str, rules: RuleNames, functions: Sequence[Statement] = (), lost: Sequence[Statement] = ()
    ) -> RuleDependencies:
        """What the overload depends on; `functions` hold its rule functions, if they are known.

        `lost` are further statements to start from, beside the registrations.
        """
        roots = roots_of(self.index, op)
        found = Slicer(self.index, roots, rules, functions, self._samples(op)).walk(lost)
        parts = {part.unit for part in found.parts}
        left = tuple(unit for unit in functions if unit not in parts)
        if left:
            return self.seen(op, rules, functions, left)
        doubts = list(found.doubts)
        if lost:
            doubts.append("no statement was found that registers its rule")
        computed = next((name for name in sorted(found.outside) if name.startswith(COMPUTED_IMPORTS)), "")
        if computed:
            doubts.append(f"it uses `{_short(computed)}`")
        foreign = not roots.defines and not op.startswith(TORCH_NAMESPACES)
        return RuleDependencies(found, self._reads(found, foreign), tuple(doubts), tuple(lost), foreign)

    def _samples(self, op: str) -> list[Statement]:
        """The statements that bind the function of the rules module which gives the calls of this op."""
        if self.sampler not in self.version.texts or op.startswith(TORCH_NAMESPACES):
            return []
        found = self.index.names.mean(self.version.module(self.sampler), ("samples",))
        return [unit for meaning in found for unit in meaning.units]

    def libraries(self) -> set[str]:
        """The names of all that is imported from outside of the project."""
        every = {target for path in self.files for target in self.version.module(path).wanted if target.base is None}
        return {target.dotted for target in every if self.version.find(target.dotted, None) is None}

    def _reads(self, found: Slice, foreign: bool) -> str:
        """Why files of any kind may matter; empty if they do not."""
        names = sorted(found.outside)
        reads = next((name for name in names if name.startswith(FILE_READERS) or name.endswith(FILE_METHODS)), "")
        if not reads and foreign:
            every = (name for unit in self.index.units for name, _ in self.index.form(unit).outside)
            reads = next((name for name in every if name.startswith(NATIVE)), "")
        if reads:
            return f"it reads files (`{_short(reads)}`)"
        return next((doubt for doubt in found.doubts if doubt.startswith(UNBOUND)), "")

    def whole(self) -> dict[str, str]:
        """Each file with a digest of all that it does."""
        trees = {path: self.version.tree(path) for path in self.files}
        return {path: _sha(_dump(tree) if tree else repr(self.version.texts[path])) for path, tree in trees.items()}


def _dump(node: object) -> str:
    """The tree as text, without positions and unused string statements."""
    if isinstance(node, ast.AST):
        fields = ", ".join(f"{name}={_dump(value)}" for name, value in ast.iter_fields(node) if name != "kind")
        return f"{type(node).__name__}({fields})"
    if isinstance(node, list):
        return f"[{', '.join(_dump(item) for item in node if not (isinstance(item, ast.AST) and is_string_statement(item)))}]"
    return repr(node)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _short(name: str) -> str:
    return name.removeprefix("builtins.").lstrip(".")


def functions_in_project(project: Project) -> ProjectFunctions:
    """The registered rule functions that lie in the project, with their paths in it."""
    written = rule_functions()
    paths = {file: project.path_of(file) for file in {w.file for many in written.values() for w in many}}
    found = {op: [(paths[w.file], w) for w in many if paths[w.file]] for op, many in written.items()}
    return {op: many for op, many in found.items() if many}


PURE = frozenset({
    "__future__", "abc", "array", "ast", "bisect", "builtins", "cmath", "collections", "contextlib", "copy",
    "dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "inspect", "itertools", "logging", "math",
    "numbers", "operator", "re", "statistics", "string", "struct", "textwrap", "torch", "types", "typing", "warnings",
})  # fmt: skip
"""Modules whose results depend on arguments and on their version only, except for the names in `IMPURE`."""
IMPURE = (
    "builtins.input", "builtins.open", "builtins.hash", "builtins.id", "torch.cuda.", "torch.accelerator.",
    "torch.backends.", "torch.mps.", "torch.xpu.", "torch.hub.", "torch.distributed.get_", "torch.get_num_threads",
    "numpy.random.", "requests.",
)  # fmt: skip
"""Names by which code reads state outside of the project's text: a terminal, files, the machine, the run."""
CONSTANTS_OF_SYS = frozenset({"sys.version_info", "sys.maxsize", "sys.float_info"})
"""Names of other standard modules whose values follow from Python's version and the kind of machine."""
OUTSIDE = "outside of the project"


def rule_digests(module: str | None) -> Callable[[str], str | None]:
    """For each overload a digest of its rule function, all that it calls and reads, its registration and its op.

    The digest of torch's own rules (`module` None, or a rule outside of the module's project) is `OUTSIDE`: the version
    of torch identifies them.  None if the rule depends on unknown content: it reads files or the environment, or a
    library without a version.  The project is read once, at the first overload.
    """
    view = functools.cache(lambda: _view(module))
    return lambda op: _digest_of(view(), op)


def _view(module: str | None) -> VersionView | None:
    project = changed_project.project_of_module(module) if module else changed_project.project_of_file(torch.__file__)
    if project is None:
        return None
    written = functions_in_project(project)
    start = start_files(project, module, written)
    return VersionView(project.today(project.roots([module] if module else []), {}), start, written) if start else None


def _digest_of(view: VersionView | None, op: str) -> str | None:
    if view is None:
        return OUTSIDE
    seen = view.seen(op, view.rules(op), view.functions(op))
    if not seen.slice.parts:
        return OUTSIDE
    outside = seen.slice.outside
    versions = _versions({*outside, *(view.libraries() if seen.foreign else ())})
    if seen.reads or versions is None or not all(map(_follows, outside)):
        return None
    whole = sorted(view.whole().items()) if seen.doubts else []
    return _sha(repr([seen.slice.text, versions, whole]))


def _follows(name: str) -> bool:
    """Whether the value of this name follows from code and versions alone."""
    library = name.partition(".")[0]
    if name.startswith(".") or name in CONSTANTS_OF_SYS:
        return True
    return not name.startswith(IMPURE) and (library in PURE or library not in sys.stdlib_module_names)


def _versions(outside: Iterable[str]) -> list[tuple[str, str]] | None:
    """The versions of the libraries that these names come from, except torch; None if one has no fixed version."""
    found: dict[str, str] = {}
    for library in {name.partition(".")[0] for name in outside if not name.startswith(".")}:
        if library in {"torch", "builtins"} or library in sys.stdlib_module_names:
            continue
        module: Any = sys.modules.get(library)
        version = getattr(module, "__version__", None)
        file = getattr(module, "__file__", None) or ""
        if not isinstance(version, str) or "site-packages" not in Path(file).parts:
            return None
        found[library] = version
    return [("python", ".".join(map(str, sys.version_info[:3]))), *sorted(found.items())]
