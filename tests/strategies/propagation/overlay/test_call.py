"""One call under an overlay: what is moved, written, brought back and returned."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _utils, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _mode_utils, _python_dispatch

import localtensor as lt
from localtensor.layout.spec import parse
from strategies.ops.semantics.rule_registry import RuleRegistry, rules
from strategies.propagation.overlay.call import TwoMeshes, redistributed_piece
from strategies.propagation.overlay.call_plan import NoSizes
from strategies.propagation.overlay.context import overlay_dtensor
from tests.strategies.small_book import RIGHT, nothing

X = torch.arange(15.0).reshape(5, 3) - 7
ATEN = torch.ops.aten


@pytest.fixture
def mesh():
    with lt.LocalTensorMode(4):
        yield init_device_mesh("cpu", (2, 2))


def on(mesh, x, text):
    """A tensor laid out as the text says; the parts of a partial one are all the same."""
    placements = [parse(p) for p in text.split("/")]
    if any(isinstance(p, Partial) for p in placements):
        return DTensor.from_local(x.clone(), mesh, placements, run_check=False)
    return distribute_tensor(x, mesh, placements)


def whole(x):
    full = x.full_tensor()
    return full.reconcile() if isinstance(full, lt.LocalTensor) else full


def test_every_part_of_torch_that_is_used_is_there():
    dispatcher = DTensor._op_dispatcher
    for name in ("_try_replicate_spec_for_scalar_tensor", "_dispatch_get_local_results_slow_path", "_random_ops"):
        assert hasattr(dispatcher, name)
    assert callable(_utils.compute_local_shape_and_global_offset)
    assert callable(_utils.ExplicitRedistributionContext.observe_redistribution)
    assert callable(_mode_utils.no_dispatch) and callable(_python_dispatch.return_and_correct_aliasing)


def test_a_shift_is_not_in_place_whatever_its_name(mesh):
    with overlay_dtensor(RIGHT):
        x = on(mesh, torch.arange(6), "S(0)/R")
        y = x << 1
    assert y is not x and torch.equal(whole(y), torch.arange(6) << 1) and torch.equal(whole(x), torch.arange(6))


def test_what_is_written_in_place_stays_where_it_lies(mesh):
    with overlay_dtensor(RIGHT):
        x, y = on(mesh, X, "S(0)/S(1)"), on(mesh, X, "R/R")
        assert x.mul_(y) is x
    assert x.placements == (Shard(0), Shard(1)) and torch.equal(whole(x), X * X)


@pytest.mark.parametrize("text", ["P(sum)/R", "P(product)/P(product)", "P(max)/S(0)"])
def test_what_no_line_leaves_where_it_lies_is_brought_back_to_it(mesh, text):
    with overlay_dtensor(RIGHT):
        x = on(mesh, X, text)
        local = x.to_local()
        assert x.fill_(3.0) is x
    assert x.placements == tuple(parse(p) for p in text.split("/"))
    assert torch.equal(whole(x), torch.full(x.shape, 3.0))
    assert x.to_local() is not None and local.shape == x.to_local().shape


@pytest.mark.parametrize("text", ["R/R", "S(0)/R", "S(1)/S(0)", "P(sum)/R"])
@pytest.mark.parametrize("turned", [torch.Tensor.t_, lambda x: x.transpose_(1, 0), lambda x: x.unsqueeze_(1)])
def test_what_gets_another_shape_in_place_holds_the_same_values_in_it(mesh, turned, text):
    x = on(mesh, X, text)
    want = turned(whole(x).clone())
    with overlay_dtensor():
        assert turned(x) is x
        assert x.shape == want.shape and torch.equal(whole(x), want) and torch.equal(whole(x + x), want + want)


def test_an_out_that_is_partial_gets_the_result_as_parts(mesh):
    with overlay_dtensor(RIGHT):
        x, out = on(mesh, X, "S(0)/R"), on(mesh, torch.zeros(5, 3), "P(sum)/R")
        assert torch.cumsum(x, 0, out=out) is out
    assert out.placements == (Partial(), Replicate()) and torch.equal(whole(out), X.cumsum(0))


def test_an_out_of_the_right_shape_holds_the_result(mesh):
    with overlay_dtensor(RIGHT):
        x, out = on(mesh, X, "S(0)/R"), on(mesh, torch.zeros(5, 3), "S(1)/R")
        torch.cumsum(x, 0, out=out)
    assert out.placements == (Shard(1), Replicate()) and torch.equal(whole(out), X.cumsum(0))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_of_another_shape_becomes_the_result_its_sizes_as_well(mesh):
    with overlay_dtensor(RIGHT):
        x, out = on(mesh, X, "S(0)/R"), on(mesh, torch.zeros(2), "R/R")
        torch.mul(x, x, out=out)
    assert out.shape == (5, 3) and torch.equal(whole(out), X * X)


def test_sizes_as_arguments_are_those_of_each_ranks_piece(mesh):
    with overlay_dtensor(RIGHT):
        x = on(mesh, X, "S(0)/S(0)")
        zeros = x.new_zeros(5, 3)
    assert zeros.shape == (5, 3) and torch.equal(whole(zeros), torch.zeros(5, 3))


def test_scalars_that_differ_are_distinguished(mesh):
    x = on(mesh, X, "R/R")
    with overlay_dtensor(RIGHT):
        for dim in (0, 1, -1, 0):
            assert torch.equal(whole(x.cumsum(dim)), X.cumsum(dim))
        i = on(mesh, torch.arange(6), "S(0)/R")
        assert whole(ATEN.cumsum.default(i, 0, dtype=torch.float64)).dtype == torch.float64
        assert whole(ATEN.cumsum.default(i, 0)).dtype == torch.int64
        for alpha in (1, 2, 1.0):
            p = on(mesh, X, "P(sum)/R")
            assert torch.equal(whole(ATEN.add.Tensor(p, p, alpha=alpha)), 2 * X + alpha * 2 * X)


def test_two_meshes_in_turn_get_what_is_theirs(mesh):
    other = init_device_mesh("cpu", (4,))
    with overlay_dtensor(RIGHT):
        for _ in range(3):
            a, b = on(mesh, X, "S(0)/R").exp(), on(other, X, "S(1)").exp()
            assert a.device_mesh is mesh and a.placements == (Shard(0), Replicate())
            assert b.device_mesh is other and b.placements == (Shard(1),)
            assert torch.equal(whole(a), X.exp()) and torch.equal(whole(b), X.exp())


def test_tensors_of_two_meshes_are_refused(mesh):
    other = init_device_mesh("cpu", (4,))
    with overlay_dtensor(RIGHT), pytest.raises(TwoMeshes, match=r"they are on two meshes\. Redistribute to one"):
        _ = on(mesh, X, "S(0)/R") * on(other, X, "S(1)")


def test_a_plain_tensor_of_one_element_is_a_replica_and_a_larger_one_is_refused_in_torchs_words(mesh):
    book = RuleRegistry.of(*rules("rows", "each element by itself", ["aten.mul.Tensor"], lambda ask: (
        [ask.line({0: Shard(0)}, [Shard(0)])] if ask.tensors[0].ndim and not ask.tensors[1].ndim else []
    )))  # fmt: skip
    with overlay_dtensor(book):
        x = on(mesh, X, "S(0)/R")
        assert torch.equal(whole(ATEN.mul.Tensor(x, torch.tensor(2.0))), X * 2)
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
            ATEN.mul.Tensor(x, X)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.complex64])
@pytest.mark.parametrize("kind", ["sum", "product", "min", "max", "avg"])
def test_a_whole_value_becomes_a_partial_one_exactly_and_back(mesh, kind, dtype):
    if (kind == "avg" and dtype in (torch.bool, torch.int64)) or (kind in ("min", "max") and dtype.is_complex):
        pytest.skip("such a value means nothing")
    x = X.to(dtype) + 2j if dtype.is_complex else X.to(dtype)
    spec = DTensorSpec(mesh, (Replicate(), Replicate()), tensor_meta=TensorMeta(x.shape, x.stride(), x.dtype))
    there = (Partial(kind), Replicate())
    made = redistributed_piece(x, spec, there)
    assert made.dtype == dtype
    back = redistributed_piece(made, DTensorSpec(mesh, there, tensor_meta=spec.tensor_meta), spec.placements)
    values = back.reconcile() if isinstance(back, lt.LocalTensor) else back
    assert torch.equal(values, x)


def test_a_zero_keeps_its_sign_as_a_sum_of_parts(mesh):
    x = torch.tensor([-0.0, 0.0, -1.0])
    spec = DTensorSpec(mesh, (Replicate(), Replicate()), tensor_meta=TensorMeta(x.shape, x.stride(), x.dtype))
    parts = redistributed_piece(x, spec, (Partial("sum"), Replicate()))
    back = redistributed_piece(
        parts, DTensorSpec(mesh, (Partial("sum"), Replicate()), tensor_meta=spec.tensor_meta), spec.placements
    )
    assert whole_signs(back) == [True, False, True]


def whole_signs(x):
    return (x.reconcile() if isinstance(x, lt.LocalTensor) else x).signbit().tolist()


def test_products_of_complex_numbers_are_multiplied(mesh):
    x = torch.tensor([1 + 2j, 3 - 1j])
    book = RuleRegistry.of(*rules("none", "nothing is known", ["aten.exp.default"], nothing))
    with overlay_dtensor(book):
        p = DTensor.from_local(x, mesh, [Partial("product"), Replicate()], run_check=False)
        assert torch.allclose(whole(p.exp()), (x * x).exp())


def test_random_ops_draw_as_dtensor_has_them_draw(mesh):
    with overlay_dtensor(RIGHT):
        x = torch.rand_like(on(mesh, X, "S(0)/R"))
    assert x.placements == (Shard(0), Replicate()) and x.shape == X.shape


def test_a_rank_outside_of_the_mesh_gets_what_dtensor_gives_it():
    def program():
        mesh = init_device_mesh("cpu", (3,))
        part = mesh if dist.get_world_size() == 3 else None
        small = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
        x = distribute_tensor(X, small, [Shard(0)])
        with overlay_dtensor(RIGHT):
            y = x.exp()
        return part is not None, tuple(y.to_local().shape), y.placements

    assert lt.run(program, ranks=3).values == ((True, (3, 3), (Shard(0),)), (True, (2, 3), (Shard(0),)),
                                               (True, (0,), (Shard(0),)))  # fmt: skip


def test_symbols_as_sizes_are_refused(mesh):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    x = on(mesh, X, "S(0)/R")
    size = ShapeEnv().create_unbacked_symint()
    x._spec = DTensorSpec(mesh, x.placements, tensor_meta=TensorMeta((size, 3), (3, 1), x.dtype))
    with (
        overlay_dtensor(RIGHT),
        pytest.raises(NoSizes, match="its sizes are neither integers nor symbols with an example"),
    ):
        x.exp()


def test_an_explicit_redistribution_is_asked_for_where_the_user_wants_that(mesh):
    context = _utils.ExplicitRedistributionContext
    with overlay_dtensor(RIGHT), context(), pytest.raises(RuntimeError, match=r"aten\.cumsum\.default"):
        on(mesh, X, "S(0)/S(0)").cumsum(0)


NORMED = torch.arange(60.0).sin().reshape(3, 4, 5)


def group_norm(mesh, text):
    """Results and gradients, summed where they are parts, and how they lie."""
    replicas = "/".join(["R"] * mesh.ndim)
    given = [on(mesh, NORMED, text), on(mesh, torch.arange(4.0), replicas), on(mesh, torch.ones(4), replicas)]
    x, weight, bias = (t.requires_grad_() for t in given)
    out = ATEN.native_group_norm(x, weight, bias, 3, 4, 5, 2, 1e-5)[0]
    (out * out * out).sum().backward()
    found = [out.detach(), x.grad, weight.grad, bias.grad]
    return [t.placements for t in found], [whole(t) for t in found]


def assert_normed(found):
    x, weight, bias = (t.clone().requires_grad_() for t in (NORMED, torch.arange(4.0), torch.ones(4)))
    out = torch.nn.functional.group_norm(x, 2, weight, bias)
    (out * out * out).sum().backward()
    for value, want in zip(found, (out.detach(), x.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(value, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_is_told_how_many_rows_it_has(ranks):
    def program():
        with overlay_dtensor():
            return group_norm(init_device_mesh("cpu", (ranks,)), "S(0)")

    for placements, found in lt.run(program, ranks=ranks).values:
        assert placements == [(Shard(0),), (Shard(0),), (Partial(),), (Partial(),)]
        assert_normed(found)


def test_in_lockstep_each_rank_is_reported_its_own_number_of_rows_too(mesh):
    with overlay_dtensor():
        placements, found = group_norm(mesh, "S(0)/S(0)")
    assert placements[:2] == [(Shard(0), Shard(0))] * 2
    assert_normed(found)


SQUEEZES = {
    "all": lambda x: x.squeeze(), "one": lambda x: x.squeeze(0), "some": lambda x: x.squeeze((0, 1)),
    "in place": lambda x: x.clone().squeeze_(), "one in place": lambda x: x.clone().squeeze_(0),
    "a copy": torch.squeeze_copy,
}  # fmt: skip


@pytest.mark.parametrize("how", SQUEEZES)
def test_a_rank_with_one_row_keeps_the_dim_that_stays_of_the_whole(mesh, how):
    x = torch.arange(6.0).view(2, 1, 3)
    with overlay_dtensor():
        y = SQUEEZES[how](on(mesh, x, "S(0)/S(0)"))
    assert y.placements == (Shard(0), Shard(0)) and torch.equal(whole(y), SQUEEZES[how](x))
    assert y.to_local().ndim == y.ndim
