"""Which rules changed, and why: an edit of each kind, to two rules written in each way.  Why two slices differ: of
several statements that changed, the one that is nearest to the rule is told."""

import ast
from itertools import combinations

import pytest

from strategies.gate.changes.dependency_slice import OP, REGISTRATION, RULE, Slice, SliceStatement
from strategies.gate.changes.module_model import Statement
from strategies.gate.changes.select import change_reason, select_changed
from tests.strategies import edit_styles, edits, users
from tests.strategies.edits import PACKAGE

NO = ""
"""Not chosen."""
RULES, UTIL, OPS, TABLES = "{p}/rules.py", "{p}/util.py", "{p}/ops.py", "{p}/tables.py"
NEW_OP = '\n\n@torch.library.custom_op("{p}::twice", mutates_args=())\ndef twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n'
NEW_RULE = "\n\n@register_sharding(torch.ops.{p}.twice.default)\ndef twice_rule(x):\n    return helper(x)\n"
MOVED = "def rows(x, dim):\n    placements = [Shard(dim)]\n    return (placements, placements)\n"
HELPER = "`helper` in p/util.py, which its rule calls, changed"
DIMS = "the constant DIMS that it reads changed"


def check_choices(folder, files, changes, scale, shift):
    """The reason for each of the two overloads; `p` stands for the package."""
    with edits.two_versions(folder, files, changes) as name:
        found = select_changed("HEAD", folder, f"{name}.rules", [f"{name}.scale.default", f"{name}.shift.default"])
    reasons = {choice.op.split(".")[1]: choice.reason.replace(name, "p") for choice in found.choices}
    assert (reasons.get("scale", NO), reasons.get("shift", NO)) == (scale, shift)
    assert [op.split(".")[1] for op in found.unchanged] == [op for op in ("scale", "shift") if op not in reasons]


@pytest.mark.few(5)
@pytest.mark.parametrize("changes", [
    pytest.param({}, id="nothing"),
    pytest.param({UTIL: [("def helper", "# helps\n\n\ndef helper")]}, id="a comment"),
    pytest.param({RULES: [("How scale", "In which way scale")]}, id="a docstring"),
    pytest.param({UTIL: [("def helper(x):\n", 'def helper(x):\n    """Rows for all."""\n')]}, id="a new docstring"),
    pytest.param({UTIL: [("for dim in DIMS if dim < x.ndim]", "for dim in DIMS\n            if (dim < x.ndim)]")]}, id="layout"),
    pytest.param({UTIL: [("placements", "both")]}, id="the name of a local"),
    pytest.param({UTIL: [("rows(x, dim) for dim in DIMS if dim", "rows(x, d) for d in DIMS if d")]}, id="of a comprehension"),
    pytest.param({UTIL: [(MOVED, ""), ("def unused", MOVED + "\n\ndef unused")]}, id="the order of functions"),
    pytest.param({UTIL: [(MOVED, "from {p}.more import rows\n")],
                  "{p}/more.py": "from torch.distributed.tensor import Shard\n\n\n" + MOVED}, id="a function moves to a new module"),
    pytest.param({RULES: [("from {p}.util import helper", "from {p} import util as tools"), ("*helper", "*tools.helper")]},
                 id="how a function is imported"),
    pytest.param({UTIL: [("from torch.distributed.tensor import Replicate, Shard", "import torch.distributed.tensor as dt"),
                         ("Shard(dim)", "dt.Shard(dim)")]}, id="how torch is imported"),
    pytest.param({RULES: [("from {p} import ops, util", "from . import ops, util")]}, id="a relative import"),
    pytest.param({TABLES: [("UNUSED = 5", "UNUSED = 6\nMORE = 7")], UTIL: [("rows(x, 7)", "rows(x, 8)")]}, id="what nobody reads"),
    pytest.param({UTIL: [("LIMITS\n", "LIMITS, UNUSED\n")]}, id="an import that nobody uses"),
    pytest.param({"README.md": "Rules."}, id="documentation"),
    pytest.param({"{p}/other.py": "import os\n\nLIMITS = {}\n"}, id="a module that nobody imports"),
    pytest.param({"{p}/broken.py": "def ("}, id="a broken file that nobody imports"),
    pytest.param({OPS: NEW_OP.join([PACKAGE[OPS], ""]), RULES: PACKAGE[RULES] + NEW_RULE}, id="another op with its rule"),
    pytest.param({RULES: PACKAGE[RULES] + "\n\nif __name__ == '__main__':\n    print(scale_rule)\n"}, id="what only a script does"),
    pytest.param({TABLES: PACKAGE[TABLES].replace("\n", "\r\n")}, id="the ends of lines"),
    pytest.param({TABLES: [("(0, 1)", "(0x0, 0x1)")]}, id="how a number is written"),
    pytest.param({RULES: [("def shift_rule(x):\n", "def shift_rule(x):\n    rows: list[int]\n    pass\n")]}, id="what does nothing"),
])  # fmt: skip
def test_an_edit_that_changes_nothing_chooses_nothing(tmp_path, changes):
    check_choices(tmp_path, PACKAGE, changes, NO, NO)


