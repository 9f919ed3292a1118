import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.collectives.c10d_table import COLLECTIVE_OPS, RECV, RECV_FROM_ANY, SEND
from localtensor.errors import NotServed, RankRaised


def ops_with_a_group():
    names = [full.removeprefix("c10d::") for full in torch._C._dispatch_get_all_op_names() if full.startswith("c10d::")]
    schemas = {name: getattr(torch.ops.c10d, name).default._schema for name in names}
    return {name for name, schema in schemas.items() if "process_group" in {a.name for a in schema.arguments}}


def test_every_op_of_c10d_is_served():
    later = {"gather_into_tensor_"}  # since 2.14: gloo has none, so there is no oracle to go by; refused by its name
    assert ops_with_a_group() - later == {*COLLECTIVE_OPS, SEND, RECV, RECV_FROM_ANY}


def test_an_op_that_is_not_served_is_refused_by_its_name(monkeypatch):
    monkeypatch.delitem(COLLECTIVE_OPS, "alltoall_base_")
    with pytest.raises(RankRaised) as caught:
        lt.run(lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)), ranks=2)
    assert type(caught.value.__cause__) is NotServed
    assert str(caught.value.__cause__) == (
        "c10d::alltoall_base_: on: rank threads: this call is not served there "
        "(no simulated collective of this name exists). "
        "Use another call, or run the program on real processes, with on='gloo', if gloo has this one."
    )


def test_the_factor_of_a_premultiplied_sum_reaches_the_sum():
    def program():
        x, y = torch.ones(2), torch.ones(1)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        dist.reduce_scatter_tensor(y, torch.ones(2), dist._make_nccl_premul_sum(2.0))
        return x.tolist(), y.tolist()

    assert lt.run(program, ranks=2).values == (([1.0, 1.0], [4.0]),) * 2


@pytest.mark.filterwarnings("ignore:(?s).*previously registered kernel:UserWarning")  # torch says so once a process
def test_a_kernel_that_somebody_else_has_put_at_an_op_stands_aside_while_ranks_run():
    theirs, asked = torch.library.Library("c10d", "IMPL"), []
    try:
        theirs.impl("barrier", lambda *given: asked.append(given), "CPU")
        assert lt.run(lambda: dist.barrier() or dist.get_rank(), ranks=2).values == (0, 1)
        assert not asked
    finally:
        theirs._destroy()
