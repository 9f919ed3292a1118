"""Each collective on an example small enough to check by eye, and what none of them takes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import localtensor.collectives.reference as c
from localtensor import errors


def t(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def plain(value: object) -> object:
    """Tensors as nested lists of numbers, to compare and to read."""
    return value.tolist() if isinstance(value, Tensor) else [plain(item) for item in value]


A, B = t(1, 2), t(3, 5)


def test_all_reduce_gives_every_rank_the_total():
    assert plain(c.all_reduce([A, B])) == [[4, 7], [4, 7]]


def test_reduce_gives_the_root_the_total_and_leaves_the_others_what_they_brought():
    assert plain(c.reduce([A, B], "max", root=1)) == [[1, 2], [3, 5]]
    assert plain(c.reduce([A, B], root=0)) == [[4, 7], [3, 5]]


def test_broadcast_gives_every_rank_the_roots_tensor():
    assert plain(c.broadcast([A, B], root=1)) == [[3, 5], [3, 5]]


def test_all_gather_gives_every_rank_the_list():
    assert plain(c.all_gather([A, B])) == [[[1, 2], [3, 5]], [[1, 2], [3, 5]]]


def test_all_gather_into_tensor_joins_along_the_dim():
    held = [A.reshape(1, 2), B.reshape(1, 2)]
    assert plain(c.all_gather_into_tensor(held)) == [[[1, 2], [3, 5]]] * 2
    assert plain(c.all_gather_into_tensor(held, 1)) == [[[1, 2, 3, 5]]] * 2


def test_gather_gives_the_root_alone_the_list():
    assert plain(c.gather([A, B], root=1)) == [[], [[1, 2], [3, 5]]]


def test_scatter_deals_the_roots_list():
    assert plain(c.scatter([[], [A, B]], root=1)) == [[1, 2], [3, 5]]


def test_reduce_scatter_folds_uneven_pieces():
    assert plain(c.reduce_scatter([[A, t(1)], [B, t(2)]], "product")) == [[3, 10], [2]]


def test_reduce_scatter_tensor_cuts_the_total_along_the_dim():
    held = [torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)]
    assert plain(c.reduce_scatter_tensor(held)) == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    assert plain(c.reduce_scatter_tensor(held, dim=1)) == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]


def test_all_to_all_turns_rows_into_columns_of_any_shapes():
    lists = [[t(0), t(0, 1)], [t(1, 0, 0), t()]]
    assert plain(c.all_to_all(lists)) == [[[0], [1, 0, 0]], [[0, 1], []]]


def test_all_to_all_single_deals_equal_rows_unless_told_otherwise():
    held = [t(0, 1, 2, 3), t(10, 11, 12, 13)]
    assert plain(c.all_to_all_single(held)) == [[0, 1, 10, 11], [2, 3, 12, 13]]
    uneven = c.all_to_all_single(held, input_splits=[[1, 3], [0, 4]], output_splits=[[1, 0], [3, 4]])
    assert plain(uneven) == [[0], [1, 2, 3, 10, 11, 12, 13]]


def test_all_to_all_single_takes_none_for_a_single_rank_or_for_one_side():
    held = [t(0, 1, 2, 3), t(10, 11)]
    got = c.all_to_all_single(held, input_splits=[None, [0, 2]], output_splits=[[2, 0], None])
    assert plain(got) == [[0, 1], [2, 3, 10, 11]]
    assert plain(c.all_to_all_single(held, output_splits=[[2, 1], [2, 1]])) == [[0, 1, 10], [2, 3, 11]]
    assert plain(c.all_to_all_single(held[:1] * 2, input_splits=[[1, 3]] * 2)) == [[0, 0], [1, 2, 3, 1, 2, 3]]


def test_shard_dim_alltoall_turns_row_shards_into_column_shards():
    whole = torch.arange(8.0).reshape(2, 4)
    rows, columns = [whole[:1], whole[1:]], [whole[:, :2], whole[:, 2:]]
    assert plain(c.shard_dim_alltoall(rows, gather_dim=0, shard_dim=1)) == plain(columns)
    assert plain(c.shard_dim_alltoall(columns, gather_dim=1, shard_dim=0)) == plain(rows)


def test_permute_sends_to_destinations_not_from_sources():
    assert plain(c.permute([t(0), t(1), t(2)], [2, 0, 1])) == [[1], [2], [0]]


def test_send_recv_moves_values_as_they_were_before_the_call():
    assert plain(c.send_recv([t(0), t(1), t(2)], [(0, 1), (1, 0)])) == [[1], [0], [2]]
    assert plain(c.send_recv([t(0), t(1), t(2)], [])) == [[0], [1], [2]]


def test_send_recv_carries_any_dtype_and_asks_only_the_pair_to_agree():
    short = [t(1, dtype=torch.int16), t(2, dtype=torch.int16), t(3, 4)]
    assert plain(c.send_recv(short, [(0, 1)])) == [[1], [1], [3, 4]]


def test_coalesced_runs_a_collective_on_each_column_of_the_lists():
    got = c.coalesced([[A, t(1)], [B, t(2)]], c.all_gather_into_tensor)
    assert plain(got) == [[[1, 2, 3, 5], [1, 2]]] * 2
    assert c.coalesced([[], []], c.all_reduce) == [[], []]


def test_all_reduce_coalesced_folds_each_column():
    assert plain(c.all_reduce_coalesced([[A, t(1)], [B, t(2)]], "min")) == [[[1, 2], [1]]] * 2


def test_one_rank_is_a_group_too():
    assert plain(c.all_reduce([A], "avg")) == [[1, 2]]
    assert plain(c.reduce_scatter_tensor([A])) == [[1, 2]]
    assert plain(c.all_to_all_single([A])) == [[1, 2]]


def test_empty_tensors_and_scalars_travel():
    assert [x.shape for x in c.reduce_scatter_tensor([torch.ones(0, 3)] * 2)] == [(0, 3)] * 2
    assert [x.shape for x in c.shard_dim_alltoall([torch.ones(2, 0)] * 2, gather_dim=0, shard_dim=1)] == [(4, 0)] * 2
    assert plain(c.all_reduce([torch.tensor(1), torch.tensor(2)])) == [3, 3]


@pytest.mark.parametrize(
    "across", [torch.ones(4, 2).t(), torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)], ids=["t", "nhwc"]
)
def test_results_are_contiguous_even_if_inputs_are_not(across):
    assert not across.is_contiguous()
    held = [across, across]
    moved = c.shard_dim_alltoall(held, gather_dim=1, shard_dim=0)
    for got in (c.all_reduce(held), c.broadcast(held, 0), c.all_gather_into_tensor(held, 1), moved):
        assert all(x.is_contiguous() for x in got)


I16, I64 = t(1, 2, dtype=torch.int16), t(1, 2, dtype=torch.int64)

# What no collective takes, in a call that fits in all other ways.
EVERYWHERE: dict[str, Callable[[list[Tensor]], object]] = {
    "all_reduce": c.all_reduce,
    "reduce": lambda held: c.reduce(held, root=0),
    "broadcast": lambda held: c.broadcast(held, 0),
    "all_gather": c.all_gather,
    "all_gather_into_tensor": c.all_gather_into_tensor,
    "gather": lambda held: c.gather(held, 0),
    "scatter": lambda held: c.scatter([held, []], 0),
    "reduce_scatter": lambda held: c.reduce_scatter([[x, x] for x in held]),
    "reduce_scatter_tensor": c.reduce_scatter_tensor,
    "all_to_all": lambda held: c.all_to_all([[x, x] for x in held]),
    "all_to_all_single": c.all_to_all_single,
    "shard_dim_alltoall": lambda held: c.shard_dim_alltoall(held, gather_dim=0, shard_dim=0),
    "permute": lambda held: c.permute(held, [1, 0]),
    "send_recv": lambda held: c.send_recv(held, [(0, 1)]),
    "coalesced": lambda held: c.coalesced([[x] for x in held], c.all_reduce),
    "all_reduce_coalesced": lambda held: c.all_reduce_coalesced([[x] for x in held]),
}
FAULTS = {
    errors.DtypesDiffer: [A, I64],
    errors.DevicesDiffer: [A, A.to("meta")],
    errors.DtypeNotCarried: [I16, I16],
    errors.NotDense: [A.to_sparse(), A.to_sparse()],
    errors.ShapesDiffer: [A.reshape(2, 1), torch.ones(2, 2)],
}
FINE = {("send_recv", errors.DtypeNotCarried), ("all_to_all", errors.ShapesDiffer)}


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_collective_refuses_what_ranks_must_agree_on(name, fault):
    assert EVERYWHERE[name]([A, B])
    if (name, fault) in FINE:
        assert EVERYWHERE[name](FAULTS[fault])
        return
    with pytest.raises(fault):
        EVERYWHERE[name](FAULTS[fault])


@pytest.mark.parametrize("held", [A, []], ids=["a lone tensor", "nothing"])
@pytest.mark.parametrize("name", [name for name in vars(c) if name in EVERYWHERE])
def test_every_collective_wants_an_entry_for_each_rank(name, held):
    roots = {"reduce", "broadcast", "gather", "scatter"}
    options = {
        "shard_dim_alltoall": {"gather_dim": 0, "shard_dim": 0}, "permute": {"destinations": []},
        "send_recv": {"pairs": []}, "coalesced": {"collective": c.all_reduce},
    }.get(name, {"root": 0} if name in roots else {})  # fmt: skip
    with pytest.raises(errors.NotOnePerRank, match=f"^{name}: (held|lists): "):
        getattr(c, name)(held, **options)


def test_coalesced_lists_have_one_length():
    with pytest.raises(
        errors.ListsDiffer, match=r"^coalesced: lists: lists\[0\] has length 1, lists\[1\] has length 0: "
    ):
        c.coalesced([[A], []], c.all_reduce)


FRESH: dict[str, Callable[[list[Tensor]], list]] = {
    "all_reduce": c.all_reduce,
    "reduce": lambda held: c.reduce(held, root=len(held) - 1),
    "broadcast": lambda held: c.broadcast(held, len(held) - 1),
    "all_gather": c.all_gather,
    "all_gather_into_tensor": c.all_gather_into_tensor,
    "gather": lambda held: c.gather(held, 0),
    "scatter": lambda held: c.scatter([held, *[[]] * (len(held) - 1)], 0),
    "reduce_scatter": lambda held: c.reduce_scatter([held] * len(held)),
    "reduce_scatter_tensor": c.reduce_scatter_tensor,
    "all_to_all": lambda held: c.all_to_all([held] * len(held)),
    "all_to_all_single": c.all_to_all_single,
    "shard_dim_alltoall": lambda held: c.shard_dim_alltoall(held, gather_dim=0, shard_dim=0),
    "permute": lambda held: c.permute(held, list(range(len(held)))),
    "send_recv": lambda held: c.send_recv(held, []),
    "all_reduce_coalesced": lambda held: c.all_reduce_coalesced([held] * len(held)),
}


def tensors(value: object) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [x for item in value for x in tensors(item)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FRESH)
def test_what_comes_out_shares_memory_with_nothing(name, ranks):
    held = [t(1, 2, 3, 4) + rank for rank in range(ranks)]
    out = tensors(FRESH[name](held))
    places = [x.untyped_storage().data_ptr() for x in (*held, *out)]
    assert out and len(set(places)) == len(places) and all(x.is_contiguous() for x in out)