@pytest.mark.few(5)
@pytest.mark.parametrize(("changes", "scale", "shift"), [
    pytest.param({RULES: [("[whole, *helper(x)]", "[*helper(x), whole]")]}, "its rule function `scale_rule` changed", NO, id="a rule"),
    pytest.param({RULES: [("def scale_rule(x)", "def scale_rule(x, dim=0)")]}, "its rule function `scale_rule` changed", NO, id="a default"),
    pytest.param({UTIL: [("x.ndim]", "x.ndim - 1]")]}, HELPER, HELPER, id="a function that both call"),
    pytest.param({UTIL: [('LIMITS["shift"]', 'LIMITS["scale"]')]}, NO, "`limit` in p/util.py, which its rule calls, changed", id="that one calls"),
    pytest.param({UTIL: [("[Shard(dim)]", "[Shard(dim), Shard(dim)]")]}, *["`rows` in p/util.py, which its rule calls, changed"] * 2, id="deep down"),
    pytest.param({UTIL: [("(placements, placements)", "(placements, [Replicate()])")]},
                 *["`rows` in p/util.py, which its rule calls, changed"] * 2, id="another name of torch's"),
    pytest.param({UTIL: [("import Replicate, Shard", "import Replicate, Partial as Shard")]},
                 *["`rows` in p/util.py, which its rule calls, changed"] * 2, id="another meaning of a name"),
    pytest.param({TABLES: [("(0, 1)", "(0,)")]}, DIMS, DIMS, id="a constant"),
    pytest.param({TABLES: [("UNUSED = 5", "DIMS = (*DIMS, 2)")]}, DIMS, DIMS, id="a constant bound again"),
    pytest.param({TABLES: [("UNUSED = 5", "LIMITS['shift'] = 1")]}, NO, "line 4 of p/tables.py, on which its rule depends, changed", id="a table filled"),
    pytest.param({TABLES: [('"shift": 3', '"shift": 4')]}, NO, "the constant LIMITS that it reads changed", id="a table"),
    pytest.param({RULES: [("*helper(x)", "*util.rows(x, 0)")]}, "its rule function `scale_rule` changed", NO, id="calls something else"),
    pytest.param({RULES: [("import helper", "import unused as helper")]}, "its rule function `scale_rule` now refers to `unused`", NO,
                 id="another function under the same name"),
    pytest.param({OPS: [("x + 1", "x + 2")]}, NO, "`shift` in p/ops.py, which defines the op, changed", id="an op"),
    pytest.param({OPS: [("return 2", "return 3")]}, "`factor` in p/ops.py, which the op calls, changed", NO, id="what an op calls"),
    pytest.param({OPS: [("@shift.register_fake\ndef _(x):\n    return", "@shift.register_fake\ndef _(x):\n    return +")]},
                 NO, "`_` in p/ops.py, which defines the op, changed", id="the shape of an op"),
    pytest.param({RULES: [("@register_sharding(torch.ops.{p}.scale.default)", "@register_sharding([torch.ops.{p}.scale.default, torch.ops.{p}.shift.default])"),
                          ("register_sharding(torch.ops.{p}.shift.default)(shift_rule)", "")]}, "its registration changed", "its rule function is now `scale_rule` in p/rules.py", id="another op for a rule"),
    pytest.param({OPS: [("def shift(x: torch.Tensor)", "def shift(x: torch.Tensor, by: int = 1)")]}, NO,
                 "`shift` in p/ops.py, which defines the op, changed", id="a schema"),
    pytest.param({RULES: [(".shift.default)(shift_rule)", ".shift.default)(scale_rule)")]}, NO, "its registration changed", id="a registration"),
    pytest.param({RULES: [("*util.limit(x)]", "*util.limit(x=x)]")]}, NO, "its rule function `shift_rule` changed", id="an argument's name"),
    pytest.param({RULES: PACKAGE[RULES] + "\nReplicate.of_this_test = True\n"}, "its registration changed",
                 "its registration changed", id="torch itself is changed"),
    pytest.param({UTIL: [("def helper", "@lru_cache\ndef helper"), ("from {p}", "from functools import lru_cache\nfrom {p}")]}, HELPER, HELPER, id="a decorator"),
    pytest.param({UTIL: [("def limit(x):", "def limit(x):\n    global DIMS\n    DIMS = ()")]}, *["`limit` in p/util.py, which its rule calls, changed"] * 2,
                 id="a global that a function changes"),
])  # fmt: skip
def test_an_edit_chooses_what_depends_on_it_and_says_how(tmp_path, changes, scale, shift):
    check_choices(tmp_path, PACKAGE, changes, scale, shift)


