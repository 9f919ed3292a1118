"""An int of each rank where a program uses it: the values of each rank, or an error of this package, also while a graph is recorded."""

import copy
import functools
import numbers
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from functorch.compile import aot_function
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, is_nested_int

from localtensor.errors import LocalTensorError, NotInLockstep, NotTraceable, RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.rank_int import is_rank_number, on_rank
from tests.localtensor.both_ways import check_both_ways, here

RANKS = 4
OUTSIDE = torch.arange(24.0).view(4, 2, 3)
WEIGHT = nn.Parameter(torch.arange(12.0).view(4, 3))

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


def branching(x, rank):
    if rank == 0:
        x = x * 7
    return x + 1


def written(x, rank):
    y = x.clone()
    y[rank], y[..., rank % 3], y[torch.tensor([0, 1]), rank % 3] = 5, 6, 7
    return y


def picked(x, rank):
    mine = x.chunk(4)[rank]
    return mine * 2


USES = {
    "an item of a tensor": lambda x, rank: x[rank] * 2,
    "an item from the end": lambda x, rank: x[-rank - 1],
    "an item of two ints": lambda x, rank: x[rank, rank % 3],
    "a column": lambda x, rank: x[..., rank % 3],
    "a new dim": lambda x, rank: x[None, rank],
    "rows": lambda x, rank: x[rank:].sum(0) + x[:rank].sum(0),
    "a tensor from outside": lambda x, rank: OUTSIDE[rank] + OUTSIDE[rank, 0] + OUTSIDE[rank:].sum(),
    "a weight from outside": lambda x, rank: WEIGHT[rank] * x,
    "beside a tensor": lambda x, rank: OUTSIDE[torch.tensor([0, 3]), rank % 2, torch.tensor([2, 1])] + x[0, :2],
    "beside a list": lambda x, rank: x[[0, 1], rank % 3],
    "in a list": lambda x, rank: x[[rank, 0]],
    "beside a mask": lambda x, rank: OUTSIDE[OUTSIDE[:, :, 0] > 6][:, rank % 3],
    "beside a mask of two dims": lambda x, rank: OUTSIDE[OUTSIDE[:, :, 0] > 6, rank % 3],
    "written items": written,
    "a tensor of it": lambda x, rank: torch.tensor(rank) + x,
    "a tensor with it": lambda x, rank: torch.tensor([rank, 2.5]).sum() + x,
    "an index tensor": lambda x, rank: x.index_select(0, torch.as_tensor([rank])) + torch.as_tensor(rank == 2),
    "one hot": lambda x, rank: nn.functional.one_hot(torch.tensor(rank), 4) * x[:, 0],
    "divmod": lambda x, rank: x * divmod(rank, 2)[0] + divmod(7, rank + 1)[1],
    "rounded": lambda x, rank: x + round(rank, 1) + round(rank),
    "narrow": lambda x, rank: x.narrow(0, rank, 1),
    "roll": lambda x, rank: x.roll(rank, 0),
    "arange": lambda x, rank: torch.arange(rank, rank + 4).sum() + x,
    "full": lambda x, rank: torch.full((rank + 1,), 2.0).sum() + torch.zeros(rank + 1, 2).sum() + x,
    "an operand": lambda x, rank: x * rank + x.add(1, alpha=rank) - 2**rank,
    "a branch": branching,
    "a chunk": picked,
}
REFUSED = {
    "a slice of a list": lambda x, rank: sum([1, 2, 3][:rank]) + x,
    "a range": lambda x, rank: x + sum(range(rank)),
    "a key": lambda x, rank: x + {0: 1, 1: 2, 2: 3, 3: 4}[rank],
    "a float": lambda x, rank: x * (rank / 2),
    "a text with a format": lambda x, rank: (x, f"{rank:03d}"),
    "a bool as an index": lambda x, rank: OUTSIDE[rank == 0],
    "rounded before the point": lambda x, rank: x + round(rank * 25, -1),
    "the larger one": lambda x, rank: x + max(rank, 2),
}


def inputs():
    return rank_map(lambda rank: torch.arange(12.0).view(4, 3) + rank)


