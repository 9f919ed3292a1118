"""A statement in a normal form: what it does, without comments, docstrings, layout and the names of its locals.

Names that mean something outside of the statement are resolved: those of the project stand as references, those from
elsewhere by their full dotted names, however they were imported.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from strategies.gate.changes.module_model import (
    Function,
    Imported,
    Module,
    Unit,
    bound,
    chain_of,
    here,
    imported,
    is_text,
)
from strategies.gate.changes.name_resolution import BINDS, NOWHERE, Meaning, Names, Scope, notes, parameters, signature


@dataclass(frozen=True, slots=True)
class Reference:
    """A name of the project: the statements that bind it; whether it is called where it stands; and in how many
    functions, one in the other, that is: 0 is where the statement itself is run."""

    units: tuple[Unit, ...]
    called: bool = False
    depth: int = 0

    @property
    def late(self) -> bool:
        return self.depth > 0


Token = str | Reference
UNBOUND = "no statement binds"
"""How a doubt begins whose reason may be a module that is no Python."""


@dataclass(slots=True)
class Form:
    """`head` is all of a statement, but of a function only its decorators; `body` the rest of that.

    `outside` are the dotted names from elsewhere, `texts` the constants, each with whether it stands in a function;
    `doubts` what cannot be seen from the text; `written` the statements whose values this one may change when it is
    run, `late` those that are changed when the function is called.
    """

    head: list[Token] = field(default_factory=list)
    body: list[Token] = field(default_factory=list)
    outside: list[tuple[str, bool]] = field(default_factory=list)
    texts: list[tuple[str, bool]] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    written: list[Unit] = field(default_factory=list)
    late: list[Unit] = field(default_factory=list)
    rebound: list[Unit] = field(default_factory=list)
    """What a function binds anew, by `global`."""
    patches: set[bool] = field(default_factory=set)
    """Whether it changes something outside, or names of a module: as soon as it is run (False), or in a function (True)."""


CHANGERS = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "remove",
    "reverse", "setdefault", "sort", "update", "__setitem__", "__setattr__", "__delitem__",
})  # fmt: skip
"""Methods of Python's own containers that change them."""


