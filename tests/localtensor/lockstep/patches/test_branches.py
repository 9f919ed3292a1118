"""An `if` on which the ranks differ runs once for each kind of rank; what cannot be run so is refused, and changes nothing in silence."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.common_distributed import MultiThreadedTestCase

import localtensor as lt
from localtensor.errors import NotHeld, NotInLockstep, RanksDiverge, ValuesDiffer
from localtensor.lockstep.values.sym_nodes import RankInts

RANKS = 4
HISTORY: list[int] = []


class Worker:
    def __init__(self):
        self.rank, self.steps, self.seen = dist.get_rank(), 0, []

    def note(self, value):
        self.seen.append(value)


def prints(out):
    worker = Worker()
    if worker.rank == 0:
        print("first", worker.rank, worker.rank == 0, int(worker.rank), file=out)
    if not worker.rank:
        print("not", file=out)
    if worker.rank >= 1 and worker.rank % 2 == 1:
        print("odd", file=out)
    return worker.rank


def assigns(_):
    rank, x, count = dist.get_rank(), torch.ones(2), 5
    y = torch.arange(2.0) + rank
    if rank == 1:
        x, count = x * y, count + 1
        began = count
    if rank == 1:
        count += began
    return x, count


def chooses(_):
    rank = dist.get_rank()
    if rank == 0:
        x, n = torch.ones(2), 1
    elif rank == 1:
        x, n = torch.zeros(2), 5
    else:
        x = torch.full((2,), 9.0) * rank
        n = rank
    for _ in range(2):
        if rank > 1:  # noqa: SIM108
            x = x + 1
        else:
            x = x - 1
        n += 1
    if rank == 2:
        if rank + 1 == 3:  # noqa: SIM108
            k = 7
        else:
            k = 8
        n += k
    else:
        k = 9
    return x, n, k


def makes_new(_):
    rank, x = dist.get_rank(), torch.zeros(2)
    if rank < 2:
        y = x * 2
        y.add_(1)
        x = y
    return x, nn.functional.relu(x)


def communicates_in_a_group(_):
    group = dist.new_group([0, 1])
    x = torch.ones(2) * (dist.get_rank() + 1)
    if dist.get_rank() < 2:
        y = x * 1
        dist.all_reduce(y, group=group)
        x = y
    return x


def asks_of_containers(out):
    rank, seen = dist.get_rank(), 0
    if rank in [0, 2]:
        print("even", file=out)
    else:
        seen = 1
    if rank not in (1, 2):
        seen += 10
    if (rank, 1) == (3, 1):
        seen += 100
    if [rank] != [0]:
        seen += 1000
    return rank, seen


def asks_more_than_once(_):
    rank, seen = dist.get_rank(), 0
    if rank == 0 or rank == 3:  # noqa: PLR1714
        seen += 1
    else:
        seen += 2
    if (
        not (rank in (1, 2)
        and rank != 2)
    ):  # fmt: skip
        seen += 10
    if 0 < rank < 3 or seen == 0:
        seen += 100
    if rank == 5 or seen > 0:
        seen += 1000
    return rank, seen


def chooses_in_an_expression(_):
    rank, x = dist.get_rank(), torch.arange(2.0)
    y = x * 2 if rank == 1 else x
    n: int = (7 if rank in (0, 3) else 8) + rank
    first, second = (rank, "same") if not rank else (rank * 5, "same")
    assert n > 6 or rank == 9
    assert rank in (0, 1, 2, 3)
    return y, n, first, second


def asks_tensors(_):
    x = torch.ones(2) * dist.get_rank()
    y, most = x * 1, x.to(torch.int64).max().item()
    if x.sum() > 3:
        y = y + 100
    if (x == 1).any():
        y = y - 1
    else:
        most = most + 5
    return y, most


def takes_items(_):
    rank, x = dist.get_rank(), torch.arange(8.0)
    parts, numbers = list(torch.chunk(x, 4)), [10, 20, 30, 40]
    held = {"numbers": numbers}
    mine = parts[rank] * 2, numbers[-1 - rank] + len(numbers) + held["numbers"][rank]
    return *mine, len(parts), len(numbers), numbers[2]


def assigns_on_one_rank_in_a_loop(_):
    rank, found, other = dist.get_rank(), torch.zeros(2), 0
    for turn in range(3):
        whole = torch.ones(2) * turn
        if rank == 1:
            expected = whole * 2
            for _, text in enumerate(("a", f"{turn}")):
                expected = expected + len(text)
            found = expected + 1
        if rank == 2:
            theirs, other = whole + rank, other + 1
            found = theirs * 3
        else:
            found = found + 1
    return found, other


def gives_gradients(_):
    rank, x = dist.get_rank(), torch.arange(8.0, requires_grad=True)
    w = torch.ones(8, requires_grad=True)
    y, parts = x * 1, list(torch.chunk(x, 4))
    if rank < 2:  # noqa: SIM108
        y = x * w * rank
    else:
        y = y * y
    z = y * 3 if rank == 3 else y
    ((z * w).sum() + parts[rank].sum()).backward()
    return x.grad, w.grad, y.detach(), y.requires_grad


def ends_with_else(out):
    seen = []
    ends_so(out, seen)
    for turn in range(2):
        x = torch.ones(2) * turn
        if dist.get_rank() == turn:
            x = x * dist.get_rank() + 5
        elif dist.get_rank() > turn + 1:
            x = x - 1
        else:
            x = x * 100
    return x


def ends_so(out, seen):
    if dist.get_rank() not in (0, 3):
        print("outer", len(seen), file=out)
    else:
        print("inner", len(seen), file=out)


def nests(_):
    rank, x, numbers = dist.get_rank(), torch.ones(2), [5, 6, 7, 8]
    if rank in (0, 2, 3):
        if rank == 0 or rank == 2:  # noqa: PLR1714, SIM108
            x = x * numbers[rank]
        else:
            x = inner(x) - numbers[rank]
        y = 3 if rank == 0 else 4
    else:
        x, y = x * numbers[rank], 9
    return x, y


def inner(x):
    if dist.get_rank() != 3:  # noqa: SIM108
        x = x + 1
    else:
        x = x + 2
    return x


def catches_within(_):
    rank, x = dist.get_rank(), torch.ones(2)
    if rank == 1:
        try:
            raise ValueError  # noqa: TRY301
        except ValueError:
            x = x * 2
    else:
        x = x * 3
    return x


def out_of(program, tmp_path, name):
    with (tmp_path / name).open("w") as out:
        return program(out)


@pytest.mark.parametrize(
    "program",
    [
        prints, assigns, chooses, makes_new, communicates_in_a_group, asks_of_containers, asks_more_than_once, chooses_in_an_expression,
        asks_tensors, takes_items, assigns_on_one_rank_in_a_loop, gives_gradients, ends_with_else, nests, catches_within,
    ],
)  # fmt: skip
def test_the_values_and_prints_are_those_of_rank_threads(program, tmp_path):
    want = lt.run(lambda: out_of(program, tmp_path, f"{dist.get_rank()}"), ranks=RANKS, leftovers="ignore")
    with lt.LocalTensorMode(RANKS):
        got = out_of(program, tmp_path, "all")
    for rank in range(RANKS):
        for mine, theirs in zip(*map(leaves, (got, want[rank])), strict=True):
            if isinstance(mine, lt.LocalTensor):
                assert torch.equal(mine.on(rank), theirs)
            else:
                assert on(rank, mine) == theirs
    said = [(tmp_path / f"{rank}").read_text() for rank in range(RANKS)]
    kinds = "".join(dict.fromkeys("".join(said).splitlines(keepends=True)))  # once for each kind of rank
    assert (tmp_path / "all").read_text() == kinds


def leaves(value):
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, tuple) else [value]


def on(rank, value):
    node = getattr(value, "node", None)
    return int(node.values[rank]) if isinstance(node, RankInts) else value


def appends():
    if dist.get_rank() == 0:
        HISTORY.append(1)


def counts():
    worker = Worker()
    if worker.rank == 0:
        worker.steps += 1


def notes():
    worker = Worker()
    if worker.rank == 0:
        worker.note(3)


def writes():
    x = torch.zeros(2)
    if dist.get_rank() == 0:
        x.add_(1)


def writes_a_view():
    x = torch.zeros(2)
    if dist.get_rank() == 0:
        x[:1].add_(1)


def writes_elsewhere():
    held = {"x": torch.zeros(2)}
    if dist.get_rank() == 0:
        held["x"].mul_(2)


def reduces():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.all_reduce(x)


def returns():
    if dist.get_rank() == 0:
        return 1
    return 2


def communicates_in_an_expression():
    x = torch.ones(2)
    return dist.all_reduce(x) if dist.get_rank() == 0 else None


def draws_in_an_expression():
    x = torch.rand(2) if dist.get_rank() == 0 else torch.ones(2)
    return x  # noqa: RET504


def has_unlike_dtypes():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        x = x.double()
    return x


def has_a_tensor_on_one_rank():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        x = None
    return x


def gives_weights_gradients():
    held = {"w": torch.ones(2, requires_grad=True)}
    y = torch.ones(2)
    if dist.get_rank() == 0:
        y = y * held["w"]
    return y


def asks_in_a_loop():
    while dist.get_rank() > 2:
        print("no")


def takes_from_a_call():
    return list(range(4))[dist.get_rank()]


def asks_twice():
    numbers = iter(range(9))
    if next(numbers) == dist.get_rank():
        print("no")


def reads_what_other_ranks_assigned():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        theirs = x + 1
    if dist.get_rank() == 1:
        x = theirs * 2
    return x


def reads_with_else_what_other_ranks_assigned():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        theirs = x + 1
    if dist.get_rank() == 1:  # noqa: SIM108
        x = theirs * 2
    else:
        x = x + 1
    return x


def reads_what_a_loop_has_left():
    for turn in ("c", "d"):
        if dist.get_rank() == 0:
            for name in ("a", turn):
                print(name)
    return name


def assigns_unlike():
    name = "a"
    if dist.get_rank() == 0:
        name = "b"
    return name


@pytest.mark.parametrize(
    "program",
    [
        appends, counts, notes, writes, writes_a_view, writes_elsewhere, reduces, returns,
        asks_twice, assigns_unlike, communicates_in_an_expression, draws_in_an_expression, has_unlike_dtypes, has_a_tensor_on_one_rank,
        gives_weights_gradients, asks_in_a_loop, takes_from_a_call, reads_what_other_ranks_assigned, reads_with_else_what_other_ranks_assigned,
        reads_what_a_loop_has_left,
    ],
)  # fmt: skip
def test_what_would_be_shared_in_silence_is_refused(program, capsys):
    HISTORY.clear()
    with lt.LocalTensorMode(RANKS), pytest.raises((RanksDiverge, NotInLockstep, NotHeld, ValuesDiffer)):
        program()
    assert "no" not in capsys.readouterr().out


def raises():
    if dist.get_rank() == 3:
        raise ValueError("mine")


def raises_with_else():
    x = torch.ones(2)
    if dist.get_rank() == 3:
        x = None
        raise ValueError("mine")
    else:  # noqa: RET506
        x = x + 1
    return x


def catches_outside():
    rank, x = dist.get_rank(), torch.ones(2)
    try:
        if rank == 3:
            rank = 5
            raise ValueError("mine")  # noqa: TRY301
        else:  # noqa: RET506
            x = x + 1
    except ValueError:
        return rank, x + dist.get_rank()
    return 0, 0


def test_an_error_within_restores_the_mode_and_the_variables():
    found = []

    def program():
        with lt.LocalTensorMode(RANKS):
            with pytest.raises(ValueError, match="mine"):
                raises_with_else()
            assert dist.get_world_size() == RANKS
            found.extend(catches_outside())

    with pytest.raises(NotInLockstep, match="an error of rank 3 was caught"):
        program()
    rank, x = found
    assert [on(place, rank) for place in range(RANKS)] == [0, 1, 2, 3]
    assert [x.on(place)[0].item() for place in range(RANKS)] == [1, 2, 3, 4]
    assert sys.gettrace() is None or "branches" not in repr(sys.gettrace())


def test_an_error_within_is_that_of_the_program():
    with lt.LocalTensorMode(RANKS), pytest.raises(ValueError, match="mine"):
        raises()


def asserts():
    assert dist.get_rank() < 3, "the last one"


def asks_too_far():
    numbers = [1, 2, 3]
    return numbers[dist.get_rank() + 3]


@pytest.mark.parametrize(("program", "error"), [(asserts, AssertionError), (asks_too_far, IndexError)])
def test_what_fails_on_one_rank_fails(program, error):
    with lt.LocalTensorMode(RANKS), pytest.raises(error):
        program()


def takes_rows_before():
    sizes = [3, 4, 5, 6]
    return sum(sizes[: dist.get_rank()])


def takes_a_named_slice():
    sizes, own = [3, 4, 5, 6], slice(None, dist.get_rank())
    return sum(sizes[own])


def takes_a_slice_of_a_list_that_is_made():
    return ([3, 4] * 2)[dist.get_rank() :]


def catches_what_one_rank_raises():
    numbers = [1, 2, 3]
    try:
        found = numbers[dist.get_rank()]
    except IndexError:
        found = -1
    return found


class MakesLists:
    @property
    def sizes(self):
        return [3, 4, 5, 6]


def takes_an_item_of_a_list_that_is_made():
    makes = MakesLists()
    return makes.sizes[dist.get_rank()]


@pytest.mark.parametrize("program", [
    takes_rows_before, takes_a_named_slice, takes_a_slice_of_a_list_that_is_made, takes_an_item_of_a_list_that_is_made,
    catches_what_one_rank_raises,
])  # fmt: skip
def test_a_part_of_a_list_that_cannot_be_joined_is_refused(program):
    with lt.LocalTensorMode(RANKS), pytest.raises(lt.errors.RanksDiverge, match="value: 0 on rank 0, 1 on rank 1"):
        program()


def test_a_debugger_keeps_its_trace_function():
    def trace(*_):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with lt.LocalTensorMode(RANKS), pytest.raises(RanksDiverge):
            chooses(None)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def start_a_debugger():
    sys._getframe(1).f_trace = None
    sys.settrace(None)


def loses_its_trace_function():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        start_a_debugger()
        x = x + 1
    else:
        x = x + 2
    return x


def test_a_debugger_that_is_started_within_ends_in_an_error():
    before = sys.gettrace()
    try:
        with pytest.raises(NotInLockstep, match="a debugger took over"), lt.LocalTensorMode(RANKS):
            loses_its_trace_function()
    finally:
        sys.settrace(before)
    assert not torch._C._len_torch_dispatch_stack()
    with lt.LocalTensorMode(RANKS):
        assert lt.rank_map(torch.tensor).ranks == (0, 1, 2, 3)


def test_no_trace_function_is_left():
    before = sys.gettrace()
    with lt.LocalTensorMode(RANKS):
        for program in (chooses, asks_more_than_once, chooses_in_an_expression, takes_items):
            program(None)
            assert sys.gettrace() is before


def test_an_int_of_each_rank_is_that_of_the_ranks_that_run():
    with lt.LocalTensorMode(RANKS):
        rank = dist.get_rank()
        texts = []
        if rank == 2:
            text = f"{rank} {rank + 1} {int(rank)} {np.arange(4)[int(rank)]}"
        texts += [text]
    assert texts == ["2 3 2 2"]


class OnRank:
    equal = MultiThreadedTestCase.assertEqualOnRank

    def __init__(self):
        self.rank = dist.get_rank()

    def assertEqual(self, x, y, _):  # as torch's base calls it
        torch.testing.assert_close(x, y)


def test_a_branch_of_torchs_bases_of_tests_runs_for_some_ranks():
    with lt.LocalTensorMode(RANKS):
        case, x = OnRank(), lt.rank_map(torch.tensor)
        case.equal(x, torch.tensor(2), rank=2)
        with pytest.raises(AssertionError, match="Scalars are not equal"):
            case.equal(x, torch.tensor(2), rank=1)