def outcome(run):
    """What each rank has, or the error of this package; others are raised."""
    try:
        with LocalTensorMode(RANKS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run(inputs(), dist.get_rank())
    except Exception as error:
        cause = error
        while cause is not None and not isinstance(cause, LocalTensorError):
            cause = cause.__cause__ or cause.__context__
        if cause is None and "Differs between ranks of a LocalTensorMode" not in str(error):
            raise
        return cause or error
    return [of_rank(found, rank) for rank in range(RANKS)]


def of_rank(x, rank):
    if isinstance(x, LocalTensor):
        return x.on(rank)
    return on_rank(x, rank) if is_rank_number(x) else x


def as_on_each_rank(found, use):
    for rank, mine in enumerate(found):
        right = use(torch.arange(12.0).view(4, 3) + rank, rank)
        torch.testing.assert_close(mine, right.detach(), check_stride=False)
    return True


@pytest.mark.parametrize("use", USES)
def test_each_rank_has_what_its_own_int_gives(use):
    assert as_on_each_rank(outcome(USES[use]), USES[use])


@pytest.mark.parametrize("use", REFUSED)
def test_what_ranks_cannot_have_apart_is_refused_by_name(use):
    assert isinstance(outcome(REFUSED[use]), RanksDiverge | NotInLockstep)


RECORDERS = {
    "AOTAutograd": lambda use: lambda x, rank: aot_function(lambda y: use(y, rank), lambda graph, _: graph)(x),
    "make_fx": lambda use: lambda x, rank: make_fx(lambda y: use(y, rank))(x)(x),
    "make_fx, fake": lambda use: lambda x, rank: make_fx(lambda y: use(y, rank), tracing_mode="fake")(x)(x),
}


@pytest.mark.few(40)
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("use", [use for use in [*USES, *REFUSED] if "mask" not in use])  # of sizes that no graph has
def test_a_recorder_refuses_it_by_name_or_records_it_right(use, recorder):
    function = {**USES, **REFUSED}[use]
    found = outcome(RECORDERS[recorder](function))
    assert isinstance(found, LocalTensorError) or as_on_each_rank(found, function)
    assert use in REFUSED or isinstance(found, NotTraceable | RanksDiverge)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("use", [*USES, *REFUSED])
def test_a_compiled_function_does_as_the_function(use, backend):
    function = {**USES, **REFUSED}[use]
    found = outcome(torch.compile(function, backend=backend))
    assert isinstance(found, RanksDiverge | NotInLockstep) if use in REFUSED else as_on_each_rank(found, function)


def test_an_error_says_which_function_of_torch_records():
    with LocalTensorMode(RANKS):
        x, rank = inputs(), dist.get_rank()
        with pytest.raises(
            NotTraceable, match=r"^AOTAutograd: a graph for all ranks: RankInts\(0, 1, 2, 3\) at .*: a graph"
        ):
            aot_function(lambda y: y[rank], lambda graph, _: graph)(x)
        with pytest.raises(NotTraceable, match=r"^make_fx: a graph for all ranks: RankInts\(0, 1, 2, 3\) at"):
            make_fx(lambda y: y[rank])(x)

        class Item(nn.Module):
            def forward(self, y):
                return y[rank]

        with pytest.raises(NotTraceable, match=r"^torch.export: a graph for all ranks: RankInts\(0, 1, 2, 3\) at"):
            torch.export.export(Item(), (x,))


def test_a_branch_in_a_graph_is_refused_by_name():
    with LocalTensorMode(RANKS):
        x, rank = inputs(), dist.get_rank()
        said = r"RankBools\(True, False, False, False\) at .*: a graph has one control flow .* Choose by torch.where"
        with pytest.raises(NotTraceable, match=said):
            aot_function(lambda y: branching(y, rank), lambda graph, _: graph)(x)


def test_a_function_of_each_rank_in_a_graph_is_refused_by_name():
    with LocalTensorMode(RANKS), pytest.raises(NotTraceable, match=r"AOTAutograd: .* rank_map or tensor_map at"):
        aot_function(lambda y: y + rank_map(torch.tensor), lambda graph, _: graph)(inputs())


def test_gradients_reach_a_weight_from_outside_and_one_result_is_waited_for():
    with LocalTensorMode(RANKS):
        rank, total = dist.get_rank(), functional.all_reduce(torch.arange(4.0), "sum", dist.group.WORLD)
        weight = nn.Parameter(torch.ones(4, 2))
        (weight[rank] * total[rank]).sum().backward()
    assert [weight.grad.on(each).tolist() for each in range(RANKS)] == [
        [[4.0 * row] * 2 if row == each else [0.0] * 2 for row in range(4)] for each in range(RANKS)
    ]


def test_an_int_that_is_one_for_all_is_torchs_own_business():
    with LocalTensorMode(RANKS):
        pass
    symbol = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
    assert not hasattr(symbol, "__torch_function__") and format(symbol) == str(symbol)
    with pytest.raises(TypeError, match="unsupported format string"):
        format(symbol, "03d")
    with pytest.raises(TypeError, match="divmod"):
        divmod(symbol, 2)


# -- isinstance


@functools.singledispatch
def kind_of(value):
    return "object"


@kind_of.register
def _(value: int):
    return "int"


def kinds():
    rank, size = dist.get_rank(), here(lambda rank: torch.ones(rank + 2)).shape[0]
    match rank:
        case int():
            matched = "int"
        case _:
            matched = "else"
    numbers_of_ranks = (rank, rank + 1, size, -size)
    return [
        [isinstance(one, kind) for one in numbers_of_ranks for kind in (int, float, bool, (str, int), numbers.Integral)],
        [isinstance(rank == 1, kind) for kind in (bool, int, float)],
        matched, kind_of(rank), rank.__class__ is int,
    ]  # fmt: skip


def test_an_int_of_each_rank_is_an_int_to_a_program_and_a_symint_to_torch():
    check_both_ways(kinds)
    with LocalTensorMode(4):
        rank, flag = dist.get_rank(), dist.get_rank() == 1
        assert isinstance(rank, torch.SymInt) and isinstance(flag, torch.SymBool) and type(rank) is not int
        assert torch.sym_max(rank, 2).node.values.tolist() == [2, 2, 2, 3]  # torch's own functions ask, too
        assert not is_nested_int(rank)
        for back in (pickle.loads(pickle.dumps(rank)), copy.copy(rank), copy.deepcopy([rank])[0]):
            assert back.node.values.tolist() == [0, 1, 2, 3] and isinstance(back, int)


def test_a_symint_of_torch_is_what_it_was():
    symbol = ShapeEnv().create_unbacked_symint()
    assert not isinstance(symbol, int) and type(symbol) is torch.SymInt and symbol.__class__ is torch.SymInt
