import json

import pytest

pytest.importorskip("spmd_types")

from strategies.cli.commands.validate import run
from strategies.cli.options import ValidateOptions

HOOKS = """
import torch
from spmd_types import rules

class Square(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(*, x):
        return rules.einsum("mn->mn", x, linear_in=(0,))

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad

class Total(Square):
    @staticmethod
    def spmd_typecheck(*, x):
        return rules.einsum("mn->mn", x)
"""
PLACED = """
import functools
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import local_map

@functools.partial(local_map, out_placements=[Replicate()], in_placements=([Shard(0)],))
def total(x):
    return x.sum(0)
"""


def validate(tmp_path, capsys, *, ops=(), code=2, **options):
    json_file = tmp_path / "report.json"
    given = ValidateOptions(ops=ops, ranks=(2,), workers=1, quiet=True, json=json_file, **options)
    assert run(given) == code, capsys.readouterr()
    return json.loads(json_file.read_text()) if json_file.exists() else capsys.readouterr().err


def rule(finding):
    return f"{finding['op']}: {', '.join(finding['inputs'])} -> {', '.join(finding['outputs'])}"


def test_wrong_claims_of_the_op_table_are_confirmed_on_real_processes(tmp_path, capsys):
    found = validate(
        tmp_path, capsys, ops=("torch.nansum", "torch.neg"), source="spmd_types", code=1, repro=tmp_path / "scripts"
    )
    assert {(rule(f), f["verdict"], f["confirmed_on"]) for f in found["findings"]} == {
        ("spmd_types.torch_nansum.default: P(sum) -> P(sum)", "unsound", "gloo"),
        ("spmd_types.torch_nansum.gradient: P(sum), R -> R", "unsound", "gloo"),
    }
    for script in (tmp_path / "scripts").iterdir():
        text = script.read_text()
        assert "import spmd_types" in text and "localtensor" not in text and "strategies" not in text


def test_the_hooks_of_a_module_are_tested_and_their_script_imports_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "squares_30.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    found = validate(tmp_path, capsys, source="spmd_types", rules=str(tmp_path / "squares_30.py"), code=1)
    assert {rule(f) for f in found["findings"] if f["verdict"] == "unsound"} == {
        "squares_30.Square.default: P(sum) -> P(sum)", "squares_30.Square.gradient: P(sum), R -> R",
    }  # fmt: skip


def test_declared_placements_of_local_map_are_tested(tmp_path, capsys, monkeypatch):
    (tmp_path / "placed_30.py").write_text(PLACED)
    monkeypatch.syspath_prepend(tmp_path)
    found = validate(tmp_path, capsys, source="local_map", rules=str(tmp_path / "placed_30.py"), code=1)
    assert "local_map.total.default: S(0) -> R" in {rule(f) for f in found["findings"] if f["verdict"] == "unsound"}


@pytest.mark.parametrize(("options", "sentence"), [
    ({"source": "spmd"}, "--source: 'spmd': no source has this name"),
    ({"source": "spmd_types", "ops": ("torch.nansums",)}, "no op and no overload has this name. Did you mean"),
    ({"source": "spmd_types", "search": True}, "--search: given: it does not go with --source spmd_types"),
    ({"source": "spmd_types", "mesh": ("2,2",)}, "--mesh: given: it does not go with --source spmd_types"),
    ({"source": "local_map"}, "--source local_map speaks about a module of yours"),
])  # fmt: skip
def test_wrong_options_are_one_sentence(tmp_path, capsys, options, sentence):
    text = validate(tmp_path, capsys, **options)
    assert sentence in text and len(text.strip().splitlines()) == 1


def test_a_module_without_hooks_is_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "no_hooks_30.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = validate(tmp_path, capsys, source="spmd_types", rules=str(tmp_path / "no_hooks_30.py"))
    assert "no autograd Function in it has a typecheck hook" in text


def test_a_journal_of_a_source_is_resumed_without_doing_anything_twice(tmp_path, capsys):
    journal = tmp_path / "journal.jsonl"
    first = validate(tmp_path, capsys, ops=("torch.neg",), source="spmd_types", code=0, journal=journal)
    lines = journal.read_text()
    again = validate(tmp_path, capsys, ops=("torch.neg",), source="spmd_types", code=0, journal=journal, resume=True)
    assert journal.read_text() == lines and again["counts"] == first["counts"]


MADE_BY_A_FUNCTION = """
import torch
from spmd_types import rules


def scaled(by):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def spmd_typecheck(*, x):
            return rules.einsum("mn->mn", x, linear_in=(0,))

        @staticmethod
        def forward(ctx, x):
            return x * by if by > 1 else x + by

        @staticmethod
        def backward(ctx, grad):
            return grad * max(by, 1)

    Scaled.__name__ = f"Scaled{by}"
    return Scaled


once, thrice = scaled(1), scaled(3)
"""


def test_a_function_of_which_the_module_has_another_name_is_confirmed_by_that(tmp_path, capsys, monkeypatch):
    (tmp_path / "made_31.py").write_text(MADE_BY_A_FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    found = validate(tmp_path, capsys, source="spmd_types", rules=str(tmp_path / "made_31.py"), code=1)
    assert {(rule(f), f["verdict"]) for f in found["findings"]} == {
        ("made_31.Scaled1.default: P(sum) -> P(sum)", "unsound")
    }


def test_samples_may_be_of_a_function_of_another_module_and_leave_none_out(tmp_path, capsys, monkeypatch):
    (tmp_path / "made_32.py").write_text(MADE_BY_A_FUNCTION)
    samples = "def samples():\n    yield thrice, (torch.randn(4, 3),)\n"
    (tmp_path / "listed_32.py").write_text(f"import torch\nfrom made_32 import thrice\n\n\n{samples}")
    (tmp_path / "partly_32.py").write_text(f"{MADE_BY_A_FUNCTION}\n\n{samples}")
    monkeypatch.syspath_prepend(tmp_path)
    listed = validate(tmp_path, capsys, source="spmd_types", rules=str(tmp_path / "listed_32.py"), code=0)
    assert listed["counts"]["sound"] and not listed["findings"]
    partly = validate(tmp_path, capsys, source="spmd_types", rules=str(tmp_path / "partly_32.py"), code=1)
    assert [rule(f) for f in partly["findings"]] == ["partly_32.Scaled1.default: P(sum) -> P(sum)"]
