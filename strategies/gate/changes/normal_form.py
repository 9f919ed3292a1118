"""The normal form of a statement: independent of comments, docstrings, layout and the names of locals.

Names from outside of the statement are resolved: names of the project become references, names from other libraries
their full dotted names, however they were imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from strategies.gate.changes import module_model
from strategies.gate.changes.name_resolution import Meaning, NameResolver


@dataclass(frozen=True, slots=True)
class Reference:
    """A name of the project: the statements that bind it, whether it is called here, and the number of functions around
    it; at depth 0 it is evaluated when the statement itself runs."""

    units: tuple[module_model.Statement, ...]
    called: bool = False
    depth: int = 0

    @property
    def late(self) -> bool:
        return self.depth > 0


Token = str | Reference
UNBOUND = "no statement binds"
"""The start of a doubt whose cause may be a module that is not written in Python."""


@dataclass(slots=True)
class NormalForm:
    """`head` is all of a statement, but of a function only its decorators; `body` is the rest of a function.

    `outside` are the dotted names from other libraries, `texts` the string constants, each with whether it is inside a
    function.  `doubts` are reasons why the text does not show all effects.  `written` are the statements whose values
    this one may change when it runs, `late` those that it changes when its function is called.
    """

    head: list[Token] = field(default_factory=list)
    body: list[Token] = field(default_factory=list)
    outside: list[tuple[str, bool]] = field(default_factory=list)
    texts: list[tuple[str, bool]] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    written: list[module_model.Statement] = field(default_factory=list)
    late: list[module_model.Statement] = field(default_factory=list)
    rebound: list[module_model.Statement] = field(default_factory=list)
    """The statements whose names a function rebinds by `global`."""
    patches: set[bool] = field(default_factory=set)
    """Whether it changes another library, or names of a module: when it runs (False), or in a function (True)."""


MUTATING_METHODS = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "remove",
    "reverse", "setdefault", "sort", "update", "__setitem__", "__setattr__", "__delitem__",
})  # fmt: skip
"""Methods of Python's own containers that change them."""


IGNORED_FIELDS = frozenset({"ctx", "type_comment", "type_ignores", "kind"})
"""Fields of nodes without meaning, or whose meaning follows from their place."""


