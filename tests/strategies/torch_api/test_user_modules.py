import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from strategies.torch_api import dtensor
from strategies.torch_api.user_modules import SINGLE_DIM_FIRST, BadRules, RegisteredRules, load_rules, module_digest
from tests.strategies import users


@pytest.fixture(autouse=True)
def restored():
    before = dtensor.registered_functions()
    with users.undone():
        yield
    assert dtensor.registered_functions() == before


def refused(module: str, folder: Path) -> str:
    with pytest.raises(BadRules) as error:
        load_rules(module, str(folder))
    return str(error.value)


def test_what_a_module_registers_comes_back_by_name(tmp_path):
    users.write(tmp_path, "rules_two", 'op("b", lambda x: x * 2, (R, R))\nop("a", lambda x: x * 3, (R, R))')
    assert load_rules("rules_two", str(tmp_path)) == RegisteredRules(
        "rules_two", ("rules_two.a.default", "rules_two.b.default"), ()
    )


@pytest.mark.parametrize("name", ["rules_absent", "rules_absent.inner"])
def test_a_module_or_package_that_is_not_there_is_looked_for_in_the_folder(name, tmp_path):
    assert refused(name, tmp_path) == (
        f"localtensor validate: --rules: {name}: there is no such module. "
        f"Run from the folder that holds it (now {tmp_path})."
    )


@pytest.mark.parametrize(("text", "raised", "line"), [
    ("x = 1\n\nraise LookupError('no luck')\n", "LookupError: no luck", 3),
    ("raise SystemExit(0)\n", "SystemExit: 0", 1),
    ("class Skipped(BaseException): pass\nraise Skipped('no GPU')\n", "Skipped: no GPU", 2),
    ("x = 1\nx = = 2\n", "SyntaxError: invalid syntax (rules_raise.py, line 2)", 2),
], ids=["an exception", "leaving Python", "no exception of the usual kind", "a syntax error"])  # fmt: skip
def test_what_importing_a_module_raises_is_reported_with_file_and_line(text, raised, line, tmp_path):
    (tmp_path / "rules_raise.py").write_text(text)
    assert refused("rules_raise", tmp_path) == (
        f"localtensor validate: --rules: rules_raise: importing it raises {raised} "
        f"({tmp_path}/rules_raise.py, line {line}). Fix that first."
    )


