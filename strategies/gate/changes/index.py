"""The normal forms of all statements of one version, and which of them change, call and register others."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from strategies.gate.changes.module_model import Function, Statement
from strategies.gate.changes.name_resolution import NameResolver
from strategies.gate.changes.normal_form import NormalForm, Normalizer, Reference, Token
from strategies.gate.changes.project import Version

REGISTERS = re.compile(r"(?:^|\.)(register\w*|custom_op|triton_op|impl\w*|define\w*)$")
"""The last part of the names of torch's functions that register an op, its kernels, or a rule."""
DEFINES = re.compile(
    r"(?:^|\.)(custom_op|triton_op|impl\w*|define\w*|register_(?:fake|kernel|autograd|vmap|torch_dispatch)\w*)$"
)
"""Those of them that register the op, and not its rule."""
LIBRARY = "torch.library.Library"
"""A handle on a namespace of ops: two statements that define ops by it do not depend on each other."""


class StatementIndex:
    """The statements of these files."""

    def __init__(self, version: Version, files: Sequence[str]) -> None:
        self.version, self.names = version, NameResolver(version)
        self._forms: dict[Statement, NormalForm] = {}
        self._changers: dict[Statement, list[Statement]] = {}
        self._skeletons: dict[Statement, str] = {}
        self.units = [unit for path in files for unit in version.module(path).units]
        self.writers: dict[Statement, list[Statement]] = defaultdict(list)
        self.late: dict[Statement, list[Statement]] = defaultdict(list)
        self.users: dict[Statement, list[Statement]] = defaultdict(list)
        """The statements that name this one when they run, and (`inner`) in their functions."""
        self.inner: dict[Statement, list[Statement]] = defaultdict(list)
        for unit in self.units:
            self._add(unit, self.form(unit))
        for unit in list(self.writers):
            self._add_subscript_writers(unit)
        self.at_import = self._at_import()
        self.registrars = self._registrars(registers)
        self.rulers = self._registrars(registers_rule)
        self.candidates = [unit for unit in self.units if self._may_register(unit)]

    def form(self, unit: Statement) -> NormalForm:
        if unit not in self._forms:
            self._forms[unit] = Normalizer(self.names, self.version.module(unit.path)).of(unit)
        return self._forms[unit]

    def _add(self, unit: Statement, form: NormalForm) -> None:
        written = list(form.written)
        if unit in written:  # `for rule in RULES: rule.even = True`
            written += [u for r in references(form.head) if not r.late for u in r.units]
        for table, changed in ((self.writers, written), (self.late, form.late)):
            for other in dict.fromkeys(changed):
                if other is not unit and not is_fixed(other.node) and not self._is_library(other):
                    table[other].append(unit)
        for other in form.rebound:
            self.late[other].append(unit)
        for reference in references([*form.head, *form.body]):
            for other in reference.units:
                table = self.inner if reference.late else self.users
                if other is not unit and unit not in table[other][-1:]:
                    table[other].append(unit)

    def _add_subscript_writers(self, unit: Statement) -> None:
        """A statement that changes `part`, where `part = TABLE["part"]`, changes the table."""
        if isinstance(unit.node, ast.Assign) and isinstance(unit.node.value, ast.Subscript):
            for reference in references(self.form(unit).head):
                for other in reference.units:
                    self.writers[other] += self.writers[unit]

    def _at_import(self) -> set[Statement]:
        """Functions and classes that are called when the modules are imported.

        They may change the mutable values that they name: they become `late` writers of those.
        """
        every = [r for unit in self.units for r in references([*self.form(unit).head, *self.form(unit).body])]
        todo = [u for r in every if r.called and not r.late for u in r.units]
        found: set[Statement] = set()
        while todo:
            unit = todo.pop()
            if unit in found or not isinstance(unit.node, Function | ast.ClassDef):
                continue
            found.add(unit)
            for reference in references([*self.form(unit).head, *self.form(unit).body]):
                for other in reference.units:
                    if reference.called:
                        todo.append(other)
                    if self._holds_state(other) and unit not in self.late[other]:
                        self.late[other].append(unit)
        return found

    def _is_library(self, unit: Statement) -> bool:
        return isinstance(unit.node, ast.Assign) and any(name == LIBRARY for name, _ in self.form(unit).outside)

    def says_rule(self, unit: Statement) -> bool:
        """Whether a statement registers a rule, as far as the text shows, and not only the op."""
        tokens = [*self.form(unit).head, *self.form(unit).body]
        return registers_rule(tokens) or any(u in self.rulers for r in references(tokens) for u in r.units)

    def _may_register(self, unit: Statement) -> bool:
        head = self.form(unit).head
        called = (u for r in references(head) for u in r.units)
        return registers(head) or unit in self.registrars or any(u in self.registrars for u in called)

    def _holds_state(self, unit: Statement) -> bool:
        """Whether a statement binds a mutable value: a container, or an object of a class of the project."""
        value = getattr(unit.node, "value", None)
        if not isinstance(unit.node, ast.Assign | ast.AnnAssign) or value is None:
            return False
        if isinstance(value, ast.Call):
            maker = next((name for name, _ in self.form(unit).outside), "")
            own = any(reference.called for reference in references(self.form(unit).head))
            return own or maker.startswith(("builtins.", "collections."))
        return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)

    def _registrars(self, kind: Callable[[list[Token]], bool]) -> set[Statement]:
        """Functions that register something of that kind when they are called, or that call such a function."""
        found = {u for u in self.units if isinstance(u.node, Function) and kind(self.form(u).body)}
        todo = list(found)
        while todo:
            for caller in self.inner[todo.pop()]:
                if isinstance(caller.node, Function) and caller not in found:
                    found.add(caller)
                    todo.append(caller)
        return found

    def changers(self, unit: Statement) -> list[Statement]:
        """The statements that may change the value that this one binds, before a rule is called.

        Statements of one file are in their order there; the order of files does not depend on their names.
        """
        if unit not in self._changers:
            found = list(self.writers[unit])
            for function in self.late[unit]:
                found += [function, *self.starters(function)]
            self._changers[unit] = self._ordered({u for u in found if u is not unit})
        return self._changers[unit]

    def _ordered(self, units: Collection[Statement]) -> list[Statement]:
        by_file: dict[str, list[Statement]] = defaultdict(list)
        for unit in sorted(units, key=lambda u: u.index):
            by_file[unit.path].append(unit)
        text = {path: " ".join(self.skeleton(u) for u in many) for path, many in by_file.items()}
        return [unit for path in sorted(by_file, key=lambda p: (text[p], p)) for unit in by_file[path]]

    def skeleton(self, unit: Statement) -> str:
        """The statement's normal form without the targets of its references."""
        if unit not in self._skeletons:
            tokens = [*self.form(unit).head, *self.form(unit).body]
            self._skeletons[unit] = " ".join(token if isinstance(token, str) else "@" for token in tokens)
        return self._skeletons[unit]

    def starters(self, function: Statement) -> list[Statement]:
        """The statements that call a function at import, also through other functions."""
        found: list[Statement] = []
        todo = [function] if function in self.at_import else []
        seen: set[Statement] = set()
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                found += self.users[one]
                todo += [caller for caller in self.inner[one] if caller in self.at_import]
        return [*(u for u in seen if u is not function), *dict.fromkeys(found)]


def is_fixed(node: ast.stmt) -> bool:
    """Whether a statement binds an immutable value: a number, a string, or a tuple of such."""
    value = getattr(node, "value", None)
    if not isinstance(node, ast.Assign | ast.AnnAssign) or value is None:
        return False
    inner = [n for n in ast.walk(value) if not isinstance(n, ast.expr_context | ast.operator | ast.unaryop)]
    return all(isinstance(n, ast.Constant | ast.Tuple | ast.UnaryOp | ast.BinOp) for n in inner)


def references(tokens: Iterable[Token]) -> Iterator[Reference]:
    """The references among these tokens."""
    return (token for token in tokens if isinstance(token, Reference))


def registers(tokens: Iterable[Token]) -> bool:
    """Whether they call a function that registers an op, a kernel or a rule."""
    return any(isinstance(token, str) and REGISTERS.search(token) for token in tokens)


def registers_rule(tokens: Iterable[Token]) -> bool:
    """Whether they call a function that registers a rule."""
    return any(isinstance(t, str) and REGISTERS.search(t) and not DEFINES.search(t) for t in tokens)