class Normalizer:
    """Makes the normal form of one statement."""

    def __init__(self, names: NameResolver, module: module_model.Module) -> None:
        self.names, self.module = names, module
        self.form = NormalForm()
        self.out = self.form.head
        self.scopes = module_model.Scopes()
        self.numbers: dict[str, int] = {}
        self.links: dict[str, list[module_model.Imported]] = {}
        self.bound: set[str] = set()  # otherwise than by an import
        self.called: set[int] = set()
        self.depth = 0  # of functions
        self.in_function = False  # and not in the body of a class within it

    def of(self, unit: module_model.Statement) -> NormalForm:
        self.scopes = unit.scopes
        for node in ast.walk(unit.node):
            for name, target in module_model.imports_of(node, self.module.path):
                self.links.setdefault(name, []).append(target)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.bound.add(node.id)
        for name in sorted(self.scopes.rebound):
            self.form.rebound.extend(self.module.binders.get(name, ()))
            self.form.rebound.extend(u for m in self.names.mean(self.module, [name]) for u in m.units)
        if isinstance(unit.node, module_model.Function):
            self._definition(unit.node, top=True)
        else:
            self._put(unit.node)
        return self.form

    @property
    def inside(self) -> bool:
        """Whether this is in a function, which runs later, if ever."""
        return self.depth > 0

    def _put(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._definition(node)
            case ast.Lambda():
                self._value(node.args)
                self._later(node.body)
            case ast.Name() | ast.Attribute():
                self._chain(node)
            case ast.Constant(value=value):
                self.form.texts.extend([(value, self.inside)] if isinstance(value, str) else [])
                self.out.append(repr(value))
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case ast.AnnAssign(target=ast.Name() as target, value=value) if self.in_function:
                if value is not None:  # the annotation of a local is never evaluated
                    self._plain(ast.Assign([target], value))
            case _:
                self._plain(node)

    def _plain(self, node: ast.AST) -> None:
        """Any other node: its kind, then its fields."""
        self._record_effects(node)
        self.out.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name == "attr":
                self.out.append(f".{value}")
            elif name not in IGNORED_FIELDS:
                self.out.append(f"{name}=")
                self._value(self._token(value) if name in ("name", "rest") and isinstance(value, str) else value)
        self.out.append(")")

    def _value(self, value: object) -> None:
        if isinstance(value, ast.AST):
            self._put(value)
        elif isinstance(value, list):
            self.out.append("[")
            for item in value:
                if not module_model.is_string_statement(item):
                    self._value(item)
            self.out.append("]")
        else:
            self.out.append(repr(value))

    def _definition(self, node: module_model.Function | ast.ClassDef, *, top: bool = False) -> None:
        """A function or a class.  The name of a function at the top level is no part of its form."""
        self.out.append(f"({type(node).__name__}" if top else f"({type(node).__name__} {self._token(node.name)}")
        for decorator in node.decorator_list:
            self.out.append("@")
            if not self.inside and isinstance(decorator, ast.Attribute):
                self._change(decorator, late=False)  # it may change the object that it is a method of
            self.called.add(id(decorator))
            self._put(decorator)
        whole = self.out
        if top:
            self.out = self.form.body
        for name, value in ast.iter_fields(node):
            if name not in IGNORED_FIELDS | {"name", "decorator_list", "body"}:
                self._value(value)
        outer, self.in_function = self.in_function, isinstance(node, module_model.Function)
        if self.in_function:
            self._later(node.body)
        else:
            self._value(node.body)
        self.in_function, self.out = outer, whole
        self.out.append(")")

    def _later(self, body: object) -> None:
        self.depth += 1
        self._value(body)
        self.depth -= 1

    def _is_outer(self, name: str) -> bool:
        """Whether a name is looked up in the module somewhere in the statement."""
        return any(module_model.may_be_among(name, among) for among in (self.scopes.module, self.scopes.attributes))

    def _token(self, name: str) -> str:
        """A name that the statement binds: as it is if other code may use it, else a number, so that it may be renamed."""
        if module_model.may_be_among(name, self.scopes.kept):
            return f"%{name}"
        return f"={name}" if self._is_outer(name) else f"${self.numbers.setdefault(name, len(self.numbers))}"

    def _chain(self, node: ast.Name | ast.Attribute) -> None:
        chain = module_model.chain_of(node)
        if not chain:
            self._plain(node)
            return
        storing, outer = isinstance(node.ctx, ast.Store | ast.Del), self._is_outer(chain[0])
        if storing and outer and len(chain) == 1:
            self.out.append(self._token(chain[0]))
            return
        if storing:
            self._change(node, late=self.inside)
        token = self._token(chain[0])
        if token[0] == "%" or not (outer or chain[0] in self.links.keys() - self.bound):
            self.out += [token, *(f".{name}" for name in chain[1:])]
        self._mean(self._meanings(chain), called=id(node) in self.called)

    def _meanings(self, chain: list[str]) -> list[Meaning]:
        """What a chain of names may mean outside of the statement."""
        if chain and self._is_outer(chain[0]):
            found = self.names.mean(self.module, chain)
            return [m for m in found if not m.unknown or module_model.may_be_among(chain[0], self.scopes.module)]
        targets, rest = self.links.get("".join(chain[:1]), ()), tuple(chain[1:])
        return [meaning for target in targets for meaning in self.names.behind(target, rest)]

    def _mean(self, meanings: list[Meaning], *, called: bool) -> None:
        for meaning in meanings:
            if meaning.units:
                self.out.append(Reference(meaning.units, called and not meaning.rest, self.depth))
            elif meaning.outside:
                self.form.outside.append((".".join([meaning.outside, *meaning.rest]), self.inside))
                self.out.append(meaning.outside)
            elif meaning.module:
                self.form.doubts.append(f"the module {meaning.module} is passed on as a value")
                self.out.append("module")
            else:
                self.form.doubts.append(f"{UNBOUND} `{meaning.unknown}`")
                self.out.append(f"?{meaning.unknown}")
            if meaning.rest:
                self.out.append("." + ".".join(meaning.rest))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.out.append("(import")
        for name, target in module_model.imports_of(node, self.module.path):
            if name == "*" and self.names.version.find(target.dotted, target.base) is not None:
                self.out.append("*")
                continue
            meanings = self.names.behind(target, ())
            self._mean([m for m in meanings if not m.module], called=False)
        self.out.append(")")

    def _record_effects(self, node: ast.AST) -> None:
        """Record what the node may change, and the calls whose effects cannot be seen."""
        if isinstance(node, ast.Call):
            self.called.add(id(node.func))
            if isinstance(node.func, ast.Attribute) and (not self.inside or node.func.attr in MUTATING_METHODS):
                self._change(node.func, late=self.inside)
            if not self.inside:
                self._record_arguments(node)
            self._record_dynamic(node)
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            self._change(node, late=self.inside)

    def _record_arguments(self, node: ast.Call) -> None:
        """A function of the project may change its arguments, except for functions: it registers or calls those."""
        meanings = self._meanings(module_model.chain_of(node.func))
        if meanings and all(m.outside for m in meanings):
            return
        for value in [*node.args, *(k.value for k in node.keywords)]:
            for given in self._meanings(module_model.chain_of(value)):
                if given.rest or not all(isinstance(unit.node, module_model.Function) for unit in given.units):
                    self.form.written.extend(given.units)

    def _change(self, node: ast.Attribute | ast.Subscript | ast.Name, *, late: bool) -> None:
        """The value left of the last dot or bracket is changed."""
        stored = isinstance(node.ctx, ast.Store | ast.Del)
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute | ast.Subscript | ast.Call):
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
            chain = module_model.chain_of(inner)
            meanings = self._meanings(chain)
            if meanings:
                self._write(meanings, late=late)
                if (stored and any(m.outside or m.module for m in meanings)) or "__dict__" in chain:
                    self.form.patches.add(late)
                return

    def _write(self, meanings: list[Meaning], *, late: bool) -> None:
        for meaning in meanings:
            (self.form.late if late else self.form.written).extend(meaning.units)

    def _record_dynamic(self, node: ast.Call) -> None:
        """Calls such as `getattr` and `exec`, which reach names that are not in the text."""
        chain = module_model.chain_of(node.func)
        if len(chain) != 1 or not self._is_outer(chain[0]) or chain[0] in self.module.binders:
            return
        if chain[0] in ("getattr", "setattr", "delattr") and len(node.args) > 1:
            meanings = self._meanings(module_model.chain_of(node.args[0]))
            outside = bool(meanings) and all(meaning.outside for meaning in meanings)
            if chain[0] != "getattr":
                self._write(meanings, late=self.inside)
                self.form.patches.update({self.inside} if any(m.outside or m.module for m in meanings) else ())
            if not (outside or isinstance(node.args[1], ast.Constant)):
                self.form.doubts.append(f"`{chain[0]}` by a computed name")
        elif chain[0] in ("exec", "eval", "globals", "locals", "vars", "__import__", "compile"):
            self.form.doubts.append(f"`{chain[0]}`")
            self.form.patches.update({self.inside} if chain[0] in ("exec", "globals", "locals", "vars") else ())
