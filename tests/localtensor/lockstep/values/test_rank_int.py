"""An int of each rank: it computes as Python's ints do on each, and refuses in words to steer one control flow."""

import copy
import math
import operator
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import guard_or_false, is_concrete_int, statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor.errors import AnotherMode, NotHeld, NotInLockstep, RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode
from localtensor.lockstep.values.rank_int import is_rank_int, on_rank, rank_int, rank_values
from localtensor.lockstep.values.sym_nodes import Constant, RankBools, RankInts

S, T = rank_int([0, 1, 2, 3]), rank_int([5, 6, 7, 5])
MOST = 2**63 - 1
ARITHMETIC = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, "**": operator.pow, "<<": operator.lshift,
    ">>": operator.rshift,
}  # fmt: skip
EXTREMA = {"max": (torch.sym_max, max), "min": (torch.sym_min, min)}
COMPARISON = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
INTS = st.one_of(st.integers(-3, 5), st.sampled_from([2**31, -(2**31), 2**62, MOST, -MOST - 1, 3037000500]))


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        raise AssertionError(op)


def wrapper(*args, **kwargs):
    return Wrapper._make_wrapper_subclass(Wrapper, *args, **kwargs)


def by_rank(x, world):
    """What each rank has, None where it holds nothing."""
    if not isinstance(x, torch.SymInt | torch.SymBool):
        return [x] * world
    held = np.ones(world, bool) if x.node.held is None else x.node.held
    return [value if has else None for value, has in zip(x.node.values.tolist(), held, strict=True)]


@st.composite
def operands(draw, ints=INTS):
    """Two of them, with the values of each rank; one may be a plain int."""
    world = draw(st.integers(1, 5))
    made = []
    for plain in draw(st.sampled_from([(False, False), (True, False), (False, True)])):
        values = [draw(ints)] * world if plain else draw(st.lists(ints, min_size=world, max_size=world))
        held = None if plain else draw(st.none() | st.lists(st.booleans(), min_size=world, max_size=world))
        held = [*held[1:], True] if held else held  # of two, the last rank holds both
        x = values[0] if plain else rank_int(values, held)
        told = [v if held is None or held[r] else None for r, v in enumerate(values)]
        made.append((x, [x] * world if type(x) is int else told))
    return made


def on_each(fn, a, b):
    """What Python says on the ranks that hold both, None on the others."""
    return [None if x is None or y is None else fn(x, y) for x, y in zip(a, b, strict=True)]


def check_agrees(result, want):
    """The result is that of each rank; it is a plain number exactly if they share it."""
    told = [x for x in want if x is not None]
    assert (type(result) in (int, bool)) is (len(set(told)) == 1)
    got = by_rank(result, len(want))
    assert [g for g, w in zip(got, want, strict=True) if w is not None] == told
    if type(result) not in (int, bool):
        assert got == want
        assert result.node.most >= max(map(abs, told))


@pytest.mark.parametrize("sign", [sign for sign in ARITHMETIC if sign not in ("**", "<<", ">>")])
@given(operands())
def test_arithmetic_is_that_of_each_rank(sign, pair):
    check_law(ARITHMETIC[sign], ARITHMETIC[sign], *pair)


@pytest.mark.parametrize("sign", ["**", "<<", ">>"])
@given(operands(st.sampled_from([0, 1, 2, 3, 30, 63, 64])))
def test_powers_and_shifts_are_those_of_each_rank(sign, pair):
    check_law(ARITHMETIC[sign], ARITHMETIC[sign], *pair)


@pytest.mark.parametrize("name", EXTREMA)
@given(operands())
def test_extrema_are_those_of_each_rank(name, pair):
    check_law(*EXTREMA[name], *pair)


def check_law(ours, fn, one, other):
    (x, a), (y, b) = one, other
    if type(x) is type(y) is int:
        return
    try:
        want = on_each(fn, a, b)
    except ZeroDivisionError:
        with pytest.raises((ZeroDivisionError, RanksDiverge)):
            ours(x, y)
        return
    if all(w is None or -MOST - 1 <= w <= MOST for w in want):
        check_agrees(ours(x, y), want)
    else:
        with pytest.raises(NotInLockstep, match="64 bits"):
            ours(x, y)