SAMPLES = "\n\ndef samples(op):\n    from {p} import calls\n\n    for size in calls.sizes():\n        yield (torch.ones(size),), {}\n".replace(
    "{}", "dict()"
)
CALLS = "def sizes():\n    return 4, 5\n"
SAMPLED = {**PACKAGE, RULES: PACKAGE[RULES] + SAMPLES, "{p}/calls.py": CALLS}
FROM_ELSEWHERE = {
    **PACKAGE,
    RULES: PACKAGE[RULES] + "\n\nfrom {p}.calls import samples\n",
    "{p}/calls.py": f"import torch\n\n\n{CALLS}{SAMPLES}",
}


@pytest.mark.parametrize(("files", "changes", "reason"), [
    pytest.param(SAMPLED, {"{p}/calls.py": [("4, 5", "4, 6")]}, "`sizes` in p/calls.py, which its test calls, changed", id="what it calls"),
    pytest.param(SAMPLED, {RULES: [("torch.ones", "torch.zeros")]}, "`samples` in p/rules.py, which its test calls, changed", id="itself"),
    pytest.param(FROM_ELSEWHERE, {"{p}/calls.py": [("torch.ones", "torch.zeros")]}, "`samples` in p/calls.py, which its test calls, changed", id="imported"),
    pytest.param(PACKAGE, {RULES: PACKAGE[RULES] + SAMPLES, "{p}/calls.py": CALLS}, "`samples` in p/rules.py, which its test calls, changed", id="new"),
    pytest.param(SAMPLED, {RULES: PACKAGE[RULES]}, "`samples` in p/rules.py, on which its test depended, is gone", id="gone"),
    pytest.param(SAMPLED, {"{p}/calls.py": [("return 4", "# sizes\n    return 4")]}, NO, id="a comment"),
])  # fmt: skip
def test_the_function_that_gives_the_calls_counts_for_every_op_of_the_module(tmp_path, files, changes, reason):
    check_choices(tmp_path, files, changes, reason, reason)


