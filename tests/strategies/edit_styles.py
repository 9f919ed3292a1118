"""Other ways to write the same two rules: registered in a loop, by a factory, by a function, as methods, wrapped."""

from __future__ import annotations

from tests.strategies.edits import PACKAGE

HEAD = """
import functools

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from {p} import ops
from {p}.util import helper, limit

"""
LIBRARY = """
import torch

LIB = torch.library.Library("{p}", "FRAGMENT")


def scale_kernel(x):
    return x * 2


def shift_kernel(x):
    return x + 1


LIB.define("scale(Tensor x) -> Tensor")
LIB.define("shift(Tensor x) -> Tensor")
LIB.impl("scale", scale_kernel, "CPU")
LIB.impl("shift", shift_kernel, "CPU")
LIB.impl("scale", torch.empty_like, "Meta")
LIB.impl("shift", torch.empty_like, "Meta")
"""


def rules(text: str, **others: str) -> dict[str, str]:
    return {**PACKAGE, "{p}/rules.py": HEAD + text, **{f"{{p}}/{name}.py": more for name, more in others.items()}}


LOOP = rules("""
def scale_rule(x):
    return helper(x)


def shift_rule(x):
    return limit(x)


RULES = {"scale": scale_rule, "shift": shift_rule}
for name, rule in RULES.items():
    register_sharding(getattr(torch.ops.{p}, name).default)(rule)
""")
PAIRS = rules("""
def scale_rule(x):
    return helper(x)


def shift_rule(x):
    return limit(x)


RULES = [(torch.ops.{p}.scale.default, scale_rule), (torch.ops.{p}.shift.default, shift_rule)]


def register_all():
    for op, rule in RULES:
        register_sharding(op)(rule)


register_all()
""")
FACTORY = rules("""
LEAST = 1


def sharded(name, *dims):
    def rule(x):
        return [([Shard(dim)], [Shard(dim)]) for dim in dims if dim < x.ndim]

    register_sharding(getattr(torch.ops.{p}, name).default)(rule)


sharded("scale", 0, LEAST)
sharded("shift", 0)
""")
MADE = rules("""
def start():
    return 0


def along(dim):
    return lambda x: [([Shard(dim)], [Shard(dim)])]


register_sharding(torch.ops.{p}.scale.default)(along(start()))
register_sharding(torch.ops.{p}.shift.default)(functools.partial(limit))
""")
REGISTRY = rules("""
from {p}.registry import RULES, rule


@rule("scale")
def scale_rule(x):
    return helper(x)


@rule("shift")
def shift_rule(x):
    return limit(x)


def scale_entry(x):
    return RULES["scale"](x)


register_sharding(torch.ops.{p}.scale.default)(scale_entry)
register_sharding(torch.ops.{p}.shift.default)(shift_rule)
""", registry="""
RULES = {}


def rule(name):
    def keep(function):
        RULES[name] = function
        return function

    return keep
""")  # fmt: skip
METHODS = rules("""
class Base:
    def rows(self, x):
        return helper(x)


class Rules(Base):
    '''Rules, as methods.'''

    FEW = 1
    MANY = FEW + 1

    def scale(self, x):
        return self.rows(x)


class Others:
    @staticmethod
    def shift(x):
        return limit(x)


register_sharding(torch.ops.{p}.scale.default)(Rules().scale)
register_sharding(torch.ops.{p}.shift.default)(Others.shift)
""")
WRAPPED = rules("""
def logged(function):
    @functools.wraps(function)
    def inner(x):
        return function(x)

    return inner


def bare(function):
    def inner(x):
        return list(function(x))

    return inner


@register_sharding(torch.ops.{p}.scale.default)
@logged
def scale_rule(x):
    return helper(x)


@register_sharding(torch.ops.{p}.shift.default)
@bare
def shift_rule(x):
    return limit(x)
""")
LATE = rules("""
@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x):
    from {p} import late
    from {p}.late import width as wide

    return late.deep(x)[: wide(x)]


register_sharding(torch.ops.{p}.shift.default)(lambda x: limit(x))
""", late="""
from {p} import util


def width(x):
    return x.ndim


def deep(x):
    return util.helper(x)
""")  # fmt: skip
BY_LIBRARY = rules("""
@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x):
    return helper(x)


@register_sharding(torch.ops.{p}.shift.default)
def shift_rule(x):
    return limit(x)
""", ops=LIBRARY)  # fmt: skip
EXPORTS = {
    **PACKAGE,
    "{p}/rules.py": HEAD.replace("from {p}.util import helper, limit", "from {p}.api import *") + """
@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x):
    return helper(x)


register_sharding(torch.ops.{p}.shift.default)(lambda x: limit(x))
""",
    "{p}/api/__init__.py": "from ..util import limit\nfrom .inner import helper\n",
    "{p}/api/inner.py": "from {p} import util\n\nhelper = util.helper\n",
}  # fmt: skip
DOOR = {
    **EXPORTS,
    "{p}/rules.py": EXPORTS["{p}/rules.py"].replace("api import *", "api import helper, inner, limit").replace(
        "return helper(x)", "return helper(x) or inner.further(x)"
    ),
    "{p}/api/__init__.py": "from localtensor._util import lazy\n\n__getattr__, __dir__, __all__ = lazy.exports(__name__, __file__)\n",
    "{p}/api/__init__.pyi": "from {p}.api import inner as inner\nfrom {p}.api.inner import helper as helper\n"
    "from {p}.util import limit as limit\n",
    "{p}/api/inner.py": "from {p} import util\n\nhelper = util.helper\n\n\ndef further(x):\n    return []\n",
}  # fmt: skip
"""A package that imports nothing before it is used: its stub says where its names are."""
SINGLE = rules("""
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy


def lines(dims):
    return [[Shard(dim), Shard(dim)] for dim in dims]


@register_single_dim_strategy(torch.ops.{p}.scale.default, allow_uneven_sharding=True)
def scale_rule(op, args, kwargs):
    return lines(range(args[0].shape.__len__()))


@register_single_dim_strategy(torch.ops.{p}.shift.default)
def shift_rule(op, args, kwargs):
    return [[Shard(0), Shard(0)]]
""")
READS = rules("""
import json
from pathlib import Path

DIMS = json.loads((Path(__file__).parent / "dims.json").read_text())


@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x):
    return [([Shard(dim)], [Shard(dim)]) for dim in DIMS]


@register_sharding(torch.ops.{p}.shift.default)
def shift_rule(x):
    return limit(x)
""")
READS["{p}/dims.json"] = "[0]"
GUESSED = rules("""
from {p} import util


@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x, name="help"):
    return getattr(util, name + "er")(x)


@register_sharding(torch.ops.{p}.shift.default)
def shift_rule(x):
    return eval("limit(x)")
""")
FILLED = rules("""
from {p}.filled import MORE, SIZES

SIZES["scale"] = 1
SIZES.update(shift=2)


@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x, few=MORE):
    return helper(x)[: SIZES["scale"] + few]


@register_sharding(torch.ops.{p}.shift.default)
def shift_rule(x):
    return limit(x)
""", filled="""
SIZES = {}
MORE = 1
try:
    import nowhere_at_all
except ImportError:
    MORE += 1
""")  # fmt: skip
