"""localtensor.torch_suites.libraries: ranks that define the same operators, as each process would; stores that a test
makes itself do not block a rank thread."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from localtensor import run
from localtensor.errors import RankRaised
from localtensor.torch_suites.libraries import PRIVATE, polling_stores, shared_registry, step_aside


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


SHORT = timedelta(milliseconds=30)


@pytest.mark.parametrize("kind", ["file", "hash", "prefix"])
def test_a_rank_that_waits_for_a_key_lets_the_one_run_that_sets_it(kind, tmp_path):
    shared = dist.HashStore()

    def passes_on(rank_count):
        rank = dist.get_rank()
        store = dist.FileStore(str(tmp_path / "store"), rank_count) if kind == "file" else shared
        store = dist.PrefixStore("mine", store) if kind == "prefix" else store
        if rank < rank_count - 1:
            store.wait([f"from {rank + 1}"])
        store.set(f"from {rank}", str(rank))
        return store.get("from 0")

    with polling_stores():
        assert run(passes_on, 3, ranks=3, timeout=30).values == (b"0",) * 3


def test_a_server_is_made_before_its_clients_are_there():
    ports = []

    def meet():
        if dist.get_rank() == 0:
            store = dist.TCPStore("127.0.0.1", 0, 2, True)
            ports.append(store.port)
        while not ports:
            step_aside()
        if dist.get_rank() == 1:
            store = dist.TCPStore("127.0.0.1", ports[0], 2, False)
        store.add("count", 1)
        store.set(f"{dist.get_rank()}", "x")
        return store.multi_get(["0", "1"])

    with polling_stores():
        assert run(meet, ranks=2, timeout=30).values == ([b"x", b"x"],) * 2


def test_a_key_that_never_comes_is_refused_in_torchs_words():
    def wait():
        store = dist.HashStore()
        store.set_timeout(SHORT)
        with pytest.raises(RuntimeError, match=r"[Tt]imeout") as by_get:
            store.get("nobody")
        with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
            store.wait(["nobody"], SHORT)
        return type(by_get.value).__name__, store.timeout == SHORT

    with polling_stores():
        assert run(wait, ranks=2, timeout=30).values == run(wait, ranks=1, timeout=30).values * 2


def test_outside_of_ranks_nothing_changes():
    store = dist.HashStore()
    store.set("a", "b")
    before = dist.Store.get
    with polling_stores():
        assert dist.Store.get is not before and store.get("a") == b"b" and not step_aside()
        with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
            store.wait(["nobody"], SHORT)
    assert dist.Store.get is before
