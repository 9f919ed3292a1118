"""localtensor.torch_suites.libraries: ranks that define the same operators, as each process would."""

import pytest
import torch
import torch.distributed as dist

from localtensor import run
from localtensor.errors import RankRaised
from localtensor.torch_suites.libraries import PRIVATE, shared_registry


def test_each_rank_defines_an_operator_and_calls_its_own_kernel_and_none_is_left():
    def defines():
        rank = dist.get_rank()
        with torch.library._scoped_library("suites_lib", "DEF") as lib:
            lib.define("plus(Tensor x) -> Tensor")
            lib.impl("plus", lambda x: x + rank, "CompositeExplicitAutograd")
            dist.barrier()
            found = torch.ops.suites_lib.plus(torch.zeros(1)).item()
            if rank:  # the first rank leaves while the others still call
                dist.recv(torch.empty(1), rank - 1)
            again = torch.ops.suites_lib.plus(torch.zeros(1)).item()
        if rank < 2:
            dist.send(torch.ones(1), rank + 1)
        return found, again

    for _ in range(2):
        with shared_registry():
            assert run(defines, ranks=3).values == ((0, 0), (1, 1), (2, 2))
        assert not hasattr(torch.ops.suites_lib, "plus")


def test_custom_ops_are_one_operator_for_all_ranks():
    def defines():
        @torch.library.custom_op("suites_lib::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @twice.register_fake
        def _(x):
            return torch.empty_like(x)

        dist.barrier()
        return torch.ops.suites_lib.twice(torch.ones(1)).item(), id(torch.ops.suites_lib.twice.default)

    with shared_registry():
        found = run(defines, ranks=3).values
    assert len(set(found)) == 1 and found[0][0] == 2


def test_one_rank_that_defines_an_operator_twice_is_refused():
    def defines():
        lib = torch.library.Library("suites_lib", "FRAGMENT")
        lib.define("once(Tensor x) -> Tensor")
        lib.define("once(Tensor x) -> Tensor")

    with shared_registry(), pytest.raises(RankRaised, match="same name and overload name multiple times"):
        run(defines, ranks=2)


def test_the_private_parts_of_torch_are_there():
    assert all(hasattr(torch.library.Library, part.rpartition(".")[2]) for part in PRIVATE)