@pytest.mark.parametrize("sign", COMPARISON)
@given(operands())
def test_comparison_is_that_of_each_rank(sign, pair):
    (x, a), (y, b) = pair
    check_agrees(COMPARISON[sign](x, y), on_each(COMPARISON[sign], a, b))


SIZES = st.lists(
    st.one_of(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=3, max_size=3)), min_size=1, max_size=4
)


@given(SIZES, st.data())
def test_a_layout_is_that_of_each_rank_or_refused(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    sizes = [rank_int(size) if isinstance(size, list) else size for size in shape]
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * sizes[dim]
    x = wrapper(sizes, strides=strides)
    for ask in (torch.Tensor.is_contiguous, torch.ops.aten.is_non_overlapping_and_dense.default):
        each = [torch.empty_strided([on_rank(n, r) for n in sizes], [on_rank(n, r) for n in strides]) for r in range(3)]
        want = {ask(one) for one in each}
        if len(want) == 1:
            assert ask(x) is want.pop()
        else:
            with pytest.raises(RanksDiverge):
                ask(x)


@pytest.mark.parametrize(("source", "want"), [
    ("S * 2 + 1", [1, 3, 5, 7]), ("10 - S", [10, 9, 8, 7]), ("10 // T", [2, 1, 1, 2]), ("-S", [0, -1, -2, -3]),
    ("+S", [0, 1, 2, 3]), ("abs(1 - S)", [1, 0, 1, 2]), ("2 ** S", [1, 2, 4, 8]), ("round(S)", [0, 1, 2, 3]),
    ("math.floor(S)", [0, 1, 2, 3]), ("torch.sym_max(2, S)", [2, 2, 2, 3]), ("torch.sym_max(S, 3)", 3),
    ("torch.sym_min(S, 2)", [0, 1, 2, 2]), ("torch.sym_sum([S, T, 3])", [8, 10, 12, 11]), ("sum([S, T])", [5, 7, 9, 8]),
    ("torch.sym_sum([S, -S])", 0), ("torch.sym_int(S)", [0, 1, 2, 3]), ("torch.sym_ite(S == 3, 1, 2)", [2, 2, 2, 1]),
    ("torch.sym_ite(S == 3, S, T)", [5, 6, 7, 3]), ("torch.sym_ite(S == 3, T, T)", [5, 6, 7, 5]),
    ("torch.sym_ite(S >= 2, True, False)", [False, False, True, True]),
    ("torch.sym_not(S == 3)", [True, True, True, False]), ("(S == 3) & (T == 5)", [False, False, False, True]),
    ("(S == 3) | (T == 5)", [True, False, False, True]), ("(S == 3) & False", False), ("True | (S == 3)", True),
    ("True & (S == 3)", [False, False, False, True]), ("(S == 3) == (T == 5)", [False, True, True, True]),
    ("(S == 3) | (S != 3)", True), ("T / T", 1.0), ("S - S", 0), ("S == 9", False), ("S in [8, 9]", False),
    ("max(S, T)", [5, 6, 7, 5]), ("S * 0", 0), ("S == 'a'", False),
    ("statically_known_true(S == 3)", False), ("is_concrete_int(S)", False), ("T % (S + 1)", [0, 0, 1, 1]),
    ("T % (S >= 0)", [0, 0, 0, 0]), ("isinstance(S, int)", True), ("torch._check(S >= 0)", None),
])  # fmt: skip
def test_what_works(source, want):
    result = eval(source)
    assert result == want if not isinstance(want, list) else by_rank(result, 4) == want
    assert type(result) is type(want) or isinstance(want, list)


@pytest.mark.parametrize("source", [
    "int(S)", "[1, 2, 3][S]", "range(S)", "[1] * S", "'ab' * S", "[1, 2][:S]", "'%d' % S", "operator.index(S)",
    "float(S)", "math.sqrt(S)", "S.bit_length()", "torch.Size([S]).numel()", "len(wrapper([S, 3]))", "torch.arange(S)",
    "torch.tensor(S)", "torch.tensor([S, 1])", "torch.ones(4)[:S]", "torch.ones(4).narrow(0, 0, S)",
    "torch.full((2,), S)", "torch.ones(2).add(1, alpha=S)",
])  # fmt: skip
def test_an_int_that_must_be_one_is_refused(source):
    with pytest.raises(RanksDiverge) as caught:
        eval(source)
    assert str(caught.value).startswith("int: value: 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3: all ranks ")
    assert caught.value.values == {0: 0, 1: 1, 2: 2, 3: 3} and caught.value.place.file == "<string>"


@pytest.mark.parametrize(("source", "words"), [
    ("bool(S)", "bool: RankInts(0, 1, 2, 3) != 0: False on rank 0, True on ranks 1, 2, 3: "),
    ("1 if S == 0 else 2", "bool: RankInts(0, 1, 2, 3) == 0: True on rank 0, False on ranks 1, 2, 3: "),
    ("S in [0, 1]", "bool: RankInts(0, 1, 2, 3) == 0: "),
    ("max(S, 1)", "bool: RankInts(0, 1, 2, 3) < 1: "),
    ("not torch.sym_not(S < 1)", "bool: not (RankInts(0, 1, 2, 3) < 1): "),
    ("bool((S < 1) | (T < 6))", "bool: RankInts(0, 1, 2, 3) < 1 or RankInts(5, 6, 7, 5) < 6: "),
    ("bool(torch.sym_ite(S < 1, S < 2, T < 6))",
     "bool: RankInts(0, 1, 2, 3) < 2 if RankInts(0, 1, 2, 3) < 1 else RankInts(5, 6, 7, 5) < 6: "),
    ("hash(S == 3)", "bool: RankInts(0, 1, 2, 3) == 3: "),
    ("(S == 3) + 1", "bool: RankInts(0, 1, 2, 3) == 3: "),
    ("torch._check(S > 0)", "torch._check: RankInts(0, 1, 2, 3) > 0: False on rank 0, "),
    ("guard_or_false(S == 3)", "bool: RankInts(0, 1, 2, 3) == 3: "),
    ("10 // S", "//: divisor, zero on some ranks: 0 on rank 0, "),
    ("T % S", "%: divisor, zero on some ranks: 0 on rank 0, "),
    ("T / S", "/: divisor, zero on some ranks: 0 on rank 0, "),
    ("T ** (S - 1)", "bool: RankInts(-1, 0, 1, 2) >= 0: False on rank 0, "),
])  # fmt: skip
def test_a_condition_that_differs_is_refused_in_words(source, words):
    with pytest.raises(RanksDiverge) as caught:
        eval(source)
    assert str(caught.value).startswith(words)


def test_the_line_that_branches_is_quoted():
    with pytest.raises(RanksDiverge, match=r"test_the_line_that_branches_is_quoted, `assert S == 0  # here`\. Run"):
        assert S == 0  # here


@pytest.mark.parametrize(("source", "words"), [
    ("S / 2", "RankInts(0, 1, 2, 3) / 2: it would be a float of its own on each rank"),
    ("2 / T", "2 / RankInts(5, 6, 7, 5): it would be a float"), ("S + 1.5", "float(RankInts(0, 1, 2, 3)): "),
    ("S == 1.5", "float(RankInts(0, 1, 2, 3)): "), ("torch.sym_float(S)", "float(RankInts(0, 1, 2, 3)): "),
    ("S // 2.0", "float(RankInts(0, 1, 2, 3)): "), ("T ** -1", "float(RankInts(5, 6, 7, 5)): "),
    ("torch.sym_ite(S == 3, 1.0, 2.0)", "sym_ite with 1.0: it would be a float"),
    ("(S == 3) & S", "and with RankInts(0, 1, 2, 3): its operands are bools"),
    ("S.node.add('a')", "+ with 'a': it is neither one int nor an int of each rank"),
    ("S + 2 ** 70", "RankInts(0, 1, 2, 3) + 1180591620717411303424: an int of each rank has 64 bits"),
])  # fmt: skip
def test_what_is_no_int_of_each_rank_is_refused(source, words):
    with pytest.raises(NotInLockstep) as caught:
        eval(source)
    assert words in str(caught.value)


@pytest.mark.parametrize(("source", "kind", "words"), [
    ("hash(S)", (TypeError, NotInLockstep), "unhashable|another key"), ("~S", TypeError, "bad operand"),
    ("torch.sym_ite(S == 3, S, 2)", AssertionError, "type mismatch"),
    ("torch.zeros(S)", RuntimeError, "concrete integers"),
    ("S // 0", ZeroDivisionError, "by zero"), ("S << -1", ValueError, "negative"), ("torch._check(S < 0)", RuntimeError, "Expected cond"),
])  # fmt: skip
def test_what_only_python_or_torch_can_refuse(source, kind, words):
    with pytest.raises(kind, match=words):
        eval(source)


def test_ranks_have_no_one_example_of_a_size():
    with pytest.raises(RanksDiverge, match="int: value: 0 on rank 0, 1 on rank 1"):
        S.node.hint  # noqa: B018
    assert not S.node.has_hint()


def test_a_mode_is_given_the_int_itself():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.extend(args[1:])
            return torch.ones(2)

    x = torch.ones(2, requires_grad=True)
    with Mode():
        (x * S).backward(torch.ones(2))
    forward, backward = seen
    assert forward is S and backward is S


def test_sizes_of_a_wrapper():
    x = wrapper([2, S, 3])
    assert by_rank(x.shape[1], 4) == [0, 1, 2, 3] and is_rank_int(x.shape[1]) and x.shape[::2] == (2, 3)
    assert by_rank(x.stride(0), 4) == [3, 3, 6, 9] and by_rank(x.numel(), 4) == [0, 6, 12, 18]
    assert len(x) == 2 and x.is_contiguous() and x.size(1) is not None


def test_no_product_of_sums_overflows_unseen():
    x = rank_int([2**40, 2**41])
    assert x.node.most == 2**41 and (x + x).node.most == 2**42
    assert (0 ** rank_int([0, 7])).node.most == 1
    with pytest.raises(NotInLockstep, match="64 bits"):
        (x + x) * (x + x)


def test_a_layout_is_asked_past_the_mode_that_asks():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            raise AssertionError(op)

    with Mode():
        assert S.node.is_non_overlapping_and_dense([T.node, Constant(3)], [Constant(3), Constant(1)]).constant is True


def test_how_it_prints():
    assert f"{S}" == str(S) == repr(S) == "RankInts(0, 1, 2, 3)"
    assert repr(rank_int(range(8))) == "RankInts(0, 1, 2, 3, 4, 5, 6, 7)"
    assert repr(rank_int(range(9))) == "RankInts(0, 1, 2, ... 8)"
    assert repr(rank_int([4, 5, 6], [True, False, True])) == "RankInts(4, -, 6)"
    assert repr(S == 1) == "RankBools(False, True, False, False)"


def test_the_same_values_are_one_object():
    assert rank_int([1, 2]) is rank_int(np.array([1, 2], np.int32)) is rank_int(torch.tensor([1, 2]))
    assert rank_int([1, 2, 3], [True, True, False]) is rank_int([1, 2, 9], [True, True, False])
    assert rank_int([1, 2], [True, True]) is rank_int([1, 2]) is not rank_int([1, 3])
    assert rank_int([7, 7]) == 7 and type(rank_int([7, 7])) is int
    assert rank_int([7, 8], [False, True]) == 8


def test_the_callers_array_stays_the_callers():
    values = np.array([1, 2])
    x = rank_int(values)
    values[0] = 9
    assert by_rank(x, 2) == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        rank_values(x + 1, 2)[0] = 5


@pytest.mark.parametrize("values", [[1.5, 2], ["a"], np.array([1], np.uint64)])
def test_only_ints_become_one(values):
    with pytest.raises(TypeError, match="Cannot cast"):
        rank_int(values)


def test_values_on_ranks():
    assert (
        rank_values(S, 4).tolist() == [0, 1, 2, 3]
        and rank_values(3, 4) is rank_values(S == 1, 4) is rank_values(None, 4) is None
    )
    assert [on_rank(S, rank) for rank in range(4)] == [0, 1, 2, 3] and on_rank(5, 3) == 5
    assert type(on_rank(S, 0)) is int
    assert is_rank_int(S) and not is_rank_int(3) and not is_rank_int(S == 3) and not is_rank_int(S - S)
    with pytest.raises(AnotherMode, match="values_of: an input"):
        rank_values(S, 5)


def test_ranks_that_hold_none():
    x, y = rank_int([1, 2, 3, 0], [True, True, True, False]), rank_int([0, 2, 4, 6], [False, True, True, True])
    assert by_rank(x + y, 4) == [None, 4, 7, None] and by_rank(12 // (y - 1), 4) == [None, 12, 4, 2]
    assert by_rank(2 ** (x - 1), 4) == [1, 2, 4, None]
    with pytest.raises(NotHeld, match="on_rank: ranks: rank 0: no value is held there, only on ranks 1, 2, 3"):
        on_rank(y, 0)
    for rank in (-1, 4):
        with pytest.raises(NotHeld, match="only on ranks 0-3"):
            on_rank(S, rank)
    with pytest.raises(NotHeld, match="nor anywhere else"):
        rank_int([1, 2], [False, False])
    with pytest.raises(NotHeld, match=r"\+: ranks: ranks 0, 1: no value is held there, only on ranks 2, 3"):
        rank_int([1, 2, 0, 0], [True, True, False, False]) + rank_int([0, 0, 1, 2], [False, False, True, True])
    with pytest.raises(RanksDiverge) as caught:
        int(x)
    assert caught.value.values == {0: 1, 1: 2, 2: 3}


def test_worlds_do_not_mix():
    with pytest.raises(AnotherMode, match=r"\+: an input"):
        S + rank_int([1, 2])
    with pytest.raises(AnotherMode, match="==: an input"):
        _ = rank_int([1, 2]) == S


def test_copies_and_pickles_keep_the_values():
    x = rank_int([4, 5, 6], [True, False, True])
    for again in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert is_rank_int(again) and by_rank(again, 3) == [4, None, 6] and not again.node.values.flags.writeable


def test_nodes_answer_what_torch_asks():
    for node, kind, constant in (
        (S.node, int, None),
        ((S == 1).node, bool, None),
        (Constant(3), int, 3),
        (Constant(True), bool, True),
    ):
        assert (node.is_int(), node.is_bool(), node.is_float()) == (kind is int, kind is bool, False)
        assert node.constant is constant and node.is_constant() is (constant is not None)
        assert node.maybe_as_int() == (3 if constant == 3 else None) and node.clone() is node
        assert not (node.is_nested_int() or node.is_symbolic() or node.has_hint())
    assert type(S.node) is RankInts and type((S == 1).node) is RankBools
    assert not (S == 1).node.statically_known_true("", 0)
    assert not (S == 1).node.guard_or_false("/x/c10/core/Contiguity.h", 1)
    assert (S == 1).node.guard_or_true("/x/aten/src/ATen/EmptyTensor.cpp", 1)
    for guess in (RankBools.guard_or_false, RankBools.guard_or_true):
        with pytest.raises(RanksDiverge):
            guess((S == 1).node, "/x/aten/src/ATen/ExpandUtils.h", 1)


def test_the_memory_of_known_values_is_bounded():
    from localtensor.lockstep.values import rank_int as rank_ints

    assert rank_ints._known.cache_info().maxsize == 512
    assert math.isfinite(rank_ints._MOST_KEPT)
    assert guard_or_false(rank_int([3, 3]) == 3) and not is_concrete_int(S) and not statically_known_true(S == 3)


@pytest.mark.parametrize("op", [torch.mul, torch.add, torch.eq, torch.fill, lambda x, y: torch.where(x > 0, y, x)])
def test_a_bool_of_each_rank_is_an_operand_as_on_a_rank(op):
    x = torch.tensor([0.0, 2.0])
    with LocalTensorMode(4):
        done = op(x.clone(), rank_int(range(4)) == 2)
        for rank in range(4):
            torch.testing.assert_close(done.on(rank), op(x.clone(), rank == 2))
