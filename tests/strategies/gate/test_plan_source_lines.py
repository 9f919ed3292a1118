from pathlib import Path

import pytest

from strategies.gate import plan as gate_places
from strategies.gate.baseline import SourceLine
from strategies.gate.plan import repository_path, source_lines
from strategies.torch_api import user_modules
from tests.strategies import edit_styles, edits, users

BODY = """
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

op("falling", lambda x: x.flip(0).cumsum(0))
op("twice", lambda x: x * 2)


@register_single_dim_strategy(torch.ops.rules_placed.falling.default)
def lines(op, args, kwargs):
    return [[Shard(0), Shard(0)]]


@register_sharding(torch.ops.rules_placed.twice.default)
def rows(x):
    return [(R, R)]
"""


@pytest.fixture
def placed(tmp_path):
    (tmp_path / "pkg").mkdir()
    users.write(tmp_path / "pkg", "rules_placed", BODY)
    with users.undone():
        user_modules.load_rules("rules_placed", str(tmp_path / "pkg"))
        yield tmp_path


def line_of(folder, text):
    return (folder / "pkg/rules_placed.py").read_text().split("\n").index(text) + 1


def test_both_kinds_of_registration_lead_to_the_line_of_the_users_function(placed):
    find = source_lines(placed, {"rules_placed.falling.default", "rules_placed.twice.default"})
    first = line_of(placed, "@register_single_dim_strategy(torch.ops.rules_placed.falling.default)")
    second = line_of(placed, "@register_sharding(torch.ops.rules_placed.twice.default)")
    assert find("rules_placed.falling.default") == SourceLine("pkg/rules_placed.py", first)
    assert find("rules_placed.twice.default") == SourceLine("pkg/rules_placed.py", second)


def test_of_an_overload_that_torch_has_a_rule_for_the_users_own_is_found(placed):
    users.write(placed / "pkg", "rules_beside", "register_sharding(torch.ops.aten.add.Tensor)(lambda *_, **__: [])")
    user_modules.load_rules("rules_beside", str(placed / "pkg"))
    assert source_lines(placed, ["aten.add.Tensor"])("aten.add.Tensor").file == "pkg/rules_beside.py"


def test_of_a_rule_that_is_wrapped_the_line_is_that_of_what_its_author_wrote(tmp_path):
    edits.write(tmp_path, "places_wrapped", edit_styles.WRAPPED)
    with users.undone():
        user_modules.load_rules("places_wrapped.rules", str(tmp_path))
        op = "places_wrapped.scale.default"
        found = source_lines(tmp_path, [op])(op)
    lines = (tmp_path / "places_wrapped/rules.py").read_text().splitlines()
    assert found.file == "places_wrapped/rules.py"
    assert lines[found.line - 1] == "@register_sharding(torch.ops.places_wrapped.scale.default)"


def test_what_is_outside_of_the_repository_has_no_place(placed):
    elsewhere = placed / "other"
    elsewhere.mkdir()
    ops = ("rules_placed.twice.default", "aten.add.Tensor", "no.such.op")
    assert [source_lines(elsewhere, ops)(op) for op in ops] == [None] * 3
    assert [op for op in ops if source_lines(placed, ops)(op)] == ["rules_placed.twice.default"]


def test_a_path_is_reported_as_the_repository_knows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert repository_path(Path("b.json"), tmp_path) == "b.json"
    assert repository_path(tmp_path / "x/b.json", tmp_path) == "x/b.json"
    assert repository_path(Path("/elsewhere/b.json"), tmp_path) == "/elsewhere/b.json"


def test_where_nothing_is_wrong_no_one_looks(placed, monkeypatch):
    monkeypatch.setattr(gate_places, "rule_functions", lambda: 1 / 0)
    assert source_lines(placed, ())("rules_placed.twice.default") is None
