import json
import os
import sys
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from strategies.model.rule import overload
from strategies.validation.discover import Discovery, NotEmitted, discover, module_text
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import LIB, planted
from tests.tools import warm

X = numbers(4, 6)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
FOLLOW = """
import sys
import torch
import localtensor as lt
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode


def step(function, tensors, placements):
    mesh = init_device_mesh("cpu", (2,))
    given = [DTensor.from_local(t, mesh, [p], run_check=False) for t, p in zip(tensors, placements)]
    with CommDebugMode() as talk:
        out = function(*given)
    return str(out.placements[0]), talk.get_total_counts()


def show(function, tensors, placements):
    print(*{str(value) for value in lt.run(step, function, tensors, placements, ranks=2).values})


import tests.strategies.planted_ops

twice = torch.ops.planted.forgotten
x = torch.arange(24.0, dtype=torch.float64).view(4, 6)
"""


def calls_of(op):
    return {
        "aten.add.Tensor": [sample("add.Tensor", *xs, alpha=a) for xs in ((X, X), (X, X[0])) for a in (0.5, -0.5)],
        "aten.cumsum.default": [sample("cumsum.default", x, d) for x in (X, X[0]) for d in (0, -1)],
        "aten.mv.default": [sample("mv.default", X, X[0])],
        "planted.forgotten.default": [planted("forgotten", x) for x in (X, X[0])],
    }[op]


def text_of(op):
    return module_text(discover(op, given=calls_of(op)))


SHOWN = {
    "single-dim": ("aten.add.Tensor", "torch.add, (x, x), (Replicate(), Partial('max'))", "('R', 1)", "('P(max)', 0)"),
    "condition": ("aten.add.Tensor", "lambda a, b: torch.add(a, b, alpha=-2), (x, x), (Replicate(), Partial('max'))",
        "('R', 1)", "('P(min)', 0)"),
    "op strategy": ("aten.cumsum.default", "lambda a: a.cumsum(0), (x,), (Partial('sum'),)", "('R', 1)", "('P(sum)', 0)"),
    "decomposition": ("aten.mv.default", "torch.mv, (x, x[0]), (Partial('avg'), Replicate())", "('R', 1)", "('P(avg)', 0)"),
    "no rule": ("planted.forgotten.default", "twice, (x,), (Shard(1),)", "('R', 1)", "('S(1)', 0)"),
    "kept: sums": ("aten.add.Tensor", "torch.add, (x, x), (Partial('sum'), Partial('sum'))", "('P(sum)', 0)", "('P(sum)', 0)"),
    "kept: shards": ("aten.mv.default", "torch.mv, (x, x[0]), (Shard(0), Replicate())", "('S(0)', 0)", "('S(0)', 0)"),
}  # fmt: skip
if overload("aten.cumsum.default") not in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs:
    del SHOWN["op strategy"]  # since 2.14 cumsum has another kind of strategy, which lacks no rule
"""What is shown: the op, the call, and what DTensor makes of it before and after: the result, how many collectives."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """All of them in one fresh process: each call, then the emitted modules, then each call again."""
    folder = tmp_path_factory.mktemp("emitted")
    ops = sorted({op for op, *_ in SHOWN.values()})
    for number, op in enumerate(ops):
        (folder / f"found_{number}.py").write_text(text_of(op))
    calls = "\n".join(f"show({call})" for _, call, *_ in SHOWN.values())
    imports = "\n".join(f"import found_{number}" for number in range(len(ops)))
    code = f"{FOLLOW}\n{calls}\n{imports}\n{calls}\n"
    done = warm.run([sys.executable, "-c", code], cwd=folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    return dict(zip(SHOWN, zip(lines[: len(SHOWN)], lines[len(SHOWN) :], strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_dtensor_follows_what_is_emitted_without_a_word_between_the_ranks_and_keeps_what_it_knew(name, shown):
    assert shown[name] == SHOWN[name][2:]


def test_what_is_emitted_is_judged_and_every_rule_is_sound(tmp_path):
    for op in JUDGED:
        (tmp_path / f"found_{op.split('.')[1]}.py").write_text(text_of(op))
    (tmp_path / "found.py").write_text("".join(f"import found_{op.split('.')[1]}\n" for op in JUDGED))
    command = "validate --rules found --ranks 2 --workers 1 --dtype float64 --quiet --json all.json".split()
    done = warm.run([sys.executable, "-c", "from strategies.cli.app import main; main()", *command], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "all.json").read_text())["counts"]
    assert (counts["overloads"], counts["unsound"], counts["suspect"], counts["crashed"]) == (2, 0, 0, 0)
    assert counts["sound"] > 20


JUDGED = ("aten.add.Tensor", "aten.mv.default")


def test_the_text_is_plain_torch_and_says_what_it_is():
    text = text_of("aten.add.Tensor")
    assert "localtensor discover aten.add.Tensor" in text.splitlines()[2]
    assert not [
        line
        for line in text.splitlines()
        if line.startswith(("import", "from")) and "torch" not in line and "dataclasses" not in line
    ]
    assert "        if alpha > 0 and numbers == 'ff':\n" in text
    assert "def rules(self, other, *, alpha=1):" in text


def test_all_dims_alike_are_a_loop():
    text = module_text(discover("planted.forgotten", given=[planted("forgotten", x) for x in (X, X[0])]))
    assert "        for d in range(ndims[0]):\n            found.append(([Shard(d)], [Shard(d)]))\n" in text


def test_what_cannot_be_emitted_is_refused():
    with pytest.raises(NotEmitted, match="no rule is missing"):
        module_text(Discovery("aten.neg.default", "single-dim strategy", (), (), 1, 1, 0))
    some = discover("planted.forgotten", given=[planted("forgotten", X)])
    with pytest.raises(NotEmitted, match="cannot be added to"):
        module_text(Discovery(some.op, "rule", some.missing, some.surveys, some.samples, 1, 0))
    with pytest.raises(NotEmitted, match="a list of tensors"):
        module_text(Discovery("aten.split.Tensor", "", some.missing, some.surveys, some.samples, 1, 0))


@pytest.mark.parametrize("schema", ["(Tensor x, int d=0) -> Tensor", "(Tensor[] tensors, Tensor found) -> Tensor"])
def test_an_argument_that_a_local_of_the_module_would_hide_is_refused(schema):
    name = f"hidden_{len(schema)}"
    LIB.define(f"{name}{schema}")
    some = discover("planted.forgotten", given=[planted("forgotten", X)])
    with pytest.raises(NotEmitted, match=r"an argument is called (d|found)\."):
        module_text(Discovery(f"planted.{name}.default", "", some.missing, some.surveys, some.samples, 1, 0))
