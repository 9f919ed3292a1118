"""Calls that do not fit, word for word: who differs, in what, at which line, and what to do."""

from dataclasses import dataclass

import pytest

from localtensor import errors
from localtensor._util.events import Call, Place

HERE, THERE = Place("project/a.py", 3, "f"), Place("project/a.py", 9, "f")


def call(rank, **facts):
    own = {"kind": "all_reduce", "group_name": "0", "group": (0, 1, 2), "number": 4, "tensors": ("f32[8]",)}
    return Call(rank, **{**own, "device": "cpu", "place": HERE, **facts})


def three(kind="all_reduce", odd=1, **facts):
    """Three calls, of which that of rank `odd` has each `name=(usual, odd)` in its second form, at another line."""
    return [
        call(rank, kind=kind, **{name: pair[rank == odd] for name, pair in {"place": (HERE, THERE), **facts}.items()})
        for rank in range(3)
    ]


@dataclass
class Case:
    error: errors.CollectiveMismatch
    message: str
    places: tuple[Place, ...] = (THERE, HERE)
    ranks: tuple[int, ...] = (1, 0, 2)


CASES = {
    "layout": Case(errors.LayoutMismatch(three(tensors=(("f32[3,2]",), ("f32[3,2] strides (1, 3)",)))),
        "all_reduce #4 in group 0: tensor: strides (1, 3) on rank 1, contiguous on ranks 0, 2: the ranks of a group must "
        "lay their elements out in one order. Pass x.contiguous() on every rank, and copy the result back.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: all_reduce #4 of f32[3,2] strides (1, 3) on cpu, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: all_reduce #4 of f32[3,2] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "kind": Case(
        errors.KindMismatch([call(0), call(1, kind="broadcast", root=0, place=THERE), call(2)], [call(0, number=3)]),
        "call #4 in group 0: kind: broadcast on rank 1, all_reduce on ranks 0, 2: the ranks of a group must call "
        "the same collectives in the same order. Look above these lines for a branch or a loop that depends on "
        "the rank, and call the same on every rank.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: broadcast #4 of f32[8] on cpu, root=0, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f\n"
        "Last collectives:\n"
        "  rank 0: all_reduce #3 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "shape": Case(errors.ShapeMismatch(three(op=("sum", "sum"), tensors=(("f32[8]",), ("f32[4]",)))),
        "all_reduce #4 in group 0: tensor: [4] on rank 1, [8] on ranks 0, 2: the ranks of a group must bring one "
        "shape. Pad each tensor to [8], with what changes no result: 0 for a sum, 1 for a product.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: all_reduce #4 of f32[4] on cpu, op=sum, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: all_reduce #4 of f32[8] on cpu, op=sum, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "dtype": Case(errors.DtypeMismatch(three(tensors=(("f32[8]",), ("f16[8]",)))),
        "all_reduce #4 in group 0: tensor: f16 on rank 1, f32 on ranks 0, 2: the ranks of a group must bring one "
        "dtype. Convert to f32, as most ranks do, with x.to(...) before the call; see what autocast or a default "
        "dtype does on each rank.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: all_reduce #4 of f16[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "dtype of two ranks": Case(errors.DtypeMismatch([call(0, place=None), call(1, tensors=("f16[8]",), place=THERE)]),
        "all_reduce #4 in group 0: tensor: f32 on rank 0, f16 on rank 1: the ranks of a group must bring one "
        "dtype. Convert to one dtype with x.to(...) before the call; see what autocast or a default dtype does "
        "on each rank.\n"
        "  rank 0: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2)\n"
        "  rank 1: all_reduce #4 of f16[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:9 in f",
        places=(THERE,),
        ranks=(0, 1)),
    "device": Case(errors.DeviceMismatch(three(device=("cuda:0", "cpu"))),
        "all_reduce #4 in group 0: device: cpu on rank 1, cuda:0 on ranks 0, 2: the tensors of one collective "
        "lie on one kind of device, which one backend serves. Move the tensors to one kind of device before the "
        "call, as x.to('cpu') or x.cuda() does.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: all_reduce #4 of f32[8] on cuda:0, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "op": Case(errors.ReduceOpMismatch(three(op=("sum", "max"))),
        "all_reduce #4 in group 0: op: max on rank 1, sum on ranks 0, 2: the ranks of a group must reduce by the "
        "same operation. Pass the same ReduceOp on every rank; where it is left out, it is SUM.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: all_reduce #4 of f32[8] on cpu, op=max, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: all_reduce #4 of f32[8] on cpu, op=sum, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "root": Case(errors.RootMismatch(three("broadcast", root=(0, 2))),
        "broadcast #4 in group 0: root: root 2 on rank 1, root 0 on ranks 0, 2: the ranks of a group must name "
        "the same root. Name one root: src= and dst= count in the whole world, group_src= and group_dst= within "
        "the group.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: broadcast #4 of f32[8] on cpu, root=2, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: broadcast #4 of f32[8] on cpu, root=0, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "splits": Case(errors.SplitMismatch([
            call(0, kind="all_to_all_single", group=(0, 1), input_splits=(1, 3), output_splits=(1, 1)),
            call(1, kind="all_to_all_single", group=(0, 1), input_splits=(1, 1), output_splits=(2, 1), place=THERE),
        ]),
        "all_to_all_single #4 in group 0: split sizes: rank 0 sends 3 to rank 1, which makes room for 2: what a "
        "rank sends to a peer is what that peer must make room for. Let output_split_sizes[i] of rank j be "
        "input_split_sizes[j] of rank i, counted within the group; exchange sizes that depend on data first, in "
        "an all_to_all_single of one number for each rank.\n"
        "  rank 0: all_to_all_single #4 of f32[8] on cpu, input_splits=(1, 3), output_splits=(1, 1), in group 0 "
        "(ranks 0, 1), at a.py:3 in f\n"
        "  rank 1: all_to_all_single #4 of f32[8] on cpu, input_splits=(1, 1), output_splits=(2, 1), in group 0 "
        "(ranks 0, 1), at a.py:9 in f",
        places=(HERE, THERE),
        ranks=(0, 1)),
    "length": Case(errors.LengthMismatch(three(tensors=(("f32[8]", "f32[2]"), ("f32[8]",)))),
        "all_reduce #4 in group 0: tensors: 1 tensor on rank 1, 2 tensors on ranks 0, 2: each tensor needs its "
        "partner on every rank. Bring as many on every rank: zeros where one has nothing to add, as for a "
        "parameter without gradient.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:9 in f\n"
        "  ranks 0, 2: all_reduce #4 of f32[8], f32[2] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "group": Case(errors.GroupMismatch("3", {0: (0, 1), 1: (0, 2), 2: (0, 1)}, {0: HERE, 1: THERE}),
        "new_group: ranks: [0, 2] on rank 1, [0, 1] on ranks 0, 2: process group 3 must have the same members on "
        "every rank. Make all process groups on every rank, in the same order, also those that the rank is no "
        "member of.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: group 3 of [0, 2] at a.py:9 in f\n"
        "  rank 0: group 3 of [0, 1] at a.py:3 in f\n"
        "  rank 2: group 3 of [0, 1]"),
    "message": Case(errors.MessageMismatch(
            call(0, kind="send", peer=1, tag=2, number=0, place=HERE),
            call(1, kind="recv", peer=0, tag=2, number=0, tensors=("f16[4]",), place=THERE),
        ),
        "recv #0 from 0 with tag 2: tensor: f32[8] sent by rank 0, f16[4] to receive it on rank 1: a message and "
        "the tensor that receives it must have one shape and dtype. Receive into a tensor like the one that is "
        "sent; where the receiver cannot know it, send its shape first.\n"
        "  rank 0: send #0 of f32[8] on cpu, peer=1, tag=2, in group 0 (ranks 0, 1, 2), at a.py:3 in f\n"
        "  rank 1: recv #0 of f16[4] on cpu, peer=0, tag=2, in group 0 (ranks 0, 1, 2), at a.py:9 in f",
        places=(HERE, THERE),
        ranks=(0, 1)),
    "any other": Case(
        errors.CollectiveMismatch([call(0), call(1, kind="barrier", tensors=(), device=None, place=THERE)]),
        "all_reduce #4 in group 0: call: all_reduce #4 in group 0 on rank 0, barrier #4 in group 0 on rank 1: "
        "the ranks of a group must make the same call. Make the same call on every rank of the group.\n"
        "  rank 0: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f\n"
        "  rank 1: barrier #4, in group 0 (ranks 0, 1, 2), at a.py:9 in f",
        places=(HERE, THERE),
        ranks=(0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mismatch_word_for_word(name):
    assert str(CASES[name].error) == CASES[name].message


@pytest.mark.parametrize("name", CASES)
def test_a_mismatch_names_the_likely_culprits_line_first(name):
    assert (CASES[name].error.places, CASES[name].error.ranks) == (CASES[name].places, CASES[name].ranks)


@pytest.mark.parametrize("name", CASES)
def test_a_mismatch_is_distinguished_from_others_by_its_class_or_by_its_base(name):
    assert isinstance(CASES[name].error, errors.CollectiveMismatch)


def test_every_mismatch_has_its_words_tested():
    assert {type(case.error) for case in CASES.values()} == {
        errors.CollectiveMismatch,
        *(kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__name__.endswith("Mismatch")),
    }


def test_the_calls_of_a_mismatch_are_kept_the_odd_one_first():
    calls, last = three(op=("sum", "max")), [call(0, number=3)]
    error = errors.ReduceOpMismatch(calls, last)
    assert error.calls == (calls[1], calls[0], calls[2]) and error.last == tuple(last)


def test_a_mismatch_of_a_thousand_ranks_is_a_few_lines():
    group = tuple(range(1000))
    calls = [call(rank, group=group, tensors=(f"f32[{8 - (rank == 700)}]",)) for rank in group]
    assert str(errors.ShapeMismatch(calls, calls)).splitlines()[1:] == [
        "Likely culprit: rank 700; ranks 0-699, 701-999 agree.",
        "  rank 700: all_reduce #4 of f32[7] on cpu, in group 0 (ranks 0-999), at a.py:3 in f",
        "  ranks 0-699, 701-999: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0-999), at a.py:3 in f",
        "Last collectives:",
        "  ranks 0-699, 701-999: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0-999), at a.py:3 in f",
        "  rank 700: all_reduce #4 of f32[7] on cpu, in group 0 (ranks 0-999), at a.py:3 in f",
    ]


@pytest.mark.parametrize(("kind", "tensors", "remedy"), [
    ("all_reduce", ("f32[8]", "f32[2,4]"), "Reshape each tensor to [8]."),
    ("all_reduce", ("f32[8,2]", "f32[2,9]"), "Pad each tensor to [8,9], with what changes no result: 0 for a sum, 1 for a product."),
    ("reduce_scatter_tensor", ("f32[8]", "f32[2,9]"), "Flatten each tensor and pad it to [18], with what changes no result: 0 for a sum, 1 for a product."),
    ("all_gather_into_tensor", ("f32[8]", "f32[7]"), "Pad each tensor to [8], and gather the sizes too, so that each rank can cut them back."),
    ("all_gather", ("f32[]", "f32[0]"), "Flatten each tensor and pad it to [1], and gather the sizes too, so that each rank can cut them back."),
    ("broadcast", ("f32[8]", "f32[7]"), "Pass a tensor of the root's shape on every rank; where only the root knows it, broadcast that first."),
    ("scatter", ("f32[8]", "f32[7]"), "Let each rank receive into a tensor of the shape that the root has for it."),
    ("all_to_all", ("f32[8]", "f32[7]"), "Let each rank receive into a tensor of the shape that its peer sends."),
])  # fmt: skip
def test_what_to_do_about_shapes_depends_on_the_call(kind, tensors, remedy):
    error = errors.ShapeMismatch(three(kind, tensors=((tensors[0],), (tensors[1],))))
    assert str(error).splitlines()[0].endswith(f": the ranks of a group must bring one shape. {remedy}")


def test_of_many_tensors_the_first_that_differs_is_named():
    lists = ("f32[1]", "f32[2]", "f32[3]"), ("f32[1]", "f16[2]", "f32[4]")
    said = str(errors.DtypeMismatch(three(tensors=lists)))
    assert said.startswith("all_reduce #4 in group 0: tensors[1]: f16 on rank 1, f32 on ranks 0, 2: ")
    said = str(errors.ShapeMismatch(three(tensors=lists)))
    assert said.startswith("all_reduce #4 in group 0: tensors[2]: [4] on rank 1, [3] on ranks 0, 2: ")


def test_two_ranks_accuse_no_one():
    assert "culprit" not in str(errors.RootMismatch([call(0, root=0), call(1, root=1)]))


def test_splits_that_cannot_be_compared_are_still_reported():
    error = errors.SplitMismatch([call(0), call(1, input_splits=(2, 2), output_splits=())])
    assert ": equal pieces in and equal pieces out on rank 0, [2, 2] in and [] out on rank 1: " in str(error)


@pytest.mark.parametrize(("sent", "received", "odd"), [
    ("f32[4]", "f32[5]", "shape"), ("f32[4]", "f16[4]", "dtype"), ("f32[4]", "f16[5]", "shape and dtype"),
])  # fmt: skip
def test_a_message_says_what_differs(sent, received, odd):
    error = errors.MessageMismatch(call(0, kind="send", tensors=(sent,)), call(1, kind="recv", tensors=(received,)))
    assert f"a message and the tensor that receives it must have one {odd}. " in str(error)
