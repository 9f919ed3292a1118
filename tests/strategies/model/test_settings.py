import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strategies.model.settings import DEFAULT_DTYPES, BadSetting, Settings, UnknownOp

ADD = {"patterns": ("add",)}
REFUSALS = {
    "nothing": ({}, "OP: nothing named: there is nothing to try. Name an op, or pass --all or --rules."),
    "both": ({"patterns": ("add", "sub"), "everything": True},
        "--all: add sub: ops are named as well. Drop --all or the names."),
    "no ranks": (ADD | {"ranks": (2, 0)}, "--ranks: 0: a rule needs at least 2 ranks to be wrong. Pass --ranks 2 or more."),
    "one rank": (ADD | {"ranks": (1,)}, "--ranks: 1: a rule needs at least 2 ranks to be wrong. Pass --ranks 2 or more."),
    "negative ranks": (
        ADD | {"ranks": (-3,)}, "--ranks: -3: a rule needs at least 2 ranks to be wrong. Pass --ranks 2 or more."),
    "too many ranks": (
        ADD | {"ranks": (65,)}, "--ranks: 65: that many real processes would not fit one machine. Pass at most 64."),
    "dtype": (ADD | {"dtypes": ("int64", "float63")},
        "--dtype: float63: this dtype is not among those tried. Choose of float64, float32, int64, bool, complex64, bfloat16, float16, int32, int8, uint8."),
    "confirm": (ADD | {"confirm": "mpi"}, "--confirm: mpi: no such way to confirm. Choose gloo, nccl or none."),
    "workers": (ADD | {"workers": 0}, "--workers: 0: a validation needs at least one worker. Pass --workers 1 or more."),
    "negative seed": (ADD | {"seed": -1}, "--seed: -1: torch's generators do not take it. Pass 0 to 2**63 - 1."),
    "huge seed": (
        ADD | {"seed": 2**63}, "--seed: 9223372036854775808: torch's generators do not take it. Pass 0 to 2**63 - 1."),
    "device": (ADD | {"device": "tpu"}, "--device: tpu: unknown device. Choose cpu or cuda."),
    "cuda": (ADD | {"device": "cuda"},
        "--device: cuda: torch sees no CUDA device here. Run on a machine with a GPU, or pass --device cpu."),
    "nccl": (ADD | {"confirm": "nccl", "ranks": (2, 3)},
        "--confirm: nccl: nccl needs 3 GPUs for 3 ranks, here are 0. Pass --confirm gloo, or fewer --ranks."),
    "mesh of one axis": (
        ADD | {"meshes": ((2, 2), (4,))}, "--mesh: 4: this is no mesh of several axes. Write --mesh 2,2 or --mesh 2,2,2.",
    ),
    "mesh of no ranks": (
        ADD | {"meshes": ((2, 0),)}, "--mesh: 2,0: this is no mesh of several axes. Write --mesh 2,2 or --mesh 2,2,2."),
    "mesh of one rank": (ADD | {"meshes": ((1, 1),)}, "--mesh: 1,1: it has 1 ranks. Take a mesh of 2 to 64 ranks."),
    "too large a mesh": (ADD | {"meshes": ((5, 13),)}, "--mesh: 5,13: it has 65 ranks. Take a mesh of 2 to 64 ranks."),
    "resume": (ADD | {"resume": True}, "--resume: given: there is no journal to go on with. Name it: --journal FILE."),
    "shard": (
        ADD | {"shard": (5, 4), "journal": Path("j")}, "--shard: 5/4: there is no such shard. Write --shard 1/4 to --shard 4/4.",
    ),
    "no shard": (
        ADD | {"shard": (0, 4), "journal": Path("j")}, "--shard: 0/4: there is no such shard. Write --shard 1/4 to --shard 4/4.",
    ),
    "shard without a journal": (
        ADD | {"shard": (1, 4)}, "--shard: 1/4: without a journal it cannot be merged with the others. Name a journal: --journal FILE.",
    ),
}  # fmt: skip


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("given", "said"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_what_was_wrong_and_what_to_do(given, said):
    with pytest.raises(BadSetting) as refused:
        Settings(**given)
    assert str(refused.value) == f"localtensor validate: {said}"


@pytest.mark.parametrize("given", [
    ADD, {"everything": True}, {"rules": "my_rules"}, ADD | {"ranks": (2, 64)}, ADD | {"workers": 1},
    ADD | {"seed": 2**63 - 1}, ADD | {"dtypes": ("float32", "bool")}, ADD | {"confirm": "none"},
    ADD | {"meshes": ((2, 2), (1, 4), (4, 4, 4))}, ADD | {"journal": Path("j"), "resume": True},
    ADD | {"journal": Path("j"), "shard": (4, 4)}, ADD | {"pairs": True, "executor": "dask"},
])  # fmt: skip
def test_what_can_be_done_is_accepted(given):
    settings = Settings(**given)
    assert all(getattr(settings, name) == value for name, value in given.items())


@pytest.mark.parametrize(("given", "expected"), [
    ({}, [("alone", (2,)), ("alone", (3,)), ("alone", (4,))]),
    ({"ranks": (3, 2), "pairs": True}, [("alone", (3,)), ("alone", (2,)), ("pairs", (3,))]),
    ({"ranks": (2,), "meshes": ((2, 2), (2, 3))}, [("alone", (2,)), ("meshes", (2, 2)), ("meshes", (2, 3))]),
], ids=str)  # fmt: skip
def test_the_kinds_of_validation_and_their_meshes(given, expected):
    assert list(Settings(("add",), **given).kinds_and_meshes()) == expected


CHANGES = {
    "patterns": ("sub",), "search": True, "ranks": (2,), "dtypes": ("bool",), "rules": "mine", "confirm": "none", "seed": 1,
    "meshes": ((2, 2),), "pairs": True,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_answer_depends_on_is_in_what_is_asked(name):
    one = Settings(("add",))
    assert replace(one, **{name: CHANGES[name]}).asked() != one.asked() == json.loads(json.dumps(one.asked()))


def test_who_does_the_work_and_where_it_is_kept_changes_no_answer():
    one = Settings(("add",))
    other = replace(one, workers=7, journal=Path("j"), resume=True, executor="dask", folder="/")
    assert other.asked() == one.asked()
    assert one.asked()["torch"] == torch.__version__.partition("+")[0]


def test_each_overload_is_of_one_shard():
    ops = [f"aten.op{n}.default" for n in range(40)]
    shards = [Settings(("add",), journal=Path("j"), shard=(n, 4)).mine(ops) for n in (1, 2, 3, 4)]
    assert sorted(op for shard in shards for op in shard) == sorted(ops)
    assert all(shards) and Settings(("add",)).mine(iter(ops)) == ops


def test_every_seed_that_is_accepted_seeds_torch():
    for seed in (0, 2**63 - 1):
        assert torch.Generator().manual_seed(seed).initial_seed() == seed


@pytest.mark.parametrize(("device", "confirm"), [("cuda", "gloo"), ("cpu", "nccl"), ("cuda", "nccl")])
def test_a_machine_with_enough_gpus_is_taken(device, confirm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Settings(("add",), ranks=(2,), device=device, confirm=confirm).device == device


def test_too_few_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadSetting) as refused:
        Settings(("add",), confirm="nccl")
    assert str(refused.value) == (
        "localtensor validate: --confirm: nccl: nccl needs 4 GPUs for 4 ranks, here are 2. "
        "Pass --confirm gloo, or fewer --ranks."
    )


def test_the_default_is_every_dtype_but_single_precision():
    assert DEFAULT_DTYPES == Settings(("add",)).dtypes == ("float64", "int64", "bool", "complex64")


def test_an_unknown_op_gets_the_nearest_names():
    said = str(UnknownOp("sums", ["gather", "sum_", "sum", "aten.sum.default"]))
    assert said == ("localtensor validate: OP: 'sums': no op and no overload has this name. Did you mean sum or sum_?")


@pytest.mark.parametrize(("known", "remedy"), [
    (["mine.running.default"], "It registers rules of mine.running.default."),
    (["m.d.default", "m.a.default", "m.c.default", "m.b.default"], "It registers rules of m.a.default, m.b.default, m.c.default ..."),
    (["mine.gather.default", "gathers"], "Did you mean gathers?"),
])  # fmt: skip
def test_an_op_that_a_rules_module_does_not_register_names_the_module_and_what_it_has(known, remedy):
    assert str(UnknownOp("gather", known, "my_rules", known)).startswith(
        f"localtensor validate: OP: 'gather': my_rules registers no rule of an op of this name. {remedy}"
    )


def test_an_op_like_no_other_gets_a_way_on():
    assert str(UnknownOp("zzz", ["cumsum"])) == (
        "localtensor validate: OP: 'zzz': no op and no overload has this name. "
        "`localtensor validate --all` tries every op."
    )
