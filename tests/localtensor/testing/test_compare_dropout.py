"""Dropout is off, and drawn: equal streams where ranks hold the same, and in what checkpointing computes again."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import localtensor as lt
from localtensor.errors import Diverged
from localtensor.testing.compare_dropout import drawing, dropout_off

KINDS = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_each_kind_is_off_and_its_draw_is_what_it_would_keep(kind, inplace):
    x = torch.ones((2, 9, 2, 4, 5)[: {nn.Dropout1d: 3, nn.Dropout2d: 4}.get(kind, 5)])
    torch.manual_seed(3)
    kept = kind(0.5)(x) > 0
    drawn = []
    torch.manual_seed(3)
    with dropout_off(), drawing(lambda _, one: not drawn.append(one)) as draws:
        assert torch.equal(kind(0.5, inplace)(x.clone()), x)
    assert [torch.equal(one.kept, kept) for one in drawn] == [True] and not kept.all() and not draws.others


def test_the_stream_goes_on_as_it_would():
    torch.manual_seed(0)
    nn.functional.dropout(torch.ones(7))
    want = torch.rand(1)
    torch.manual_seed(0)
    with dropout_off(), drawing(lambda *_: True) as draws:
        nn.functional.dropout(torch.ones(7))
        got = torch.rand(1)
    assert torch.equal(want, got) and draws.others


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.25)

    def part(self, x):
        return self.drop(self.down(torch.tanh(self.up(x))))

    def forward(self, x):
        return x + self.part(x)


class Recomputed(Residual):
    keep = True

    def forward(self, x):
        return x + checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=self.keep)


def forgets(model, mesh):
    model.keep = False


def seeded(by_rank):
    def parallelize(model, mesh):
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        torch.manual_seed(5 + by_rank * dist.get_rank())

    return parallelize


def compare(build, parallelize, mesh):
    return lt.compare(
        build,
        parallelize,
        lambda: torch.randn(8, 8),
        mesh=mesh,
        loss=lambda y: y.square().mean(),
        optimizer=torch.optim.SGD,
    )


@pytest.mark.parametrize("build", [Residual, Recomputed])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}])
def test_equal_streams_pass(build, mesh):
    def ddp(model, mesh):
        return DistributedDataParallel(model, process_group=mesh.get_group())

    done = compare(build, seeded(0) if "tp" in mesh else ddp, mesh)
    assert done.layouts["dropout of drop, step 0"] == ("R" if "tp" in mesh else "S(0)")
    assert done.notes == ("dropout of drop is off",)


def test_data_parallel_ranks_may_draw_alike_or_otherwise_and_alike_is_noted():
    def ddp(by_rank):
        def parallelize(model, mesh):
            torch.manual_seed(5 + by_rank * dist.get_rank())
            return DistributedDataParallel(model, process_group=mesh.get_group())

        return parallelize

    assert compare(Residual, ddp(1), {"dp": 2}).notes == ("dropout of drop is off",)
    assert compare(Residual, ddp(0), {"dp": 2}).notes == ("dropout of drop is off",)  # 32 elements tell nothing


def test_ranks_that_drop_other_elements_of_the_same_have_the_wrong_seed():
    with pytest.raises(Diverged) as told:
        compare(Residual, seeded(1), {"tp": 2})
    found = told.value.comparison.divergence
    assert str(found.key) == "dropout of drop, step 0" and found.place.function == "part"
    assert found.what == (
        "replicas along tp differ: ranks 0 and 1 hold the same, and drop different elements of it: the wrong seed"
    )


def test_another_probability_is_reported():
    def halve(model, mesh):
        model.drop.p = 0.5

    with pytest.raises(Diverged, match=r"rank 0 drops with a probability of 0\.5, and one device with one of 0\.25"):
        compare(Residual, halve, {"tp": 2})


def test_what_is_computed_again_drops_the_same():
    with pytest.raises(Diverged, match="computed again in the backward pass, and drops other elements"):
        compare(Recomputed, forgets, {"tp": 2})


class Attends(nn.Module):
    """Each rank has its heads: they draw for themselves."""

    def forward(self, x):
        heads = x.unflatten(-1, (4, 2)).transpose(1, 2)
        mine = heads.chunk(dist.get_world_size(), 1)[dist.get_rank()] if dist.is_initialized() else heads
        return nn.functional.scaled_dot_product_attention(mine, mine, mine, dropout_p=0.5)


@pytest.mark.parametrize("by_rank", [0, 1])
def test_parts_draw_for_themselves_and_alike_is_noted(by_rank):
    def parallelize(model, mesh):
        torch.manual_seed(5 + by_rank * dist.get_rank())

    done = lt.compare(Attends, parallelize, lambda: torch.randn(2, 8, 8), mesh={"tp": 2})
    alike = "ranks along tp drop the same elements of different parts: they have one seed (dropout of the whole model, step 0)"
    assert done.notes == ("dropout by the function scaled_dot_product_attention is off", *([alike] * (not by_rank)))


def test_a_draw_of_a_dtensor_is_that_of_the_part():
    def parts():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh, drawn = init_device_mesh("cpu", (2,)), []
        with drawing(lambda _, one: not drawn.append(one)):
            for placement in (Shard(0), Replicate()):
                nn.functional.dropout(distribute_tensor(torch.ones(8, 16), mesh, [placement]), 0.5)
        return [one.kept for one in drawn]

    with dropout_off():
        (a, whole), (b, other) = lt.run(parts, ranks=2, leftovers="ignore").values
    assert a.shape == b.shape == (4, 16) and torch.equal(whole, other) and 0 < int(whole.sum()) < whole.numel()