@pytest.mark.few(8)
@pytest.mark.parametrize(("files", "changes", "scale", "shift"), [
    pytest.param(edit_styles.LOOP, {}, NO, NO, id="a loop"),
    pytest.param(edit_styles.LOOP, {RULES: [("return limit(x)", "return limit(x)[:1]")]}, NO, "its rule function `shift_rule` changed", id="a loop: one rule"),
    pytest.param(edit_styles.LOOP, {RULES: [('"shift": shift_rule', '"shift": scale_rule')]}, *["the constant RULES that its registration reads changed"] * 2,
                 id="a loop: the table"),
    pytest.param(edit_styles.PAIRS, {RULES: [("return limit(x)", "return limit(x)[:1]")]}, NO, "its rule function `shift_rule` changed", id="pairs: one rule"),
    pytest.param(edit_styles.PAIRS, {RULES: [("(op)(rule)", "(op)(lambda x: rule(x)[:1])")]}, *["`register_all` in p/rules.py, which makes its rule function, changed"] * 2, id="pairs: the function that registers"),
    pytest.param(edit_styles.PAIRS, {RULES: [("\n\nregister_all()", "\n\n# all:\nregister_all()")]}, NO, NO, id="pairs: a comment"),
    pytest.param(edit_styles.FACTORY, {RULES: [('"shift", 0', '"shift", 1')]}, NO, "its registration changed", id="a factory: one call"),
    pytest.param(edit_styles.FACTORY, {RULES: [("LEAST = 1", "LEAST = 2")]}, "the constant LEAST that its registration reads changed", NO, id="a factory: a value that it is given"),
    pytest.param(edit_styles.FACTORY, {RULES: [("x.ndim]", "x.ndim + 1]")]}, *["`sharded` in p/rules.py, which makes its rule function, changed"] * 2, id="a factory: itself"),
    pytest.param(edit_styles.MADE, {RULES: [("return 0", "return 1")]}, "`start` in p/rules.py, which its registration calls, changed", NO, id="a closure: its value"),
    pytest.param(edit_styles.MADE, {RULES: [("partial(limit)", "partial(helper)")]}, NO, "its registration changed", id="a partial"),
    pytest.param(edit_styles.MADE, {RULES: [("lambda x: [", "lambda x: [] + [")]}, "`along` in p/rules.py, which makes its rule function, changed", NO, id="a closure: its code"),
    pytest.param(edit_styles.REGISTRY, {"{p}/registry.py": [("= function", "= lambda x: function(x)[:1]")]}, "`rule` in p/registry.py, which its rule calls, changed",
                 "`rule` in p/registry.py, which its registration calls, changed", id="a registry of one's own"),
    pytest.param(edit_styles.REGISTRY, {RULES: [("return helper(x)", "return limit(x)")]}, "`scale_rule` in p/rules.py, which its rule calls, now refers to `limit`",
                 "`scale_rule` in p/rules.py, which its registration calls, now refers to `limit`", id="what a registry holds"),
    pytest.param(edit_styles.METHODS, {RULES: [("return helper(x)", "return limit(x)")]}, "the class `Base` in p/rules.py, which its rule uses, now refers to `limit`", NO, id="a base class"),
    pytest.param(edit_styles.METHODS, {UTIL: [("rows(x, 7)", "rows(x, 8)")], RULES: [("Rules, as methods", "Methods")]}, NO, NO, id="beside a class"),
    pytest.param(edit_styles.METHODS, {RULES: [("return limit(x)", "return helper(x)")]}, NO, "its rule function `Others` now refers to `helper`", id="a static method"),
    pytest.param(edit_styles.WRAPPED, {RULES: [("        return function(x)", "        return function(x)[:1]")]}, "`logged` in p/rules.py, which makes its rule function, changed", NO, id="what wraps it"),
    pytest.param(edit_styles.WRAPPED, {RULES: [("list(", "tuple(")]}, NO, "`bare` in p/rules.py, which makes its rule function, changed", id="what wraps it without saying so"),
    pytest.param(edit_styles.WRAPPED, {RULES: [("    return limit(x)", "    return helper(x)")]}, NO, "its rule function `shift_rule` now refers to `helper`", id="a wrapped rule"),
    pytest.param(edit_styles.WRAPPED, {RULES: [("@bare", "@logged")]}, NO, "its registration changed", id="another wrapper"),
    pytest.param(edit_styles.LATE, {"{p}/late.py": [("return x.ndim", "return 1")]}, "`width` in p/late.py, which its rule calls, changed", NO, id="an import in a function"),
    pytest.param(edit_styles.LATE, {UTIL: [("x.ndim]", "x.ndim - 1]")]}, HELPER, HELPER, id="a module imported in a function"),
    pytest.param(edit_styles.LATE, {RULES: [("import late", "import late as later"), ("return late.", "return later.")]}, NO, NO, id="its name there"),
    pytest.param(edit_styles.LATE, {RULES: [("lambda x: limit(x)", "lambda x: limit(x)[:1]")]}, NO, "its rule function on line 20 of p/rules.py changed", id="a lambda"),
    pytest.param(edit_styles.BY_LIBRARY, {OPS: [("x + 1", "x + 2")]}, NO, "`shift_kernel` in p/ops.py, which the op calls, changed", id="a kernel"),
    pytest.param(edit_styles.BY_LIBRARY, {OPS: [('"shift(Tensor x) ', '"shift(Tensor x, int by=1) ')]}, NO, "line 16 of p/ops.py, which defines the op, changed", id="a definition"),
    pytest.param(edit_styles.BY_LIBRARY, {OPS: [('LIB.define("scale', 'LIB.define("more(Tensor x) -> Tensor")\nLIB.define("scale')]}, NO, NO, id="another definition"),
    pytest.param(edit_styles.EXPORTS, {UTIL: [("x.ndim]", "x.ndim - 1]")]}, HELPER, HELPER, id="through re-exports and a star"),
    pytest.param(edit_styles.EXPORTS, {"{p}/api/inner.py": [("helper = util.helper", "helper = util.unused")]}, "its rule function `scale_rule` now refers to `unused`", NO, id="a re-export"),
    pytest.param(edit_styles.EXPORTS, {"{p}/api/__init__.py": [("import limit\n", "import limit\n\n__all__ = ['helper', 'limit']\n")]}, NO, NO, id="a list of what is exported"),
    pytest.param(edit_styles.DOOR, {UTIL: [("x.ndim]", "x.ndim - 1]")]}, HELPER, HELPER, id="through a door"),
    pytest.param(edit_styles.DOOR, {"{p}/api/inner.py": [("return []", "return [x]")]}, "`further` in p/api/inner.py, which its rule calls, changed", NO, id="a module that a door offers"),
    pytest.param(edit_styles.DOOR, {"{p}/api/__init__.pyi": [("import limit as", "import unused as")]}, NO, "its rule function on line 17 of p/rules.py now refers to `unused`", id="a door leads elsewhere"),
    pytest.param(edit_styles.DOOR, {"{p}/api/__init__.pyi": [("from {p}.util", "# note\nfrom {p}.util")]}, NO, NO, id="a comment on a door"),
    pytest.param(edit_styles.DOOR, {"{p}/api/__init__.pyi": "", "{p}/api/__init__.py": "from {p}.api import inner\nfrom {p}.api.inner import helper\nfrom {p}.util import limit\n"}, NO, NO, id="no door anymore"),
    pytest.param(edit_styles.SINGLE, {RULES: [("default, allow_uneven_sharding=True", "default")]}, "its registration changed", NO, id="single-dim: an option"),
    pytest.param(edit_styles.SINGLE, {RULES: [("[Shard(dim), Shard(dim)]", "[Shard(0), Shard(dim)]")]}, "`lines` in p/rules.py, which its rule calls, changed", NO, id="single-dim: what it calls"),
    pytest.param(edit_styles.READS, {"{p}/dims.json": "[1]"}, "could not be told apart: it reads files (`read_text`), and p/dims.json changed", NO, id="a file of data"),
    pytest.param(edit_styles.READS, {"{p}/other.py": "X = 1"}, "could not be told apart: it reads files (`read_text`), and p/other.py changed", NO, id="a file of code that nobody imports"),
    pytest.param(edit_styles.READS, {UTIL: [("def unused", "# note\ndef unused")]}, NO, NO, id="a comment beside a file of data"),
    pytest.param(edit_styles.GUESSED, {UTIL: [("rows(x, 7)", "rows(x, 8)")]}, "could not be told apart: `getattr` by a computed name in p/rules.py, and p/util.py changed",
                 "could not be told apart: `eval` in p/rules.py, and p/util.py changed", id="names that are computed"),
    pytest.param(edit_styles.GUESSED, {UTIL: [("def unused", "# note\ndef unused")]}, NO, NO, id="a comment beside computed names"),
    pytest.param(edit_styles.FILLED, {RULES: [('SIZES["scale"] = 1', 'SIZES["scale"] = 2')]}, "line 14 of p/rules.py, on which its rule depends, changed", NO, id="a table filled elsewhere"),
    pytest.param(edit_styles.FILLED, {"{p}/filled.py": [("MORE += 1", "MORE += 2")]}, "line 4 of p/filled.py, on which its rule depends, changed", NO, id="a constant bound under a condition"),
])  # fmt: skip
def test_however_the_rules_are_written(tmp_path, files, changes, scale, shift):
    check_choices(tmp_path, files, changes, scale, shift)


