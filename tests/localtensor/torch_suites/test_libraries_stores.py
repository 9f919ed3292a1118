"""localtensor.torch_suites.libraries: stores that a test makes itself do not block a rank thread."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from localtensor import run
from localtensor.torch_suites.libraries import polling_stores, step_aside

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
