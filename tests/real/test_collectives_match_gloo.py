"""Our collectives against real gloo processes: the same answers, and a refusal wherever gloo refuses.

Where we refuse more than gloo, the case says why; where we refuse less, a test names it.  A case that gloo
starts to treat otherwise turns red here, and then ours is the one to change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import localtensor.collectives.reference as c
from localtensor._util.events import Raised
from localtensor.errors import LocalTensorError
from localtensor.layout.reductions import PAIRS, PremulSum
from localtensor.processes.pool import Pool
from tests.real import collective_programs
from tests.real.collective_programs import Call, count, flat, plain, t, values, what_gloo_does
from tests.torch_here import before_2_14

F32, F64, I16, I32, I64, C64 = torch.float32, torch.float64, torch.int16, torch.int32, torch.int64, torch.complex64


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, grace=0.3) as pool:
        yield pool


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with Pool(3, grace=0.3) as pool:
        yield pool


def assert_same_answers(call: Call, pool: Pool) -> None:
    ours = call.ours()
    theirs = values(call.on_gloo(pool, ours))
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


X, Y, Z = count(4, 2), count(4, 2, start=10), count(4, 2, start=50)
ANSWERS = {
    "all_reduce": Call("all_reduce", [X, Y]),
    "all_reduce of scalars": Call("all_reduce", [torch.tensor(1.0), torch.tensor(2.0)]),
    "all_reduce of nothing": Call("all_reduce", [torch.ones(0, 3)] * 2),
    "all_reduce across memory": Call("all_reduce", [X.t(), Y.t()], {"op": "max"}),
    "reduce": Call("reduce", [X, Y], {"root": 1}),
    "reduce to an average": Call("reduce", [X, Y], {"root": 0, "op": "avg"}),
    "broadcast": Call("broadcast", [X, Y], {"root": 1}),
    "broadcast across memory": Call("broadcast", [X.t(), Y.t()], {"root": 1}),
    "all_gather": Call("all_gather", [X, Y]),
    "all_gather of scalars": Call("all_gather", [torch.tensor(1.0), torch.tensor(2.0)]),
    "all_gather_into_tensor": Call("all_gather_into_tensor", [X, Y]),
    "all_gather_into_tensor across memory": Call("all_gather_into_tensor", [X.t(), Y.t()]),
    "all_gather_into_tensor along dim 1": Call("all_gather_into_tensor", [X, Y], {"dim": 1}),
    "gather": Call("gather", [X, Y], {"root": 1}),
    "gather across memory": Call("gather", [X.t(), Y.t()], {"root": 0}),
    "scatter": Call("scatter", [[], [X, Y]], {"root": 1}),
    "reduce_scatter": Call("reduce_scatter", [[X, Y], [Y, X]], {"op": "product"}),
    "reduce_scatter of uneven pieces": Call("reduce_scatter", [[X[:1], X[1:]], [Y[:1], Y[1:]]]),
    "reduce_scatter_tensor": Call("reduce_scatter_tensor", [X, Y]),
    "reduce_scatter_tensor to an average": Call("reduce_scatter_tensor", [X, Y], {"op": "avg"}),
    "reduce_scatter_tensor along dim 1": Call("reduce_scatter_tensor", [X, Y], {"dim": 1, "op": "min"}),
    "reduce_scatter_tensor across memory": Call("reduce_scatter_tensor", [X.t(), Y.t()]),
    "all_to_all": Call("all_to_all", [[X, Y], [Y + 1, X + 1]]),
    "all_to_all across memory": Call("all_to_all", [[X.t(), Y.t()], [Y.t() + 1, X.t() + 1]]),
    "all_to_all_single": Call("all_to_all_single", [X, Y]),
    "functional all_to_all_single": Call("all_to_all_single", [X, Y], program="functional_all_to_all_single"),
    "all_to_all_single of uneven pieces": Call(
        "all_to_all_single", [X, Y[:3]], {"input_splits": [[1, 3], [0, 3]], "output_splits": [[1, 0], [3, 3]]}
    ),
    "all_to_all_single with one side even": Call("all_to_all_single", [X, Y], {"input_splits": [[1, 3], [1, 3]]}),
    "shard_dim_alltoall from rows to columns": Call("shard_dim_alltoall", [X, Y], {"gather_dim": 0, "shard_dim": 1}),
    "shard_dim_alltoall from columns to rows": Call("shard_dim_alltoall", [X, Y], {"gather_dim": 1, "shard_dim": 0}),
    "shard_dim_alltoall from rows to rows": Call("shard_dim_alltoall", [X, Y], {"gather_dim": 0, "shard_dim": 0}),
    "permute": Call("permute", [t(1, 2), t(3, 4)], {"destinations": [1, 0]}),
    "permute of nothing": Call("permute", [t(1, 2), t(3, 4)], {"destinations": [0, 1]}),
    "send_recv": Call("send_recv", [X, Y], {"pairs": [(1, 0)]}),
    "send_recv both ways": Call("send_recv", [X, Y], {"pairs": [(0, 1), (1, 0)]}),
    "send_recv of a dtype that collectives refuse": Call("send_recv", [X.to(I16), Y.to(I16)], {"pairs": [(0, 1)]}),
    "all_reduce_coalesced": Call("all_reduce_coalesced", [[X, Y[0]], [Y, X[0]]], {"op": "avg"}),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_two_processes_hold_what_we_say(name, two):
    assert_same_answers(ANSWERS[name], two)


def test_coalesced_all_gathers_of_two_dtypes_are_one_all_gather_each(two):
    lists = [[X, Y[0].to(I64)], [Y, X[0].to(I64)]]
    ours = c.coalesced(lists, c.all_gather_into_tensor)
    theirs = values(Call("coalesced", lists, program="all_gather_coalesced").on_gloo(two, ours))
    assert plain(theirs) == plain(ours)


UNEVEN = [[1, 0, 3], [2, 2, 0], [0, 3, 1]]
WITH_THREE = {
    "all_reduce": Call("all_reduce", [X, Y, Z]),
    "all_reduce to an average": Call("all_reduce", [X, Y, Z], {"op": "avg"}),
    "reduce": Call("reduce", [X, Y, Z], {"root": 2, "op": "min"}),
    "all_gather": Call("all_gather", [X, Y, Z]),
    "scatter": Call("scatter", [[], [X, Y, Z], []], {"root": 1}),
    "reduce_scatter of uneven pieces": Call(
        "reduce_scatter", [[x[:1], x[1:1], x[1:]] for x in (X, Y, Z)], {"op": "max"}
    ),
    "all_to_all": Call("all_to_all", [[x, x + 1, x + 2] for x in (X, Y, Z)]),
    "all_to_all_single": Call(
        "all_to_all_single", [X, Y, Z], {"input_splits": UNEVEN, "output_splits": [list(s) for s in zip(*UNEVEN)]}
    ),
    "shard_dim_alltoall": Call(
        "shard_dim_alltoall", [count(2, 3, start=10 * r) for r in range(3)], {"gather_dim": 0, "shard_dim": 1}
    ),
    "permute": Call("permute", [t(1), t(2), t(3)], {"destinations": [1, 2, 0]}),
    "send_recv in a chain": Call("send_recv", [X, Y, Z], {"pairs": [(0, 1), (1, 2)]}),
    "send_recv from one to two": Call("send_recv", [X, Y, Z], {"pairs": [(1, 0), (1, 2)]}),
}


@pytest.mark.parametrize("name", WITH_THREE)
def test_three_processes_hold_what_we_say(name, three):
    assert_same_answers(WITH_THREE[name], three)


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_floats_are_added_in_the_order_of_gloo_to_the_last_bit(ranks):
    sizes, dtypes = [1, 5, 1001], [F32, F64, torch.bfloat16, torch.float16, C64]
    with Pool(ranks, grace=0.3) as pool:
        said = values(pool.call(collective_programs.each_order, [(sizes, dtypes)] * ranks))
        big = values(pool.call(collective_programs.each_order, [([700_001], [F32])] * ranks))  # segments of a MiB
    for rank, theirs in enumerate(a | b for a, b in zip(said, big, strict=True)):
        for (collective, elements, dtype, op), got in theirs.items():
            held = collective_programs.addends(ranks, elements * ranks, dtype)
            if collective == "reduce":
                if rank > 0:
                    continue  # torch does not define what the others hold
                ours = c.reduce(held, op, root=0)[rank]
            elif collective == "reduce_scatter":
                ours = c.reduce_scatter([list(x.split(elements)) for x in held], op)[rank]
            else:
                ours = getattr(c, collective)(held, op)[rank]
            assert torch.equal(ours, got), (collective, elements, dtype, op, int((ours != got).sum()))


def test_each_reduction_of_each_dtype_agrees_in_answer_or_refusal(two):
    said = values(two.call(collective_programs.each_reduction, [(), ()]))[0]
    assert len(said) == len(PAIRS) * len(collective_programs.DTYPES)
    for (op, dtype), theirs in said.items():
        ours = tried(
            lambda op=op, dtype=dtype: c.all_reduce([collective_programs.numbers(dtype, rank) for rank in (0, 1)], op)[
                0
            ]
        )
        assert type(ours) is type(theirs), f"{op} of {dtype}: ours {ours}, gloo {theirs}"
        assert isinstance(ours, str) or torch.equal(ours, theirs), f"{op} of {dtype}: ours {ours}, gloo {theirs}"


def test_each_collective_carries_the_dtypes_that_gloo_carries(two):
    said = values(two.call(collective_programs.each_carriage, [(), ()]))[0]
    assert len(said) == len(collective_programs.CARRIAGES) * len(collective_programs.DTYPES)
    for (program, dtype), theirs in said.items():
        held, _, options = collective_programs.carriage(program, dtype)
        ours = tried(Call(program, held, options).ours)
        assert isinstance(ours, str) == bool(theirs), (
            f"{program} of {dtype}: ours {ours}, gloo {theirs or 'carries it'}"
        )


def tried(call: Callable[[], Any]) -> Any:
    """What the call returns, or how we refuse."""
    try:
        return call()
    except LocalTensorError as refused:
        return str(refused)


# -- refusals on both sides, with a part of gloo's or torch's own words

GAPS = count(2, 2).t()
LISTS, SIZE, SPLITS = "Incorrect input list size", "invalid tensor size at index 1", "Split sizes doesn't match"
BOTH_REFUSE = {
    "an average of integers": (Call("reduce", [t(1, dtype=I64)] * 2, {"root": 0, "op": "avg"}), "result type Float"),
    "a product of complex numbers": (
        Call("reduce", [t(1, dtype=C64)] * 2, {"root": 0, "op": "product"}), "reduce does not support"),
    "a bitwise reduce_scatter_tensor of floats": (
        Call("reduce_scatter_tensor", [X, Y], {"op": "band"}, into=[X[:2]] * 2), "BAND with non-integral dtype"),
    "a root of broadcast outside": (Call("broadcast", [X, Y], {"root": 2}), "broadcast: invalid root rank: 2"),
    "a negative root": (Call("broadcast", [X, Y], {"root": -1}), "broadcast: invalid root rank: -1"),
    "a root of reduce outside": (Call("reduce", [X, Y], {"root": 2}), "reduce: invalid root rank: 2"),
    "a root of gather outside": (Call("gather", [X, Y], {"root": 2}, into=[[], []]), "gather: invalid root rank: 2"),
    "a root of scatter outside": (Call("scatter", [[], []], {"root": 2}, into=[X, X]), "scatter: invalid root rank: 2"),
    "five rows over two ranks": (Call("reduce_scatter_tensor", [count(5), count(5)], into=[count(2), count(2)]),
        "outputShape[0] * worldSize == inputShape[0]"),
    "three columns over two ranks": (
        Call("shard_dim_alltoall", [count(2, 3)] * 2, {"gather_dim": 0, "shard_dim": 1}), "invalid for input of size"),
    "five rows to functional all_to_all_single": (
        Call("all_to_all_single", [count(5), count(5)], program="functional_all_to_all_single"), SPLITS),
    "all_gather of uneven shapes": (Call("all_gather", [count(3), count(2)], into=[[count(3), count(2)]] * 2), SIZE),
    "all_gather_into_tensor of uneven shapes": (
        Call("all_gather_into_tensor", [count(3), count(2)], into=[count(5)] * 2), SIZE),
    "all_gather_into_tensor of scalars": (
        Call("all_gather_into_tensor", [torch.tensor(1.0)] * 2, into=[count(2)] * 2), "invalid tensor size at index 0"),
    "all_gather along no dim": (Call("all_gather_into_tensor", [X, Y], {"dim": 2}), "Dimension out of range"),
    "gather of uneven shapes": (
        Call("gather", [count(3), count(2)], {"root": 0}, into=[[count(3), count(2)], []]), SIZE),
    "scatter of uneven shapes": (Call("scatter", [[count(3), count(2)], []], {"root": 0}, into=[count(3), count(2)]),
        SIZE),
    "scatter of two dtypes": (
        Call("scatter", [[t(1), t(1, dtype=F64)], []], {"root": 0}, into=[t(0), t(0, dtype=F64)]), "different dtypes"),
    "scatter of too few": (Call("scatter", [[X], []], {"root": 0}, into=[X, X]), LISTS),
    "scatter of too many": (Call("scatter", [[X, X, X], []], {"root": 0}, into=[X, X]), LISTS),
    "scatter from who is not the root": (
        Call("scatter", [[X, X], [X, X]], {"root": 0}, into=[X, X]), "must NOT be specified on non-source ranks"),
    "reduce_scatter of too few": (Call("reduce_scatter", [[X], [X]], into=[X, X]), "invalid input tensor list size"),
    "all_to_all of too few": (Call("all_to_all", [[X], [X]]), "list size 1 does not match world size 2"),
    "all_to_all of two dtypes": (Call("all_to_all", [[t(1), t(1, dtype=F64)]] * 2), "different dtypes"),
    "all_to_all_single across memory": (Call("all_to_all_single", [GAPS, GAPS]), "Tensors must be contiguous"),
    "sends across memory": (
        Call("send_recv", [GAPS, GAPS], {"pairs": [(0, 1)]}, into=[GAPS.contiguous()] * 2), "has to be contiguous"),
    "split sizes that do not add up": (Call("all_to_all_single", [X, Y], {"input_splits": [[1, 2], [1, 2]]}), SPLITS),
    "too few split sizes": (
        Call("all_to_all_single", [X, Y], {"input_splits": [[4], [4]]}), "Number of tensor splits not equal"),
    "split sizes that disagree": (
        Call("all_to_all_single", [X, Y], {"input_splits": [[1, 3], [1, 3]], "output_splits": [[3, 1], [1, 3]]}),
        "inLengthPerRank[myRank] == outLengthPerRank[myRank]"),
    "a rank that sends to itself": (Call("send_recv", [X, Y], {"pairs": [(0, 0), (1, 1)]}), "state_ >= CONNECTED"),
    "a destination that is no rank": (Call("permute", [t(1), t(2)], {"destinations": [1, 2]}), "index out of range"),
    "a coalesced call of two dtypes": (Call("all_reduce_coalesced", [[X, X.to(I64)]] * 2), "different dtypes"),
    "a coalesced call of nothing": (Call("all_reduce_coalesced", [[], []]), "There were no tensor arguments"),
    "sparse tensors": (Call("broadcast", [X.to_sparse()] * 2, {"root": 0}), "'SparseCPU' backend"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH_REFUSE)
def test_gloo_refuses_and_so_do_we(name, two):
    call, words = BOTH_REFUSE[name]
    outcomes = call.on_gloo(two, call.held if call.into is None else call.into)
    assert any(isinstance(outcome, Raised) and words in outcome.message for outcome in outcomes), outcomes
    with pytest.raises(LocalTensorError):
        call.ours()


@dataclass(frozen=True)
class Stricter:
    """A call that we refuse and gloo does not, what becomes of it there, and why we refuse."""

    call: Call
    gloo: str
    why: str


BITS = "gloo reads one rank's bits as the other's numbers"
TORN = "where one rank has more rows than its peer, gloo waits for ever, ends the process, or leaves rows as they were"
SILENT = "the numbers arrive in another shape, which is how wrong sharding goes unnoticed"
WE_REFUSE_MORE = {
    "broadcast into a longer tensor": Stricter(Call("broadcast", [count(3), count(4)], {"root": 0}), "answers", TORN),
    "broadcast into a shorter tensor": Stricter(Call("broadcast", [count(4), count(3)], {"root": 0}), "dies", TORN),
    "broadcast into another shape": Stricter(Call("broadcast", [X, X.t()], {"root": 0}), "answers", SILENT),
    "broadcast into another dtype": Stricter(Call("broadcast", [t(1), t(0, dtype=I32)], {"root": 0}), "answers", BITS),
    "all_reduce of uneven shapes": Stricter(Call("all_reduce", [count(3), count(4)]), "hangs", TORN),
    "all_reduce of other shapes": Stricter(Call("all_reduce", [count(2, 3), count(3, 2)]), "answers", SILENT),
    "all_reduce of two dtypes": Stricter(Call("all_reduce", [t(1), t(1, dtype=I32)]), "answers", BITS),
    "all_reduce of two widths": Stricter(Call("all_reduce", [count(3), count(3, dtype=F64)]), "dies", BITS),
    "reduce of uneven shapes": Stricter(Call("reduce", [count(3), count(4)], {"root": 0}), "hangs", TORN),
    "all_gather of other shapes": Stricter(
        Call("all_gather", [count(2, 3), count(3, 2)], into=[[count(2, 3)] * 2, [count(3, 2)] * 2]), "answers", SILENT
    ),
    "reduce_scatter of other pieces": Stricter(
        Call("reduce_scatter", [[t(1, 2), t(1, 2)], [t(1, 2, 3), t(1, 2)]], into=[t(0, 0), t(0, 0)]), "hangs", TORN
    ),
    "reduce_scatter_tensor of a scalar": Stricter(
        Call("reduce_scatter_tensor", [torch.tensor(1.0)] * 2), "dies", "torch reads past its shape"
    ),
    "all_to_all_single of scalars": Stricter(
        Call("all_to_all_single", [torch.tensor(1.0)] * 2), "answers", "a scalar has no rows, and none moves"
    ),
    "five rows to all_to_all_single": Stricter(
        Call("all_to_all_single", [count(5), count(5)]), "answers", "c10d cuts the middle row in half, byte for byte"
    ),
    "all_to_all_single of other rows": Stricter(Call("all_to_all_single", [count(2, 3), count(2, 2)]), "dies", TORN
    ),
    "a negative dim": Stricter(
        Call("shard_dim_alltoall", [X, Y], {"gather_dim": -2, "shard_dim": -1}), "dies", "torch does not wrap it"
    ),
    "a negative dim to join": Stricter(
        Call("all_gather_into_tensor", [X, Y], {"dim": -1}), "answers", "as in shard_dim_alltoall: callers count first"
    ),
    "sends into a longer tensor": Stricter(Call("send_recv", [count(3), count(4)], {"pairs": [(0, 1)]}), "answers", TORN
    ),
    "sends into another dtype": Stricter(
        Call("send_recv", [t(1), t(0, dtype=I32)], {"pairs": [(0, 1)]}), "answers", BITS
    ),
    "sends to a rank outside": Stricter(
        Call("send_recv", [X, Y], {"pairs": [(0, 2)]}), "breaks", "nobody is there to receive"
    ),
    "negative split sizes": Stricter(
        Call("all_to_all_single", [X, Y], {"input_splits": [[-1, 5], [2, 2]], "output_splits": [[-1, 2], [5, 2]]}),
        "breaks", "gloo reads or writes outside of the tensor"),
    "two destinations that are one": Stricter(
        Call("permute", [t(1), t(2)], {"destinations": [0, 0]}), "answers", "one rank gets both tensors, the other none"
    ),
    "coalesced lists of different lengths": Stricter(Call("all_reduce_coalesced", [[X], [X, X]]), "dies", TORN
    ),
    "scatter across memory": Stricter(
        Call("scatter", [[GAPS, GAPS], []], {"root": 0}, into=[count(2, 2)] * 2), "answers", "gloo sends another order"
    ),
    "reduce_scatter across memory": Stricter(
        Call("reduce_scatter", [[GAPS, GAPS]] * 2, into=[count(2, 2)] * 2), "answers", "gloo folds the wrong elements"
    ),
    "sparse all_reduce": Stricter(
        Call("all_reduce", [X.to_sparse(), X.to_sparse()]), "answers", "a sparse sum is another function"
    ),
}  # fmt: skip


LIMITS = {"hangs": 0.5, "breaks": 1.0}  # seconds; "breaks" is any of the three, by chance


REFUSED_SINCE_2_14 = ("all_to_all_single of scalars", "five rows to all_to_all_single")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=before_2_14) if n in REFUSED_SINCE_2_14 else n for n in WE_REFUSE_MORE]
)
def test_we_refuse_what_gloo_does_not(name, two):
    case = WE_REFUSE_MORE[name]
    into = case.call.held if case.call.into is None else case.call.into
    found = what_gloo_does(outcomes := case.call.on_gloo(two, into, seconds=LIMITS.get(case.gloo, 10.0)))
    assert found == case.gloo or (case.gloo == "breaks" and found != "answers"), f"{case.why}: {outcomes}"
    with pytest.raises(LocalTensorError):
        case.call.ours()


# -- what gloo answers where we refuse: were it to answer well one day, these would say so


def test_gloo_scatters_and_folds_in_the_order_of_memory(two):
    outcomes = WE_REFUSE_MORE["scatter across memory"].call.on_gloo(two, [GAPS.contiguous()] * 2)
    assert plain(values(outcomes)) == [[[0, 1], [2, 3]]] * 2 != [plain(GAPS)] * 2
    outcomes = WE_REFUSE_MORE["reduce_scatter across memory"].call.on_gloo(two, [GAPS.contiguous()] * 2)
    assert plain(values(outcomes)) != [plain(GAPS * 2)] * 2


def test_gloo_hands_over_bits_for_numbers(two):
    outcomes = WE_REFUSE_MORE["broadcast into another dtype"].call.on_gloo(two, [t(0), t(0, dtype=I32)])
    assert plain(values(outcomes)) == [[1], [t(1).view(I32).item()]]


def test_gloo_leaves_the_tail_of_a_longer_tensor_as_it_was(two):
    outcomes = WE_REFUSE_MORE["broadcast into a longer tensor"].call.on_gloo(two, [count(3), count(4)])
    assert plain(values(outcomes)) == [[0, 1, 2], [0, 1, 2, 3]]


# -- where we differ from gloo without refusing


def test_nan_comes_through_min_and_max_where_gloo_keeps_rank_0s_answer(two):
    nan = float("nan")
    call = Call("all_reduce", [t(nan, 1), t(1, nan)], {"op": "min"})
    [theirs, _] = values(call.on_gloo(two, call.held))
    assert theirs.isnan().tolist() == [True, False]
    assert call.ours()[0].isnan().tolist() == [True, True]


def test_only_the_root_of_reduce_is_promised_anything_and_gloo_writes_on_the_others(two):
    call = Call("reduce", [X, Y], {"root": 1}, program="reduce_as_left")
    left_there = values(call.on_gloo(two, call.held))[0]
    assert not torch.equal(left_there, X)
    assert torch.equal(call.ours()[0], X)


def test_premul_sum_is_ours_from_nccl_and_gloo_refuses_it(two):
    call = Call("all_reduce", [X, Y], {"op": PremulSum(0.5)})
    [refused, _] = call.on_gloo(two, call.held)
    assert isinstance(refused, Raised) and "PREMUL_SUM with Gloo" in refused.message
    assert plain(call.ours()) == [plain(X / 2 + Y / 2)] * 2


def test_uneven_all_to_all_follows_the_documentation_and_gloo_refuses_it(two):
    call = Call("all_to_all", [[t(1), t(2, 3)], [t(4, 5), t(6)]])
    [refused, _] = call.on_gloo(two, call.ours())
    assert isinstance(refused, Raised) and "alltoall: invalid tensor size" in refused.message
    assert plain(call.ours()) == [[[1], [4, 5]], [[2, 3], [6]]]


@pytest.mark.parametrize("held", [[X, Y], [t(1, dtype=C64), t(2, dtype=C64)]], ids=["two dims", "complex"])
def test_permute_takes_what_sends_take_though_permute_tensor_does_not(held, two):
    call = Call("permute", held, {"destinations": [1, 0]})
    assert any(isinstance(outcome, Raised) for outcome in call.on_gloo(two, held))
    assert_same_answers(Call("send_recv", held, {"pairs": [(0, 1), (1, 0)]}), two)
    assert plain(call.ours()) == plain(held[::-1])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_precision_complex_is_refused_as_experimental_though_gloo_adds_it(two):
    call = Call("all_reduce", [t(1, dtype=torch.complex32)] * 2)
    assert plain(values(call.on_gloo(two, call.held))) == [[2], [2]]
    with pytest.raises(LocalTensorError):
        call.ours()
