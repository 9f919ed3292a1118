"""A digest stands for all that a rule depends on: equal for equal code, another one after any edit that matters."""

import contextlib
import shutil

import pytest

from strategies.gate.changes.version_view import OUTSIDE, rule_digests
from strategies.torch_api import user_modules
from tests.strategies import edit_styles, edits, users
from tests.strategies.edits import PACKAGE

OPS = ("scale", "shift")
FILES = {**PACKAGE, "{p}/rules.py": "# two rules\n" + PACKAGE["{p}/rules.py"]}


@contextlib.contextmanager
def loaded(folder, files, changes, name):
    """The package as it is after the changes, imported, in a folder without a repository."""
    shutil.rmtree(folder / name, ignore_errors=True)
    texts = {path: text for path, text in edits.edited(files, changes).items() if text is not None}
    edits.write(folder, name, texts)
    with users.undone():
        user_modules.load_rules(f"{name}.rules", str(folder))
        yield f"{name}.rules"


def told(folder, files, changes, name):
    with loaded(folder, files, changes, name) as module:
        ask = rule_digests(module)
        return [ask(f"{name}.{op}.default") for op in OPS]


@pytest.fixture
def both(tmp_path):
    """For each of the two overloads whether its digest is the same before and after the changes."""

    def ask(files, changes):
        name = f"digest{next(edits.numbers)}"
        before = told(tmp_path, files, {}, name)
        return [a == b and a is not None for a, b in zip(before, told(tmp_path, files, changes, name), strict=True)]

    return ask


def test_it_is_equal_for_equal_code_and_for_what_does_not_matter(both):
    harmless = {
        "{p}/rules.py": [("How scale", "Which way"), ("whole", "all_of_it")],
        "{p}/tables.py": [("UNUSED = 5", "UNUSED = 6")],
    }
    assert both(FILES, {}) == [True, True]
    assert both(FILES, harmless) == [True, True]


@pytest.mark.parametrize(("changes", "same"), [
    ({"{p}/rules.py": [("[whole, *", "[*")]}, [False, True]),
    ({"{p}/util.py": [("x.ndim]", "x.ndim - 1]")]}, [False, False]),
    ({"{p}/tables.py": [('"shift": 3', '"shift": 4')]}, [True, False]),
    ({"{p}/ops.py": [("return 2", "return 3")]}, [False, True]),
    ({"{p}/rules.py": [("torch.ops.{p}.shift.default)(shift_rule", "[torch.ops.{p}.shift.default])(shift_rule")]}, [True, False]),
], ids=["a rule", "what both call", "a constant", "an op", "a registration"])  # fmt: skip
def test_it_is_another_one_after_an_edit_that_matters(both, changes, same):
    assert both(FILES, changes) == same


def test_there_is_none_for_a_rule_that_reads_files(tmp_path):
    assert [found is None for found in told(tmp_path, edit_styles.READS, {}, "digest_reads")] == [True, False]


@pytest.mark.parametrize(
    "read",
    ['os.environ.get("DIM", 0)', 'os.getenv("DIM", 0)', 'json.load(open("x"))', "lost.dim()", "time.time()",
     'os.path.exists("wide")', "random.random()", "torch.cuda.device_count()"],
)  # fmt: skip
def test_there_is_none_for_a_rule_that_reads_what_is_no_text(tmp_path, read):
    text = "import json\nimport os\nimport random\nimport time\n" + PACKAGE["{p}/rules.py"]
    text = text.replace("*helper(x)", f"*(helper(x) if x.ndim < 9 else {read})")
    name = f"digest_{len(read)}"
    assert [found is None for found in told(tmp_path, {**PACKAGE, "{p}/rules.py": text}, {}, name)] == [True, False]


@pytest.mark.parametrize(
    "version", ["", '__version__ = "1.0"\n'], ids=["without a version", "of a version, but not installed"]
)
def test_there_is_none_for_a_rule_that_uses_a_library_which_may_change_unseen(tmp_path, monkeypatch, version):
    (tmp_path / "library").mkdir()
    name = f"beside_{len(version)}"
    (tmp_path / f"library/{name}.py").write_text(f"{version}FEW = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    text = f"import {name}\n" + PACKAGE["{p}/rules.py"].replace("*helper(x)", f"*helper(x)[: {name}.FEW]")
    (tmp_path / "project").mkdir()
    found = told(tmp_path / "project", {**PACKAGE, "{p}/rules.py": text}, {}, f"digest_{name}")
    assert [digest is None for digest in found] == [True, False]


def test_there_is_none_for_an_op_that_comes_from_where_it_may_change_unseen(tmp_path, monkeypatch):
    users.write(tmp_path, "far_ops", 'op("far", lambda x: x * 2, (R, R))')
    (tmp_path / "far").mkdir()
    (tmp_path / "far_ops.py").rename(tmp_path / "far/far_ops.py")
    monkeypatch.syspath_prepend(str(tmp_path / "far"))
    rule = "\n\n@register_sharding(torch.ops.far_ops.far.default)\ndef far_rule(x):\n    return helper(x)\n"
    rules = PACKAGE["{p}/rules.py"].replace("import torch\n", "import far_ops\nimport torch\n", 1) + rule
    (tmp_path / "near").mkdir()
    with loaded(tmp_path / "near", {**PACKAGE, "{p}/rules.py": rules}, {}, "near_rules") as module:
        ask = rule_digests(module)
        assert ask("far_ops.far.default") is None and ask("near_rules.scale.default") is not None


def test_what_cannot_be_distinguished_has_the_digest_of_all_modules(both):
    assert both(edit_styles.GUESSED, {}) == [True, True]
    assert both(edit_styles.GUESSED, {"{p}/util.py": [("rows(x, 7)", "rows(x, 8)")]}) == [False, False]
    assert both(edit_styles.GUESSED, {"{p}/util.py": [("def unused", "# note\ndef unused")]}) == [True, True]


def test_the_rules_of_torch_itself_are_known_by_its_version():
    assert rule_digests(None)("aten.mul.Tensor") == OUTSIDE