def test_an_interruption_on_import_is_the_users(tmp_path):
    (tmp_path / "rules_stopped.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_rules("rules_stopped", str(tmp_path))


def test_a_file_is_a_module_of_its_package(tmp_path):
    (tmp_path / "inner/rules_held").mkdir(parents=True)
    (tmp_path / "inner/rules_held/__init__.py").write_text("")
    users.write(tmp_path / "inner", "rules_by_file", 'op("a", lambda x: x * 3, (R, R))')
    users.write(tmp_path / "inner/rules_held", "rules_by_path", 'op("b", lambda x: x * 3, (R, R))')
    assert load_rules("inner/rules_by_file.py", str(tmp_path)).module == "rules_by_file"
    found = load_rules(str(tmp_path / "inner/rules_held/rules_by_path.py"), "/")
    assert found == RegisteredRules("rules_held.rules_by_path", ("rules_by_path.b.default",), ())


@pytest.mark.parametrize(("name", "problem"), [
    ("absent.py", "there is no such file. Name a file that registers rules (from {folder})."),
    ("my-rules.py", "`import` takes no file of this name. Rename it, to my_rules.py for instance."),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_refused(name, problem, tmp_path):
    (tmp_path / "my-rules.py").write_text("")
    assert refused(name, tmp_path) == f"localtensor validate: --rules: {name}: {problem.format(folder=tmp_path)}"


@pytest.mark.parametrize("name", ["", " ", ".rules", "rules.", "my/rules", "my rules", "rules:all", "my\\\\rules"])
def test_what_is_no_name_of_a_module_is_refused(name, tmp_path):
    shown = name or "''"
    assert refused(name, tmp_path) == (
        f"localtensor validate: --rules: {shown}: this is no name of a module. "
        "Write it as after `import`: my_package.my_rules, or name the file: my_rules.py."
    )


def test_an_error_inside_torch_is_reported_with_the_line_that_called_it(tmp_path):
    (tmp_path / "rules_inside.py").write_text("import torch\n\ntorch.library.Library('prim', 'DEF')\n")
    said = refused("rules_inside", tmp_path)
    assert said.startswith("localtensor validate: --rules: rules_inside: importing it raises ValueError: ")
    assert said.endswith(f"({tmp_path}/rules_inside.py, line 3). Fix that first.")


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "rules_needy.py").write_text("import no_such_package_at_all\n")
    assert refused("rules_needy", tmp_path) == (
        "localtensor validate: --rules: rules_needy: importing it raises No module named 'no_such_package_at_all'. "
        "Install what it needs."
    )


def test_a_missing_neighbour_in_the_same_package_is_named(tmp_path):
    (tmp_path / "rules_pack").mkdir()
    (tmp_path / "rules_pack/here.py").write_text("import rules_pack.gone\n")
    assert refused("rules_pack.here", tmp_path) == (
        "localtensor validate: --rules: rules_pack.here: importing it raises No module named 'rules_pack.gone'. "
        "Install what it needs."
    )


def test_a_module_that_registers_nothing_is_refused(tmp_path):
    users.write(tmp_path, "rules_none", 'op("a", lambda x: x * 2)')
    assert refused("rules_none", tmp_path) == (
        "localtensor validate: --rules: rules_none: importing it registered no sharding rule. "
        "Call torch's register_sharding in it."
    )


IGNORED = "register_sharding(torch.ops.aten.add.Tensor)(lambda *_, **__: [])"
SINGLE_DIM = """
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

@register_single_dim_strategy(torch.ops.aten.{op})
def lines(op, args, kwargs):
    return []
"""


def a_torch_op(table: str) -> str:
    """Some op of torch's own that has a strategy of this kind and no other."""
    prop = DTensor._op_dispatcher.sharding_propagator
    tables = {"single": prop.op_single_dim_strategy_funcs, "op": prop.op_strategy_funcs}
    mine, other = tables.pop(table), tables.popitem()[1]
    return min(str(op) for op in mine if op not in other and str(op).startswith("aten.")).removeprefix("aten.")


def test_a_registration_that_torch_never_asks_is_ignored(tmp_path):
    users.write(tmp_path, "rules_ignored", IGNORED + '\nop("a", lambda x: x * 2, (R, R))')
    found = load_rules("rules_ignored", str(tmp_path))
    assert (found.ops, found.ignored) == (("rules_ignored.a.default",), (("aten.add.Tensor", SINGLE_DIM_FIRST),))


def test_a_single_dim_strategy_of_the_module_is_asked(tmp_path):
    op = a_torch_op("op")
    users.write(tmp_path, "rules_single", SINGLE_DIM.format(op=op))
    found = load_rules("rules_single", str(tmp_path))
    assert (found.ops, found.ignored) == ((f"aten.{op}",), ())


def test_both_forms_in_one_module_are_one_op_that_is_asked(tmp_path):
    users.write(tmp_path, "rules_both", IGNORED + SINGLE_DIM.format(op="add.Tensor"))
    found = load_rules("rules_both", str(tmp_path))
    assert (found.ops, found.ignored) == (("aten.add.Tensor",), ())


@pytest.mark.parametrize("body", [
    'op("a", lambda x: x * 2, (R, R))', SINGLE_DIM.format(op="add.Tensor"), IGNORED + SINGLE_DIM.format(op="add.Tensor"),
    IGNORED, SINGLE_DIM.format(op=a_torch_op("op")),
])  # fmt: skip
def test_a_module_that_is_imported_already_is_judged_the_same(body, tmp_path, monkeypatch):
    users.write(tmp_path, "rules_again", body)
    monkeypatch.syspath_prepend(str(tmp_path))
    first = load_rules("rules_again", str(tmp_path))
    assert first.ops or first.ignored
    assert importlib.import_module("rules_again") is sys.modules["rules_again"]
    assert load_rules("rules_again", str(tmp_path)) == first


def test_the_folder_is_searched_first(tmp_path):
    name = users.write(tmp_path, "rules_here", 'op("a", lambda x: x * 2, (R, R))')
    load_rules(name, str(tmp_path))
    assert sys.path[0] == str(tmp_path)
    assert Path(sys.modules[name].__file__) == tmp_path / "rules_here.py"


def test_what_a_test_registers_is_gone_afterwards(tmp_path):
    name = users.write(tmp_path, "rules_gone", 'op("a", lambda x: x * 2, (R, R))')
    with users.undone():
        load_rules(name, str(tmp_path))
        assert torch.ops.rules_gone.a.default in dtensor.registered_overloads()
    assert torch.ops.rules_gone.a.default not in dtensor.registered_overloads()


def test_a_second_question_is_answered_as_the_first_though_the_functions_are_written_elsewhere(tmp_path):
    users.write(tmp_path, "rules_elsewhere", 'op("a", lambda x: x * 2, (R, R))')
    (tmp_path / "rules_gathered.py").write_text("import rules_elsewhere\n")
    first = load_rules("rules_gathered", str(tmp_path))
    assert first.ops == ("rules_elsewhere.a.default",) and load_rules("rules_gathered", str(tmp_path)) == first


def test_some_of_what_is_registered_can_be_chosen():
    every = RegisteredRules("m", ("a", "b", "c"), ("d", "e"))
    assert every.only({"c", "d", "x", "a"}) == RegisteredRules("m", ("a", "c"), ("d",))


@pytest.mark.parametrize(("value", "name"), [("42", "int"), ("'a'", "str")])
def test_what_is_no_module_is_refused(value, name, tmp_path):
    (tmp_path / "rules_number.py").write_text(f"import sys\nsys.modules[__name__] = {value}\n")
    try:
        assert f"rules_number: importing it gives {name}, no module." in refused("rules_number", tmp_path)
    finally:
        sys.modules.pop("rules_number", None)


def test_a_module_that_names_another_file_has_no_digest(tmp_path):
    users.write(tmp_path, "rules_moved", 'op("a", lambda x: x * 3, (R, R))\n__file__ = "/nowhere/rules_moved.py"')
    assert load_rules("rules_moved", str(tmp_path)).ops == ("rules_moved.a.default",)
    assert module_digest("rules_moved") == ""