class Former:
    """Writes one unit down."""

    def __init__(self, names: Names, module: Module) -> None:
        self.names, self.module = names, module
        self.form = Form()
        self.scopes: list[Scope] = []
        self.out = self.form.head
        self.called: set[int] = set()
        self.depth = 0  # of functions

    def of(self, unit: Unit) -> Form:
        node = unit.node
        if isinstance(node, Function):
            self._function(node, own_name=False)
        else:
            self._put(node)
        return self.form

    @property
    def inside(self) -> bool:
        """Whether this is in a function, which is run later, if ever."""
        return self.depth > 0

    def _put(self, node: ast.AST) -> None:  # noqa: C901 - a table of kinds of nodes, an arm each
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, own_name=True)
            case ast.Lambda():
                self._defaults(node.args)
                self._scoped(parameters(node.args), [ast.Return(node.body)], node.args)
            case ast.ClassDef():
                self._class(node)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._comprehension(node)
            case ast.Name() | ast.Attribute():
                self._chain(node)
            case ast.Constant(value=value):
                self._constant(value)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Global(names=names):
                for name in names:
                    self.form.rebound.extend(self.module.binders.get(name, ()))
                    self.form.rebound.extend(u for m in self.names.mean(self.module, [name]) for u in m.units)
            case ast.Nonlocal() | ast.Pass():
                pass
            case ast.AnnAssign(target=ast.Name() as target, value=value) if self._local():
                if value is not None:  # of a local, the annotation is never evaluated
                    self._plain(ast.Assign([target], value))
            case _:
                self._plain(node)

    def _plain(self, node: ast.AST) -> None:
        """Any other node: its kind, then its fields."""
        self._watch(node)
        self.out.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name in ("ctx", "type_comment", "type_ignores", "kind"):
                continue
            if name == "attr":
                self.out.append(f".{value}")
                continue
            self.out.append(f"{name}=")
            if name in BINDS.get(type(node), ()) and isinstance(value, str):
                self._store_name(value)
            else:
                self._value(value)
        self.out.append(")")

    def _value(self, value: object) -> None:
        if isinstance(value, ast.AST):
            self._put(value)
        elif isinstance(value, list):
            self.out.append("[")
            for item in value:
                if not is_text(item):
                    self._value(item)
            self.out.append("]")
        else:
            self.out.append(repr(value))

    def _constant(self, value: object) -> None:
        if isinstance(value, str):
            self.form.texts.append((value, self.inside))
        self.out.append(repr(value) if not isinstance(value, frozenset) else repr(sorted(map(repr, value))))

    # scopes ---------------------------------------------------------------------------------------------------------

    def _local(self) -> bool:
        return bool(self.scopes) and not self.scopes[-1].of_class

    def _innermost(self) -> Scope:
        return self.scopes[-1] if self.scopes else NOWHERE

    def _function(self, node: Function, *, own_name: bool) -> None:
        self.out.append(f"({type(node).__name__}")
        if own_name:
            self._store_name(node.name)
        for decorator in node.decorator_list:
            self.out.append("@")
            self._decorator(decorator)
        whole, top = self.out, not self.scopes and not own_name
        if top:
            self.out = self.form.body
        self._defaults(node.args)
        self._value(notes(node))
        self._scoped(parameters(node.args), node.body, node.args)
        self.out = whole
        self.out.append(")")

    def _decorator(self, node: ast.expr) -> None:
        """A decorator is called, and may change what it is a method of."""
        if not self.inside and isinstance(node, ast.Attribute):
            self._change(node, late=False)
        self.called.add(id(node))
        self._put(node)

    def _defaults(self, args: ast.arguments) -> None:
        self.out.append("defaults")
        for default in [*args.defaults, *args.kw_defaults]:
            self._value(default)

    def _scoped(self, parameters: list[str], body: Sequence[ast.stmt], args: ast.arguments) -> None:
        taken = {name for node in here(list(body)) if isinstance(node, ast.Global) for name in node.names}
        outer = {name for node in here(list(body)) if isinstance(node, ast.Nonlocal) for name in node.names}
        names = bound(list(body), self.module.path) - taken - outer
        links: dict[str, list[Imported]] = {}
        for node in here(list(body)):
            for name, target in imported(node, self.module.path):
                links.setdefault(name, []).append(target)
        scope = Scope(len(self.scopes), set(parameters), names | set(parameters), taken, links)
        self.out.append(f"<{signature(args)}")
        self.scopes.append(scope)
        self.depth += 1
        for node in body:
            if not is_text(node):
                self._put(node)
        self.depth -= 1
        self.scopes.pop()
        self.out.append(">")

    def _class(self, node: ast.ClassDef) -> None:
        self.out.append("(ClassDef")
        self._store_name(node.name)
        for decorator in node.decorator_list:
            self._decorator(decorator)
        for base in [*node.bases, *node.keywords]:
            self._put(base)
        self.scopes.append(Scope(len(self.scopes), set(), bound(node.body, self.module.path), set(), {}, of_class=True))
        for child in node.body:
            if not is_text(child):
                self._put(child)
        self.scopes.pop()
        self.out.append(")")

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        targets = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        self.out.append(f"({type(node).__name__}")
        self._put(node.generators[0].iter)
        self.scopes.append(Scope(len(self.scopes), set(), targets, set(), {}))
        for number, generator in enumerate(node.generators):
            self.out.append("async for" if generator.is_async else "for")
            self._put(generator.target)
            if number:
                self._put(generator.iter)
            self._value(generator.ifs)
        for part in ("key", "value", "elt"):
            if hasattr(node, part):
                self._put(getattr(node, part))
        self.scopes.pop()
        self.out.append(")")

    def _store_name(self, name: str) -> None:
        scope = self._innermost()
        self.out.append(scope.token(name) if name in scope else f"={name}")

    # names ----------------------------------------------------------------------------------------------------------

    def _scope_of(self, name: str) -> Scope | None:
        """The scope within the unit that a name belongs to; None where it is the module's."""
        for depth, scope in enumerate(reversed(self.scopes)):
            if name in scope.taken:
                return None
            if name in scope and (not scope.of_class or depth == 0):
                return scope
        return None

    def _chain(self, node: ast.Name | ast.Attribute) -> None:
        chain = chain_of(node)
        if not chain:
            self._plain(node)
            return
        scope = self._scope_of(chain[0])
        storing = isinstance(node.ctx, ast.Store | ast.Del)
        if scope is None:
            if storing and len(chain) == 1:
                self.out.append(f"={chain[0]}")
                return
            if storing:
                self._change(node, late=self.inside)
            self._mean(self.names.mean(self.module, chain), called=id(node) in self.called)
        elif chain[0] in scope.links and not storing:
            for target in scope.links[chain[0]]:
                self._mean(self.names.behind(target, tuple(chain[1:])), called=id(node) in self.called)
        else:
            self.out.append(".".join([scope.token(chain[0]), *chain[1:]]))

    def _mean(self, meanings: list[Meaning], *, called: bool) -> None:
        for meaning in meanings:
            if meaning.units:
                self.out.append(Reference(meaning.units, called and not meaning.rest, self.depth))
                if meaning.rest:
                    self.out.append("." + ".".join(meaning.rest))
            elif meaning.outside:
                self.form.outside.append((meaning.outside, self.inside))
                self.out.append(meaning.outside)
            elif meaning.module:
                self.form.doubts.append(f"the module {meaning.module} is passed on as a value")
                self.out.append("module")
            else:
                self.form.doubts.append(f"{UNBOUND} `{meaning.unknown}`")
                self.out.append(f"?{meaning.unknown}")

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.out.append("(import")
        for name, target in imported(node, self.module.path):
            if name == "*" and self.names.version.find(target.dotted, target.base) is not None:
                self.out.append("*")
                continue
            meanings = self.names.behind(target, ())
            self._mean([m for m in meanings if not m.module], called=False)
        self.out.append(")")

    # what changes what ----------------------------------------------------------------------------------------------

    def _watch(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self.called.add(id(node.func))
            if isinstance(node.func, ast.Attribute) and (not self.inside or node.func.attr in CHANGERS):
                self._change(node.func, late=self.inside)
            if not self.inside:
                self._given(node)
            self._dynamic(node)
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            self._change(node, late=self.inside)

    def _given(self, node: ast.Call) -> None:
        """What the project's own functions are given, they may change."""
        chain = chain_of(node.func)
        meanings = self._from_above(chain)
        if meanings and all(m.outside for m in meanings):
            return
        for value in [*node.args, *(k.value for k in node.keywords)]:
            given = self._from_above(chain_of(value))
            self._write(self._tables(given), late=False)

    def _from_above(self, chain: list[str]) -> list[Meaning]:
        """What a chain of names means, if it is none of the unit's own."""
        return self.names.mean(self.module, chain) if chain and self._scope_of(chain[0]) is None else []

    def _change(self, node: ast.Attribute | ast.Subscript | ast.Name, *, late: bool) -> None:
        """What is left of the last dot or bracket is changed."""
        stored = isinstance(node.ctx, ast.Store | ast.Del)
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute | ast.Subscript | ast.Call):
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
            chain = chain_of(inner)
            if chain and self._scope_of(chain[0]) is None:
                meanings = self.names.mean(self.module, chain)
                self._write(meanings, late=late)
                if (stored and any(m.outside or m.module for m in meanings)) or "__dict__" in chain:
                    self.form.patches.add(late)
                return

    def _tables(self, meanings: list[Meaning]) -> list[Meaning]:
        """A function that is handed to a call is registered by it, or called: it is not changed."""
        return [m for m in meanings if m.rest or not all(isinstance(u.node, Function) for u in m.units)]

    def _write(self, meanings: list[Meaning], *, late: bool) -> None:
        for meaning in meanings:
            (self.form.late if late else self.form.written).extend(meaning.units)

    def _dynamic(self, node: ast.Call) -> None:
        """Calls that reach names which do not stand in the text."""
        chain = chain_of(node.func)
        if len(chain) != 1 or self._scope_of(chain[0]) is not None or chain[0] in self.module.binders:
            return
        if chain[0] in ("getattr", "setattr", "delattr") and len(node.args) > 1:
            meanings = self._from_above(chain_of(node.args[0]))
            outside = bool(meanings) and all(meaning.outside for meaning in meanings)
            if chain[0] != "getattr":
                self._write(meanings, late=self.inside)
                self.form.patches.update({self.inside} if any(m.outside or m.module for m in meanings) else ())
            if not (outside or isinstance(node.args[1], ast.Constant)):
                self.form.doubts.append(f"`{chain[0]}` by a computed name")
        elif chain[0] in ("exec", "eval", "globals", "locals", "vars", "__import__", "compile"):
            self.form.doubts.append(f"`{chain[0]}`")
            self.form.patches.update({self.inside} if chain[0] in ("exec", "globals", "locals", "vars") else ())
