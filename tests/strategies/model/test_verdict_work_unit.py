import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from strategies.model.rule import DTYPE_CLASSES, dtype_class
from strategies.model.verdict import WorkUnit, digest, plan_units, read_unit, share
from tests.strategies.cases import numbers, sample

ROOT = Path(__file__).parents[3]
OPS = [f"aten.op{n}.default" for n in range(60)]
TRIALS = [("alone", (2,)), ("alone", (3,)), ("pairs", (2,)), ("meshes", (2, 2))]


@pytest.mark.parametrize("unit", plan_units(["aten.add.Tensor"], TRIALS), ids=str)
def test_a_unit_is_its_text(unit):
    assert read_unit(str(unit)) == unit
    assert str(unit).split(" ")[0] == "aten.add.Tensor"


def test_a_plan_is_every_overload_class_and_kind_once_in_order():
    plan = plan_units([*OPS, *OPS[:3]], TRIALS)
    assert len(set(plan)) == len(plan) == len(OPS) * len(DTYPE_CLASSES) * len(TRIALS)
    assert list(plan) == sorted(plan)
    assert plan == plan_units(reversed(OPS), list(reversed(TRIALS)))
    assert WorkUnit(OPS[0], "meshes", "bool", (2, 2)) in plan


@pytest.mark.parametrize(("tensors", "expected"), [
    ((torch.float64, torch.int64), "real"), ((torch.bfloat16,), "real"), ((torch.complex64, torch.float64), "complex"),
    ((torch.float32, torch.complex32), "complex"), ((torch.int64, torch.bool), "integer"), ((torch.bool,), "bool"),
    ((torch.uint8,), "integer"), ((), "real"),
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_sample_is_of_one_class(tensors, expected):
    one = sample("cat.default", [torch.zeros(2, dtype=dtype) for dtype in tensors])
    assert dtype_class(one) == expected
    assert expected in DTYPE_CLASSES


def test_a_sample_of_any_dtype_that_is_tried_has_its_class():
    assert [dtype_class(sample("neg.default", numbers(2, dtype=d))) for d in (torch.float64, torch.int64, torch.bool)] == [
        "real", "integer", "bool",
    ]  # fmt: skip


@given(draw.lists(draw.text(min_size=1), unique=True), draw.integers(1, 9))
def test_each_overload_is_in_one_shard(ops, count):
    shards = [[op for op in ops if share(op, count) == n] for n in range(count)]
    assert sorted(op for shard in shards for op in shard) == sorted(ops)


def test_shards_are_of_like_size():
    sizes = [sum(share(op, 4) == n for op in OPS) for n in range(4)]
    assert min(sizes) >= 8, sizes


@pytest.mark.slow
def test_shards_and_digests_are_the_same_in_every_process():
    code = "from strategies.model.verdict import *; print([share(f'op{n}', 7) for n in range(9)], digest(['a', 1]))"
    environ = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{[share(f'op{n}', 7) for n in range(9)]} {digest(['a', 1])}\n"


def test_a_digest_tells_apart_what_differs():
    assert digest(["a", "b"]) == digest(iter(["a", "b"]))
    assert len({digest(["a", "b"]), digest(["b", "a"]), digest(["ab"]), digest([])}) == 4
