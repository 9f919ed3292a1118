"""What a value is when a rule is asked: all that made it and changed it, in the order in which that happened."""

import pytest

from strategies.gate.changes.select import select_changed
from tests.strategies import edit_styles, edits
from tests.strategies.edits import PACKAGE
from tests.strategies.gate.changes.test_select import NO, RULES, TABLES, UTIL, check_choices

TWICE = edit_styles.rules("""
@register_sharding(torch.ops.{p}.scale.default)
def first(x):
    return helper(x)


@register_sharding(torch.ops.{p}.scale.default)
def second(x):
    return limit(x)


@register_sharding(torch.ops.{p}.shift.default)
def shift_rule(x):
    return helper(x)
""")
STORED = edit_styles.rules("""
from {p} import store


@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x):
    return helper(x)[: store.STORE.size("scale")]


@register_sharding(torch.ops.{p}.shift.default)
def shift_rule(x):
    return helper(x)[: shift_rule.most]


for rule in (shift_rule,):
    rule.most = 2
""", store="""
class Store:
    def __init__(self):
        self.sizes = {}

    def keep(self, name, size):
        self.sizes[name] = size

    def size(self, name):
        return self.sizes[name]


STORE = Store()
TABLE = {"sizes": {}}
INNER = TABLE["sizes"]


def fill(size):
    STORE.keep("scale", size)


def start():
    fill(1)


start()
INNER["scale"] = 1
""")  # fmt: skip
NAMED = edit_styles.rules("""
SPACE, SCALE = "{p}", torch.ops.{p}.scale


@register_sharding(SCALE.default)
def scale_rule(x):
    return helper(x)


def tell(op, rule):
    register_sharding(op)(rule)


tell(getattr(torch.ops, SPACE).shift.default, limit)
""", ops="""
import torch

SPACE = "{p}"
NAME = SPACE + "::shift"


@torch.library.custom_op(f"{SPACE}::scale", mutates_args=())
def times(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1


shift = torch.library.custom_op(NAME, mutates_args=())(plus)
times.register_fake(torch.empty_like)
shift.register_fake(torch.empty_like)
""")  # fmt: skip
NATIVE = {**PACKAGE, UTIL: PACKAGE[UTIL] + "\n\ntry:\n    from {p} import _native\nexcept ImportError:\n    _native = None\n\n\n"
          "def native(x):\n    return _native or helper(x)\n",
          RULES: PACKAGE[RULES].replace("*helper(x)", "*util.native(x)"), "native.cpp": "int x = 1;"}  # fmt: skip
TYPED = {**PACKAGE, UTIL: PACKAGE[UTIL].replace("def helper(x)", "def helper(x: object)")}
MATCHED = edit_styles.rules("""
def kind(x):
    match x.ndim:
        case 0 as none:
            return none
        case other:
            return other


def safe(x):
    try:
        return kind(x)
    except ValueError as error:
        "the reason"
        return str(error)


@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x):
    if (many := safe(x)) and any((last := dim) for dim in range(many)):
        return helper(x)[:last]
    return (lambda: helper(x))()


@register_sharding(torch.ops.{p}.shift.default)
def shift_rule(x):
    return limit(x)
""")


