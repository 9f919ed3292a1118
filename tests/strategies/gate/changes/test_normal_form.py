"""Statements in a normal form: equal where they do the same, others where they do not."""

import pytest

from strategies.gate.changes.name_resolution import NameResolver
from strategies.gate.changes.normal_form import Normalizer
from strategies.gate.changes.project import Version


def form(text):
    version = Version({"a.py": text.encode()}, [""], {})
    module = version.module("a.py")
    made = Normalizer(NameResolver(version), module).of(module.units[0])
    return made.head, made.body


@pytest.mark.parametrize(("one", "other"), [
    ("def f(x, *, dim=0): return x + dim", "def f(x, *, dim=1): return x + dim"),
    ("def f(x, dim=0): return x + dim", "def f(x, dim=1): return x + dim"),
    ("def f(x, dim): return x + dim", "def f(x, *, dim): return x + dim"),
    ("def f(x): return x + 1", "def f(x): return x - 1"),
    ("def f(x): return g(x)", "def f(x): return h(x)"),
    ("f = lambda x, dim=0: x", "f = lambda x, dim=1: x"),
    ("def f(x): return [a for a in x if a]", "def f(x): return [a for a in x if not a]"),
    ("def f(x, y): return [b for a in x for b in a]", "def f(x, y): return [b for a in x for b in y]"),
    ("def f(x, y): return [a for a in x]", "def f(x, y): return [a for a in y]"),
    ("def f(x): return {a: b for a, b in x}", "def f(x): return {b: a for a, b in x}"),
    ("def f(x): return {a for a in x}", "def f(x): return [a for a in x]"),
    ("async def f(x): return [a async for a in x]", "async def f(x): return [a for a in x]"),
    ("class A(B):\n    x = 1", "class A(C):\n    x = 1"),
    ("class A:\n    x = 1", "class A:\n    x = 2"),
    ("class A:\n    x = 1", "class A:\n    y = 1"),
    ("def f(x, y): return x", "def f(x, y): return y"),
    ("@g\nclass A: pass", "@h\nclass A: pass"),
    ("def f(x): return lost.one(x)", "def f(x): return lost.two(x)"),
    ("def f(x):\n    a, b = x\n    return a", "def f(x):\n    a, b = x\n    return b"),
    ("class A:\n    def f(self, __x, __y): return __x", "class A:\n    def f(self, __x, __y): return __y"),
    ("class A:\n    def f(self): return __x", "class A:\n    def f(self): return __y"),
    ("class A:\n    len = 1\n    size = len", "class A:\n    len = 1\n    size = abs"),
    ("def f(x):\n    class A:\n        size: int", "def f(x):\n    class A:\n        size: str"),
    ("def f(x):\n    def g(a):\n        len = a\n        return len\n    return len(x), g(x)",
     "def f(x):\n    def g(a):\n        len = a\n        return a\n    return len(x), g(x)"),
    ("def f(x):\n    def g():\n        nonlocal x\n        x = 1\n    g()\n    return x",
     "def f(x):\n    def g():\n        y = 1\n    g()\n    return x"),
])  # fmt: skip
def test_what_does_something_else_has_another_form(one, other):
    assert form(one) != form(other)


@pytest.mark.parametrize(("one", "other"), [
    ("def f(x):\n    y = x + 1\n    return y", "def f(x):\n    total = x + 1\n    return total"),
    ("def f(x):\n    'Says.'\n    return x", "def f(x):\n    return x  # the same"),
    ("def f(x): return [a for a in x]", "def f(x): return [b for b in x]"),
    ("def f(x): return [a + b for a in x for b in a if b]", "def f(x): return [c + d for c in x for d in c if d]"),
    ("class A:\n    'Says.'\n    x = 1", "class A:\n    x = 1"),
    ("def f(x):\n    def g(): return y\n    y = a = 1\n    return g, a", "def f(x):\n    def z(): return b\n    b = c = 1\n    return z, c"),
    ("def f(x):\n    import math as m\n    return m.inf", "def f(x):\n    import math\n    return math.inf"),
    ("def f(x):\n    y: int = 1\n    return y", "def f(x):\n    z: str = 1\n    return z"),
])  # fmt: skip
def test_names_of_locals_docstrings_and_comments_are_no_part_of_it(one, other):
    assert form(one) == form(other)