@pytest.mark.parametrize("how", ["from {p}.sub.wide import WIDE", "import wide_sub\nWIDE = wide_sub.WIDE"])
def test_a_submodule_that_a_rule_uses_counts_as_soon_as_it_changes(tmp_path, tmp_path_factory, monkeypatch, how):
    library = tmp_path_factory.mktemp("library")
    edits.git(library, "init", "-q")
    edits.write(library, "", {"wide.py": "WIDE = 1\n", "wide_sub.py": "WIDE = 1\n"})
    edits.commit(library)
    files = {**PACKAGE, UTIL: how + "\n" + PACKAGE[UTIL].replace("if dim < x.ndim", "if dim < x.ndim * WIDE")}
    with monkeypatch.context() as patch:
        patch.setattr(edits.user_modules, "load_rules", lambda *_: None)
        with edits.two_versions(tmp_path, files, {}) as name:
            edits.git(tmp_path, "reset", "-q")
            edits.git(
                tmp_path, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), f"{name}/sub"
            )
            edits.commit(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / name / "sub"))
    with users.undone():
        edits.user_modules.load_rules(f"{name}.rules", str(tmp_path))
        ops = [f"{name}.scale.default", f"{name}.shift.default"]
        assert select_changed("HEAD", tmp_path, f"{name}.rules", ops).choices == ()
        (tmp_path / name / "sub/wide.py").write_text("WIDE = 2\n")
        found = select_changed("HEAD", tmp_path, f"{name}.rules", ops)
    assert [choice.op for choice in found.choices] == ops
    assert all(f"{name}/sub" in choice.reason for choice in found.choices)