@pytest.mark.few(4)
@pytest.mark.parametrize(("files", "changes", "scale", "shift"), [
    pytest.param(PACKAGE, {TABLES: PACKAGE[TABLES] + "LIMITS['shift'] = 1\nLIMITS['shift'] = 2\n"}, NO, "line 5 of p/tables.py, on which its rule depends, changed", id="filled"),
    pytest.param({**PACKAGE, TABLES: "LIMITS = {}\nDIMS = [0]\nLIMITS['shift'] = 1\nLIMITS['shift'] = 2\n"},
                 {TABLES: [("= 1", "= 0"), ("= 2", "= 1"), ("= 0", "= 2")]}, NO, "what it depends on stands in another order", id="in another order"),
    pytest.param({**PACKAGE, TABLES: "LIMITS = {'shift': 1}\nN = [1]\nDIMS = (*N,)\nN.append(0)\n"},
                 {TABLES: [("DIMS = (*N,)\nN.append(0)\n", "N.append(0)\nDIMS = (*N,)\n")]}, *["what it depends on stands in another order"] * 2, id="before or after"),
    pytest.param(TWICE, {RULES: [("def first", "def third"), ("return helper(x)\n\n\n@register_sharding(torch.ops.{p}.scale.default)\ndef second(x):\n    return limit(x)",
                                  "return limit(x)\n\n\n@register_sharding(torch.ops.{p}.scale.default)\ndef second(x):\n    return helper(x)")]},
                 "its rule function `second` now refers to `helper`", NO, id="two rules for one op change places"),
    pytest.param(STORED, {"{p}/store.py": [("fill(1)", "fill(2)")]}, "`start` in p/store.py, which its rule calls, changed", NO, id="by a method, in a function that a function calls"),
    pytest.param(STORED, {"{p}/store.py": [("= size", "= size + 1")]}, "the class `Store` in p/store.py, which its rule uses, changed", NO, id="a class"),
    pytest.param(STORED, {RULES: [("rule.most = 2", "rule.most = 3")]}, NO, "line 25 of p/rules.py, on which its rule depends, changed", id="an attribute of a function, in a loop"),
    pytest.param(NAMED, {"{p}/ops.py": [("x * 2", "x * 3")]}, "`times` in p/ops.py, which defines the op, changed", NO, id="an op by a computed name"),
    pytest.param(NAMED, {"{p}/ops.py": [("x + 1", "x + 2")]}, NO, "`plus` in p/ops.py, which the op calls, changed", id="an op by a name in a constant"),
    pytest.param(NAMED, {RULES: [("shift.default, limit)", "shift.default, helper)")]}, "its registration changed", "its registration changed", id="a function of one's own that registers"),
    pytest.param(NATIVE, {"native.cpp": "int x = 2;"}, "could not be told apart: no statement binds `_native` in p/util.py, and native.cpp changed", NO, id="compiled code"),
    pytest.param(TYPED, {UTIL: [("x: object", "x: int")]}, *["`helper` in p/util.py, which its rule calls, changed"] * 2, id="an annotation, of which torch makes schemas"),
    pytest.param(MATCHED, {RULES: [("the reason", "why"), ("none", "empty"), ("other", "rest"), ("as error", "as e"), ("str(error)", "str(e)"), ("many", "count"), ("last", "end")]},
                 NO, NO, id="locals of every kind"),
    pytest.param(MATCHED, {RULES: [("case 0 as none", "case 1 as none")]}, "`kind` in p/rules.py, which its rule calls, changed", NO, id="a pattern"),
    pytest.param(MATCHED, {RULES: [("return other", "return many if (many := 1) else other")]}, "`kind` in p/rules.py, which its rule calls, changed", NO, id="a walrus"),
    pytest.param(MATCHED, {RULES: [("(lambda: helper(x))()", "(lambda: 'helper')()")]}, "its rule function `scale_rule` changed", NO, id="the text of a lambda"),
    pytest.param(edit_styles.LOOP, {RULES: [("register_sharding(getattr", "RULES['scale'] = shift_rule\n    register_sharding(getattr")]},
                 "its registration changed", "its registration changed", id="a table that its own loop changes"),
])  # fmt: skip
def test_what_a_rule_depends_on(tmp_path, files, changes, scale, shift):
    check_choices(tmp_path, files, changes, scale, shift)


@pytest.mark.parametrize("patch", [
    "util.helper = util.unused", "setattr(util, 'helper', util.unused)", "util.__dict__.update(helper=util.unused)",
    "vars(util)['helper'] = util.unused", "exec('util.helper = util.unused')",
    "def put():\n    util.helper = util.unused\n\n\nput()",
])  # fmt: skip
def test_who_binds_the_names_of_another_module_anew_changes_all_rules(tmp_path, patch):
    files = {
        **PACKAGE,
        RULES: PACKAGE[RULES].replace("import torch\n", "import torch\nfrom {p} import patches\n", 1),
        "{p}/patches.py": "X = 1\n",
    }
    changes = {"{p}/patches.py": f"from {{p}} import util\n\nX = 1\n{patch}\n"}
    with edits.two_versions(tmp_path, files, changes) as name:
        found = select_changed("HEAD", tmp_path, f"{name}.rules", [f"{name}.scale.default", f"{name}.shift.default"])
    assert [choice.op.split(".")[1] for choice in found.choices] == ["scale", "shift"]
