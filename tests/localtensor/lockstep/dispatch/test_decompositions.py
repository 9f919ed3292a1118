"""out= in lockstep: each rank's own result, in the shape and dtype that torch gives it, whatever was passed."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from localtensor.errors import NotInLockstep, OutsideWrite, RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode, rank_map

RANKS = 3
OUTS = {
    "empty, of all ranks": lambda dtype: torch.empty(0, dtype=dtype),
    "empty, one each": lambda dtype: rank_map(lambda rank: torch.empty(0, dtype=dtype)),
    "as large": lambda dtype: torch.empty(3, dtype=dtype),
    "larger, one each": lambda dtype: rank_map(lambda rank: torch.full((5,), rank, dtype=dtype)),
    "of other dims": lambda dtype: torch.zeros(2, 2, dtype=dtype),
}
RESULTS = {
    "of one shape": lambda rank: torch.arange(3) + rank,
    "uneven": lambda rank: torch.arange(rank + 1) + rank,
    "shared": lambda rank: torch.arange(3),
}


@pytest.fixture(autouse=True)
def mode():
    with LocalTensorMode(RANKS) as made, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        yield made


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.int64, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("given", OUTS)
@pytest.mark.parametrize("brought", RESULTS)
def test_what_is_passed_as_out_gets_each_ranks_result(brought, given, dtypes):
    x, out = rank_map(lambda rank: RESULTS[brought](rank).to(dtypes[0])), OUTS[given](dtypes[1])
    assert torch.mul(x, x, out=out) is out
    for rank in range(RANKS):
        alone = RESULTS[brought](rank).to(dtypes[0])
        assert out.on(rank).tolist() == (alone * alone).tolist()
    assert str(out.shape) == str(x.shape) and out.dtype == dtypes[1]


def test_a_reduction_adds_up_in_the_dtype_of_its_out():
    x = rank_map(lambda rank: torch.tensor([2.0**24, 1, rank]))
    out = torch.empty(0, dtype=torch.float64)
    torch.sum(x, 0, out=out)
    assert [out.on(rank).item() for rank in range(RANKS)] == [2**24 + 1 + rank for rank in range(RANKS)]


def test_a_result_that_does_not_fit_the_dtype_of_out_leaves_it_as_it_was():
    x, out = rank_map(lambda rank: torch.ones(3) + rank), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.mul(x, x, out=out)
    assert out.shape == (2,) and out.tolist() == [0, 0]


def test_ops_that_only_exist_with_out_resize_it_too():
    out = torch.empty(0)
    torch.arange(0, 3, out=out)
    assert out.shape == (3,) and out.tolist() == [0, 1, 2]
    uneven = torch.empty(0)
    torch.ones(dist.get_rank() + 1, out=uneven)
    assert str(uneven.shape) == "torch.Size([RankInts(1, 2, 3)])" and uneven.on(2).tolist() == [1, 1, 1]


def test_random_numbers_of_each_rank_do_not_land_in_one_memory():
    want = [torch.rand(2, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(RANKS)]
    for out in (torch.empty(0), torch.empty(2)):
        torch.manual_seed(dist.get_rank())
        torch.rand(2, out=out)
        assert [out.on(rank).tolist() for rank in range(RANKS)] == want


def test_rows_of_a_stack_have_no_room_for_another_shape():
    out = rank_map(lambda rank: torch.full((2,), float(rank)))
    with pytest.raises(NotInLockstep, match=r"aten.ones.out: its out= holds values that differ by rank"):
        torch.ones(3, out=out)


def test_out_from_outside_takes_only_what_all_ranks_agree_on():
    with torch._C._DisableTorchDispatch():
        out = torch.zeros(3)
    torch.add(torch.ones(3), 1, out=out)
    with pytest.raises(OutsideWrite):
        torch.add(rank_map(lambda rank: torch.full((3,), float(rank))), 1, out=out)
    with torch._C._DisableTorchDispatch():
        assert out.tolist() == [2, 2, 2]


def test_lists_of_tensors_are_done_in_groups_and_what_is_shared_stays_shared():
    shared, own = torch.ones(2), rank_map(lambda rank: torch.full((2,), float(rank)))
    first, second = torch._foreach_add([shared, own], [shared, shared])
    assert first._partition.rows == 1 and first.tolist() == [2, 2]
    assert [second.on(rank).tolist() for rank in range(RANKS)] == [[1, 1], [2, 2], [3, 3]]
    torch._foreach_mul_([shared, own], 3)
    assert shared._partition.rows == 1 and own.on(2).tolist() == [6, 6]


def chosen(x):
    return torch.cond(x.sum() > -1, lambda y: y + torch.ones(2), lambda y: y - 1, (x,))


def looped(x):
    step = (torch.tensor(0), x)
    return torch.ops.higher_order.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), step, ())[1]


def scanned(x):
    return scan(lambda total, row: (total + row, total * row), torch.zeros(2), x)[1]


def mapped(x):
    return torch._higher_order_ops.map(lambda row, factor: row * factor, x, torch.tensor(2.0))


def attended(x):
    query = x.view(1, 1, 3, 2)
    return flex_attention(query, query, query)


OPERATORS = [chosen, looped, scanned, mapped, attended]


def rows():
    return rank_map(lambda rank: torch.arange(6.0).view(3, 2) + rank)


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("function", OPERATORS)
def test_an_operator_that_takes_functions_gives_what_it_gives_on_each_rank(function, traced):
    run = make_fx(function)(rows()) if traced else function
    found = run(rows() + 1)
    for rank in range(RANKS):
        torch.testing.assert_close(found.on(rank), function(torch.arange(6.0).view(3, 2) + rank + 1))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_gradients_go_through_the_function_that_is_chosen():
    x = rows().requires_grad_()
    torch.cond(x.sum() > -1, lambda y: y * y, lambda y: y - 1, (x,)).sum().backward()
    assert [x.grad.on(rank).tolist() for rank in range(RANKS)] == [
        (2 * (torch.arange(6.0).view(3, 2) + rank)).tolist() for rank in range(RANKS)
    ]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_choice_on_which_ranks_differ_is_refused_by_name():
    with pytest.raises((RanksDiverge, RuntimeError), match="all ranks share one control flow") as caught:
        torch.cond(dist.get_rank() * torch.ones(1).sum() > 1, lambda y: y + 1, lambda y: y - 1, (rows(),))
    assert isinstance(caught.value.__cause__ or caught.value, RanksDiverge)


# -- custom ops that communicate


@pytest.fixture(scope="module")
def custom_ops():
    library = torch.library.Library("lockstep_of_tests", "FRAGMENT")

    @torch.library.custom_op("lockstep_of_tests::summed", mutates_args=())
    def summed(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    summed.register_autograd(lambda ctx, grad: summed(grad))

    @torch.library.custom_op("lockstep_of_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD) * 2

    @torch.library.custom_op("lockstep_of_tests::add_sum", mutates_args=("x",))
    def add_sum(x: torch.Tensor) -> None:
        x.add_(1)
        dist.all_reduce(x)

    library.define("of_library(Tensor x) -> Tensor")
    library.impl("of_library", lambda x: summed._init_fn(x), "CPU")  # noqa: PLW0108  # a function by itself
    yield {
        "summed": summed,
        "doubled": doubled,
        "add_sum": add_sum,
        "of_library": torch.ops.lockstep_of_tests.of_library,
    }
    library._destroy()


@pytest.mark.parametrize("alike", [False, True])
def test_a_custom_op_that_communicates_is_that_of_all_ranks(custom_ops, alike):
    x = rank_map(lambda rank: torch.full((2,), 1.0 if alike else 2.0**rank)).requires_grad_()
    for _ in range(2):
        y = custom_ops["summed"](x)
        assert y.reconcile().tolist() == ([3, 3] if alike else [7, 7])
        assert custom_ops["doubled"](x.detach()).reconcile().tolist() == ([6, 6] if alike else [14, 14])
    (y * rank_map(lambda rank: torch.full((2,), float(rank)))).sum().backward()
    assert x.grad.reconcile().tolist() == [3, 3]


@pytest.mark.parametrize("name", ["add_sum", "of_library"])
def test_what_communicates_for_one_rank_alone_is_refused(custom_ops, name):
    with pytest.raises(NotInLockstep, match=f"lockstep_of_tests.{name}.default: it "):
        custom_ops[name](rank_map(lambda rank: torch.full((2,), float(rank))))


def test_a_collective_in_a_function_of_one_rank_is_refused():
    def reduced(rank):
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        return x

    with pytest.raises(NotInLockstep, match="a collective in a function of one rank: it has the tensors of one rank"):
        rank_map(reduced)
