"""What one control flow for all ranks cannot do, word for word."""

import pickle
from dataclasses import dataclass

import pytest

from localtensor import errors
from localtensor._util.events import Place

HERE = Place("project/a.py", 3, "f")
OWN_FLOW = "Run the function by localtensor.run(fn, ranks=...), where each rank has a control flow of its own"
NO_BRANCH = "or choose without a branch: by torch.where, or by torch.sym_max, sym_min or sym_ite for ints."


@dataclass
class Case:
    error: errors.LocalTensorError
    message: str


CASES = {
    "a condition": Case(errors.RanksDiverge("bool", "RankInts(0, 1, 2) == 0", {0: True, 1: False, 2: False}, HERE),
        "bool: RankInts(0, 1, 2) == 0: True on rank 0, False on ranks 1, 2: all ranks share one control flow, and it "
        f"needs one value at a.py:3 in f. {OWN_FLOW}, {NO_BRANCH}"),
    "an item, nobody knows where": Case(
        errors.RanksDiverge("Tensor.item", "f32[]", dict.fromkeys(range(8), 0.5) | {3: 2.0}),
        "Tensor.item: f32[]: 2.0 on rank 3, 0.5 on ranks 0, 1, 2, 4-7: all ranks share one control flow, and it needs "
        f"one value. {OWN_FLOW}, {NO_BRANCH}"),
    "many values": Case(errors.RanksDiverge("int", "", {rank: rank // 2 for rank in range(10)}, HERE),
        "int: value: 5 values on ranks 0-9: all ranks share one control flow, and it needs one value at a.py:3 in f. "
        f"{OWN_FLOW}, {NO_BRANCH}\n"
        "  ranks 0, 1: 0\n  ranks 2, 3: 1\n  ranks 4, 5: 2\n  ranks 6, 7: 3\n  ranks 8, 9: 4"),
    "a write outside": Case(errors.OutsideWrite("aten.add_.Tensor", HERE, "f32[2, 3]"),
        "aten.add_.Tensor: the tensor written: f32[2, 3] at a.py:3 in f: it was made outside the mode and is one "
        "tensor for all ranks, whose values for it differ. Make it inside the mode, or write to a clone of it that is "
        "made there."),
    "another mode": Case(errors.AnotherMode("aten.add.Tensor", HERE),
        "aten.add.Tensor: an input: used at a.py:3 in f: it belongs to another LocalTensorMode, and each mode has "
        "ranks of its own. Make it in the mode in which it is used."),
    "another mode, nobody knows where": Case(errors.AnotherMode("aten.add.Tensor"),
        "aten.add.Tensor: an input: used here: it belongs to another LocalTensorMode, and each mode has ranks of its "
        "own. Make it in the mode in which it is used."),
    "no mode": Case(errors.NoMode("rank_map", HERE),
        "rank_map: mode: called at a.py:3 in f: no LocalTensorMode is entered in this thread, so there are no ranks. "
        "Call it inside `with LocalTensorMode(ranks):`."),
    "not held": Case(errors.NotHeld("all_reduce", [3, 2], [0, 1, 4, 5, 6, 7]),
        "all_reduce: ranks: ranks 2, 3: no value is held there, only on ranks 0, 1, 4-7. Name only ranks that hold "
        "one, or make the value on all ranks that are to have it."),
    "held nowhere": Case(errors.NotHeld("rank_int", [0], []),
        "rank_int: ranks: rank 0: no value is held there, nor anywhere else. Name only ranks that hold one, or make "
        "the value on all ranks that are to have it."),
    "not in lockstep": Case(errors.NotInLockstep("dist.batch_isend_irecv", "each rank names a peer of its own"),
        "LocalTensorMode: ranks in lockstep: dist.batch_isend_irecv: each rank names a peer of its own. "
        f"{OWN_FLOW}."),
    "not traceable": Case(errors.NotTraceable("make_fx", "RankInts(0, 1)", "it differs between ranks", "Pass it.", HERE),
        "make_fx: a graph for all ranks: RankInts(0, 1) at a.py:3 in f: it differs between ranks. Pass it."),
    "no tensor": Case(errors.NotATensor("rank_map", "list", 2),
        "rank_map: value: a list on rank 2: each rank's value of a LocalTensor is a tensor. Give a torch.Tensor for each "
        "rank."),
    "dtypes": Case(errors.ValuesDiffer("LocalTensor", "dtype", "f64", 2, "f32", 0),
        "LocalTensor: dtype: f64 on rank 2, f32 on rank 0: one LocalTensor has one dtype, device, layout and number "
        "of dims for all ranks. Give all ranks the same dtype first."),
    "busy": Case(errors.ModeBusy("run was called inside of a LocalTensorMode"),
        "LocalTensorMode: simulation: a second one while the first is at work: run was called inside of a "
        "LocalTensorMode. Let the first end before the second."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_word_for_word(name):
    assert str(CASES[name].error) == CASES[name].message


def test_ranks_that_diverge_are_kept_with_their_values_and_line():
    error = errors.RanksDiverge("bool", "x > 0", {1: True, 0: False}, HERE)
    assert error.values == {1: True, 0: False} and error.place == HERE
    assert pickle.loads(pickle.dumps(error)).values == error.values


@pytest.mark.parametrize(("source", "quoted"), [
    ("    if rank == 0:\n", "`if rank == 0:`. Run"),
    ("x" * 200, f"`{'x' * 97}...`. Run"),
    ("\n", "needs one value at a.py:1 in f. Run"),
])  # fmt: skip
def test_the_line_is_quoted_if_it_can_be_read(source, quoted, tmp_path):
    (tmp_path / "a.py").write_text(source)
    error = errors.RanksDiverge("bool", "x", {0: True, 1: False}, Place(str(tmp_path / "a.py"), 1, "f"))
    assert quoted in str(error)


@pytest.mark.parametrize(("long", "shown"), [("x" * 58, f"'{'x' * 58}'"), ("x" * 59, f"'{'x' * 56}...")])
def test_a_value_is_cut_at_sixty_characters(long, shown):
    error = errors.RanksDiverge("print", "x", {0: long, 1: 0})
    assert f": {shown} on rank 0, 0 on rank 1: " in str(error) and error.values[0] == long


def test_a_thousand_values_stop_at_two_dozen_lines():
    error = errors.RanksDiverge("int", "value", {rank: rank for rank in range(1024)})
    assert len(str(error).splitlines()) == 26 and str(error).endswith("\n  and 1000 lines more")
    assert len(error.values) == 1024
