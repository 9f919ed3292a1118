"""Ops on whole stacks and their ways around: each is what a rank alone would get, and is done as cheaply as it says."""

from functools import partial

import pytest
import torch

from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.dispatch import execute
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from tests.localtensor.lockstep.lockstep_reference import check_op

aten = torch.ops.aten
RANKS = 4


@pytest.fixture(autouse=True)
def mode():
    torch.manual_seed(0)
    with LocalTensorMode(RANKS) as found:
        yield found


def own(*shape, dtype=torch.float32, seed=0):
    """Another tensor on each rank."""
    made = lambda rank: torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))  # noqa: E731
    return rank_map(lambda rank: (made(rank) * (3 if dtype == torch.float32 else 5)).to(dtype))


def shared(*shape, seed=99):
    return rank_map(lambda rank: torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def index(*numbers):
    """Indices that differ between ranks."""
    return rank_map(lambda rank: torch.tensor([(n + rank) % 4 for n in numbers]))


@pytest.fixture
def ways(monkeypatch):
    """How cells are done: each way as often as it is taken."""
    taken = []

    def named(name):
        original = getattr(execute, name)

        def call(*args):
            done = original(*args)
            taken.extend([name] if done is not NotImplemented else [])
            return done

        return call

    for name in ("_on_stack", "_under_vmap", "row_after_row"):
        monkeypatch.setattr(execute, name, named(name))
    return taken


A, B, M = (lambda: own(3, 4)), (lambda: own(3, 4, seed=1)), (lambda: own(3, 4) > 0)
FORMS = {
    "view -1 of nothing": (aten.view.default, lambda: (own(3, 3)[:0], [-1, 3])),
    "squeeze of all": (aten.squeeze.default, lambda: (own(1, 3, 1),)),
    "expand to more dims": (aten.expand.default, lambda: (own(3, 1), [2, 3, 4])),
    "t of a vector": (aten.t.default, lambda: (own(3),)),
    "cat with one shared": (aten.cat.default, lambda: ([A(), shared(2, 4)],)),
    "stack, last": (aten.stack.default, lambda: ([A(), B()], -1)),
    "mm, second shared": (aten.mm.default, lambda: (A(), shared(4, 2))),
    "mm, first shared": (aten.mm.default, lambda: (shared(2, 3), A())),
    "addmm, bias own": (aten.addmm.default, lambda: (own(2), A(), shared(4, 2))),
    "addmm, bias matrix": (aten.addmm.default, lambda: (own(3, 2), A(), shared(4, 2))),
    "bmm": (aten.bmm.default, lambda: (own(2, 3, 4), shared(2, 4, 3))),
    "baddbmm": (aten.baddbmm.default, lambda: (shared(2, 1, 5), own(2, 3, 4), own(2, 4, 5))),
    "mv": (aten.mv.default, lambda: (A(), own(4))),
    "dot": (aten.dot.default, lambda: (own(5), shared(5))),
    "sum of all": (aten.sum.default, lambda: (A(),)),
    "mean, last": (aten.mean.dim, lambda: (A(), [-1], True)),
    "var": (aten.var.correction, lambda: (A(), [0])),
    "max of all": (aten.max.default, lambda: (A(),)),
    "any": (aten.any.default, lambda: (M(),)),
    "argmax of all": (aten.argmax.default, lambda: (A(),)),
    "argmax of a dim": (aten.argmax.default, lambda: (A(), 1, True)),
    "softmax": (aten._softmax.default, lambda: (A(), -1, False)),
    "sort": (aten.sort.default, lambda: (A(), 0, True)),
    "stable sort": (partial(aten.sort.stable, stable=True), lambda: (A(),)),
    "topk": (aten.topk.default, lambda: (A(), 2)),
    "cumsum": (aten.cumsum.default, lambda: (A(), 1)),
    "flip": (aten.flip.default, lambda: (A(), [0, -1])),
    "index_select": (aten.index_select.default, lambda: (A(), 1, torch.tensor([3, 0]))),
    "gather": (aten.gather.default, lambda: (A(), 1, index(0, 1, 2).expand(3, 3))),
    "scatter_add_": (aten.scatter_add_.default, lambda: (A(), 1, index(0, 0, 2).expand(3, 3), B())),
    "index, own by own": (aten.index.Tensor, lambda: (own(4, 3), [index(0, 3)])),
    "index, shared by own": (aten.index.Tensor, lambda: (shared(4, 3), [index(0, 3)])),
    "index, own by shared": (aten.index.Tensor, lambda: (A(), [None, torch.tensor([2, 0])])),
    "index, two": (aten.index.Tensor, lambda: (own(4, 4), [index(0, 3), index(1).expand(2, 1)])),
    "layer norm": (aten.native_layer_norm.default, lambda: (A(), [4], own(4), shared(4), 1e-5)),
    "embedding of own": (aten.embedding.default, lambda: (own(4, 3), index(1, 2))),
    "embedding of shared": (aten.embedding.default, lambda: (shared(4, 3), index(1, 2))),
    "embedding by shared": (aten.embedding.default, lambda: (own(4, 3), torch.tensor([[1], [3]]))),
    "embedding back": (aten.embedding_dense_backward.default, lambda: (own(3, 5), index(1, 1, 2), 6, 2, False)),
    "repeat": (aten.repeat.default, lambda: (A(), [2, 1, 3])),
    "pad": (aten.constant_pad_nd.default, lambda: (A(), [1, 2], 7.0)),
    "tril": (aten.tril.default, lambda: (A(), -1)),
    "foreach, broadcast": (aten._foreach_mul.List, lambda: ([A(), own(3)], [own(4, seed=2), shared(3)])),
    "foreach norm": (aten._foreach_norm.Scalar, lambda: ([A(), own()],)),
    "foreach max": (aten._foreach_max.default, lambda: ([A(), own()],)),
    "as_strided_scatter": (aten.as_strided_scatter.default, lambda: (own(8)[::2], own(2), [2], [4], 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_what_the_op_alone_is(name, ways):
    op, args = FORMS[name]
    check_op(op, *args())
    assert ways[-1] == "_on_stack" and "row_after_row" not in ways


def test_layer_norm_backward_of_own_and_shared_weights(ways):
    for weight in (own(4, seed=3), shared(4)):
        x, grad = own(2, 3, 4), own(2, 3, 4, seed=1)
        _, mean, rstd = aten.native_layer_norm(x, [4], weight, None, 1e-5)
        check_op(aten.native_layer_norm_backward.default, grad, x, [4], mean, rstd, weight, shared(4), [True] * 3)
        assert ways[-1] == "_on_stack"


# -- dtypes


@pytest.mark.parametrize(("op", "args"), [
    (aten.add.Tensor, lambda: (own(3, dtype=torch.int32), own())),
    (aten.mul.Tensor, lambda: (own(3), own(dtype=torch.float64))),
    (aten.where.self, lambda: (own(3) > 0, own(), own(3, dtype=torch.int64))),
    (aten.pow.Tensor_Tensor, lambda: (own(dtype=torch.int64).abs(), own(2).abs())),
    (aten._foreach_mul.Tensor, lambda: ([own(3), shared(2)], own(dtype=torch.float64))),
    (aten._foreach_add.List, lambda: ([own(3), own(2)], [own(dtype=torch.float64), own()])),
    (aten.copy_.default, lambda: (own(3, dtype=torch.int64), own(3))),
    (aten.copy_.default, lambda: (own(2, 3), own(3))),
    (aten._to_copy.default, lambda: (own(3), )),
])  # fmt: skip
def test_a_scalar_that_differs_is_a_scalar_when_dtypes_are_promoted(op, args):
    assert check_op(op, *args()) is not None


# -- memory


@pytest.mark.parametrize("given", [torch.channels_last, torch.contiguous_format, torch.preserve_format])
@pytest.mark.parametrize("laid", [torch.channels_last, torch.contiguous_format])
def test_memory_formats(given, laid):
    x = rank_map(lambda rank: torch.randn(2, 3, 4, 5).add(rank).contiguous(memory_format=laid))
    assert x.is_contiguous(memory_format=laid)
    for op in (aten.clone.default, aten._to_copy.default):
        assert check_op(op, x, memory_format=given).stride() == aten.clone(x, memory_format=given).stride()
    weight = own(6, 3, 2, 2)
    check_op(aten.convolution.default, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    check_op(aten.relu.default, x)
    check_op(aten.max_pool2d_with_indices.default, x, [2, 2])


def test_what_vmap_would_lay_out_otherwise_lies_as_it_does_alone(ways):
    x = rank_map(lambda rank: torch.randn(4, 3).add(rank).t())
    assert check_op(aten.select_scatter.default, x, own(4), 0, 1).stride() == (1, 3)
    assert "_under_vmap" in ways


def test_a_written_view_is_written_where_it_lies():
    statistics = own(8)
    check_op(
        aten.native_batch_norm.default, own(5, 4), None, None, statistics[::2], shared(8).abs()[1::2], True, 0.5, 1e-5
    )
    whole = own(3, 8)
    check_op(aten.index_put_.default, whole[:, ::2], [M()], own())
    check_op(lambda x: x[0].add_(1), whole)
    check_op(torch.Tensor.add_, x := own(3), x)


def shifted(x):
    return x[1:].copy_(x[:-1])


@pytest.mark.parametrize("act", [
    lambda: own(3, 1).expand(3, 4).add_(1),
    lambda: shifted(own(4)),
])  # fmt: skip
def test_a_write_to_memory_that_overlaps_is_refused_as_torch_refuses_it(act):
    with pytest.raises(RuntimeError, match="single memory location"):
        act()


# -- shapes that depend on values


@pytest.mark.parametrize(("op", "args"), [
    (torch.nonzero, lambda: (M(),)), (torch.masked_select, lambda: (A(), M())), (aten.index.Tensor, lambda: (A(), [M()])),
    (aten.index_put_.default, lambda: (A(), [M()], shared())), (torch.unique, lambda: (own(9, dtype=torch.int64), True, True, True)),
    (torch.bincount, lambda: (own(9, dtype=torch.int64).abs(),)),
    (torch.repeat_interleave, lambda: (own(2, dtype=torch.int64).abs(),)),
])  # fmt: skip
def test_results_of_other_shapes_on_other_ranks(op, args):
    assert check_op(op, *args()) is not None


def test_numbers_of_dims_that_differ_and_values_that_steer_are_refused_in_words():
    x = rank_map(lambda rank: torch.ones(1 + rank // 2, 3))
    with pytest.raises(NotInLockstep, match="1 or 2 dims"):
        x.squeeze(0)
    with pytest.raises(RanksDiverge):
        own().item()
    with pytest.raises(RanksDiverge):
        torch.equal(rank_map(torch.tensor), torch.tensor(2))
    assert check_op(torch.equal, shared(2), shared(2)) is True


# -- lists


def test_lists_go_on_the_stacks_and_what_is_shared_stays_shared(ways):
    params, grads = [own(3), shared(2), own(2, 2)], [own(3, seed=1), shared(2, seed=5), shared(2, 2)]
    check_op(aten._foreach_add_.List, params, grads, alpha=-0.1)
    assert [x._partition.rows for x in params] == [RANKS, 1, RANKS]
    assert ways == ["_on_stack"]
    check_op(aten._foreach_mul.ScalarList, params, [2.0, 3.0, 4.0])
    check_op(aten._foreach_addcdiv_.Scalar, params, grads, [x.abs() + 1 for x in grads], 0.5)


def test_a_fused_step_on_stacks_and_one_whose_steps_differ(ways):
    def step(steps):
        lists = [[own(3, seed=k).abs(), shared(2, seed=k).abs()] for k in range(4)]
        ways.clear()
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        check_op(aten._fused_adamw_.default, *lists, [], steps, **options, amsgrad=False, maximize=False)
        return [x._partition.rows for x in lists[0]]

    assert step([torch.tensor(3.0), torch.tensor(3.0)]) == [RANKS, 1] and ways == ["_on_stack"]
    assert step([rank_map(lambda rank: torch.tensor(rank + 1.0)), torch.tensor(2.0)]) == [RANKS, 1]
    assert ways == ["row_after_row"]


def test_an_error_in_a_list_leaves_as_it_is_what_was_done_before():
    first, second = own(3), own(2)
    with pytest.raises(RuntimeError, match="must match"):
        aten._foreach_add_.List([first, second], [shared(3), own(5)])


def test_a_gradient_scale_finds_what_is_not_finite():
    grads = [rank_map(lambda rank: torch.tensor([1.0, float("inf") if rank == 2 else 2.0])), shared(2)]
    found = rank_map(lambda rank: torch.zeros(1))
    check_op(aten._amp_foreach_non_finite_check_and_unscale_.default, grads, found, torch.full((1,), 2.0))
    assert (
        [found.on(rank).item() for rank in range(RANKS)] == [0, 0, 1, 0]
        if not isinstance(found.on(0), type(found))
        else found is not None
    )


# -- out=


def test_out_is_written_resized_and_cast_as_alone(ways):
    check_op(aten.add.out, own(3), shared(3), out=own(3, seed=2))
    assert "row_after_row" not in ways
    check_op(aten.add.out, own(3), shared(3), out=torch.empty(0))
    check_op(aten.topk.values, own(5), 2, values=own(2), indices=own(2, dtype=torch.int64))
    check_op(aten.add.out, own(3, dtype=torch.int64), 1, out=own(3))
    whole = own(6)
    check_op(aten.mul.out, own(3), 2, out=whole[::2])
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type Long"):
        aten.add.out(own(3), 1, out=own(3, dtype=torch.int64))


# -- other kinds of tensors


def test_complex_conjugate_and_negative_views():
    x = rank_map(lambda rank: torch.randn(3, 2, dtype=torch.complex64) + rank)
    for op, args in [
        (aten.mul.Tensor, (x.conj(), x)),
        (aten.mm.default, (x.conj().t(), x)),
        (torch.imag, (x.conj(),)),
        (aten.view_as_real.default, (x,)),
    ]:
        check_op(op, *args)
    check_op(lambda x: x.conj().imag.add_(1), x)


def test_meta_and_sparse_tensors():
    x = rank_map(lambda rank: torch.empty(3, 4, device="meta"))
    assert check_op(aten.mm.default, x, x.t()).shape == (3, 3)
    sparse = rank_map(lambda rank: (torch.eye(3) * (rank + 1)).to_sparse())
    check_op(torch.sparse.mm, sparse, own(3, 2))
    check_op(aten.mul.Tensor, sparse, 2.0)
    check_op(torch.Tensor.to_sparse, own(3, 3))


# -- random ops


@pytest.mark.parametrize(("op", "args"), [
    (aten.native_dropout.default, lambda: (own(50), 0.5, True)), (aten.native_dropout.default, lambda: (shared(50), 0.5, True)),
    (torch.rand, lambda: (3,)), (aten.normal_.default, lambda: (own(3),)), (torch.bernoulli, lambda: (own(9).sigmoid(),)),
    (torch.randperm, lambda: (5,)), (torch.multinomial, lambda: (own(5).abs(), 2)), (torch.rand_like, lambda: (own(3),)),
    (aten.uniform_.default, lambda: (own(2, 6)[:, ::2], -1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("alike", [True, False])
def test_draws_are_those_of_each_ranks_stream(mode, op, args, alike):
    if not alike:
        torch.manual_seed(mode.rank())
    first = check_op(op, *args())
    assert first is not None and check_op(op, *args()) is not None  # the streams have moved on alike


# -- composite ops


@pytest.mark.parametrize("inference", [True, False])
def test_layers(inference):
    with torch.inference_mode(inference):
        functional = torch.nn.functional
        check_op(functional.linear, own(2, 3), shared(4, 3), own(4))
        check_op(functional.scaled_dot_product_attention, own(2, 2, 3, 4), own(2, 2, 3, 4, seed=1), shared(2, 2, 3, 4))
        check_op(functional.cross_entropy, own(4, 4), index(0, 1, 2, 3))
        check_op(torch.chunk, own(5, 2), 2)
        check_op(torch.tensor_split, own(5, 2), 2)


def test_ints_of_each_rank_as_arguments(mode):
    check_op(torch.narrow, own(6, 2), 0, mode.rank(), 2)
    check_op(torch.arange, mode.rank())
    check_op(torch.sum, rank_map(lambda rank: torch.randn(rank // 2 + 1, 2)), 0)
    check_op(torch.cat, [rank_map(lambda rank: torch.ones(rank // 2 + 1, 2)), own(3, 2)])


def test_an_index_out_of_range_is_reported():
    with pytest.raises(IndexError, match="index out of range in self"):
        aten.embedding(own(4, 3), rank_map(lambda rank: torch.tensor([rank, 4])))
    with pytest.raises(IndexError, match="index out of range"):
        aten.embedding(own(4, 3), rank_map(lambda rank: torch.tensor([rank, 7])))