TEXT = """def rule(x): return rows(x)
made = partial(rule)
register(made)
def op(x): return x
def helper(x): return x
def further(x): return x"""
UNITS = {
    name: Statement("a.py", number, node, frozenset([name]))
    for number, (name, node) in enumerate(
        zip(("rule", "made", "register", "op", "helper", "further"), ast.parse(TEXT).body, strict=True)
    )
}
ROOTS = {"rule": RULE, "made": RULE, "register": REGISTRATION, "op": OP}
FUNCTIONS, MAKERS = [UNITS["rule"], UNITS["made"]], [UNITS["made"]]
SAID = {
    "rule": "its rule function `rule` changed",
    "made": "`made` in a.py, which makes its rule function, changed",
    "register": "its registration changed",
    "op": "`op` in a.py, which defines the op, changed",
    "helper": "`helper` in a.py, which its rule calls, changed",
    "further": "`further` in a.py, which its rule calls, changed",
}
"""What is said of each if only that one changed; the nearest to the rule first."""


def sliced(changed=(), order=tuple(SAID), without=()):
    parts = [
        SliceStatement(UNITS[n], ROOTS.get(n, RULE), n in ROOTS, f"def {n}", "new" if n in changed else "old")
        for n in order
        if n not in without
    ]
    return Slice(tuple(parts), "")


def told(changed, order=tuple(SAID), without=()):
    return change_reason(sliced(changed, order), sliced(without=without), FUNCTIONS, MAKERS)


@pytest.mark.parametrize("name", SAID)
def test_what_alone_changed_is_reported(name):
    assert told([name]) == SAID[name]


@pytest.mark.parametrize(("near", "far"), list(combinations(SAID, 2)))
def test_of_two_that_changed_the_nearest_to_the_rule_is_reported(near, far):
    others = [name for name in SAID if name not in (near, far)]
    order = (near, far, *others) if {near, far} == {"helper", "further"} else (far, near, *others)
    assert told([near, far], order) == SAID[near]


def test_what_changed_comes_before_what_is_new():
    assert told(["helper"], without=["op"]) == SAID["helper"]


def test_what_is_gone_is_reported_and_a_registration_in_its_own_words():
    then, now = sliced(), sliced(without=["helper"])
    assert change_reason(now, then, FUNCTIONS, MAKERS) == "`helper` in a.py, on which its rule depended, is gone"
    assert change_reason(sliced(without=["register"]), then, FUNCTIONS, MAKERS) == "its registration changed"


def test_nothing_but_another_order_is_reported_as_that():
    turned = sliced(order=tuple(reversed(SAID)))
    assert change_reason(turned, sliced(), FUNCTIONS, MAKERS) == "what it depends on stands in another order"
