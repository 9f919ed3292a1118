import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import localtensor as lt
from localtensor.collectives.calls_seen import calls_seen
from localtensor.errors import KindMismatch

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # under both their names
ones = torch.ones


def world():
    return dist.group.WORLD


def root_only(tensors):
    return tensors if dist.get_rank() == 0 else None


def coalesced(call, *arguments):
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in arguments:
            call(*each)
    manager.wait()


def waited(tensors):
    return [tensor.wait() for tensor in tensors]


def both_ways():
    if dist.get_rank() == 0:
        dist.send(ones(2), 1)
    else:
        dist.recv(ones(2), 0)


def dtensor():
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(ones(2, 4), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)]).full_tensor()


PROGRAMS = {
    "all_reduce": lambda: dist.all_reduce(ones(2)),
    "all_reduce, later": lambda: dist.all_reduce(ones(2), async_op=True).wait(),
    "all_reduce, method": lambda: world().allreduce([ones(2)]).wait(),
    "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([ones(2), ones(3)]),
    "reduce": lambda: dist.reduce(ones(2), 0),
    "broadcast": lambda: dist.broadcast(ones(2), 0),
    "all_gather": lambda: dist.all_gather([ones(2), ones(2)], ones(2)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(4), ones(2)),
    "all_gather_coalesced": lambda: dist.all_gather_coalesced([[ones(2), ones(3)]] * 2, [ones(2), ones(3)]),
    "gather": lambda: dist.gather(ones(2), root_only([ones(2), ones(2)])),
    "scatter": lambda: dist.scatter(ones(2), root_only([ones(2), ones(2)])),
    "reduce_scatter": lambda: dist.reduce_scatter(ones(2), [ones(2), ones(2)]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(2), ones(4)),
    "all_to_all_single": lambda: dist.all_to_all_single(ones(4), ones(4)),
    "all_to_all": lambda: dist.all_to_all([ones(2), ones(2)], [ones(2), ones(2)]),
    "barrier": dist.barrier,
    "send and recv": both_ways,
    "coalesced all_reduce": lambda: coalesced(dist.all_reduce, (ones(2),), (ones(3),)),
    "coalesced all_gather": lambda: coalesced(dist.all_gather_into_tensor, (ones(4), ones(2)), (ones(2), ones(1))),
    "coalesced reduce_scatter": lambda: coalesced(dist.reduce_scatter_tensor, (ones(2), ones(4)), (ones(1), ones(2))),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1, 2], 0),
    "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
    "functional all_reduce": lambda: fc.all_reduce(ones(2), "sum", world()).wait(),
    "functional broadcast": lambda: fc.broadcast(ones(2), 0, world()).wait(),
    "functional all_gather": lambda: fc.all_gather_tensor(ones(2), 0, world()).wait(),
    "functional reduce_scatter": lambda: fc.reduce_scatter_tensor(ones(4), "sum", 0, world()).wait(),
    "functional all_to_all": lambda: fc.all_to_all_single(ones(4), None, None, world()).wait(),
    "functional permute": lambda: fc.permute_tensor(ones(4), [1, 0], world()).wait(),
    "functional all_reduces": lambda: waited(fc.all_reduce_coalesced([ones(2), ones(3)], "sum", world())),
    "functional all_gathers": lambda: waited(fc.all_gather_into_tensor_coalesced([ones(2), ones(3)], world())),
    "functional reduce_scatters": lambda: waited(
        fc.reduce_scatter_tensor_coalesced([ones(4), ones(2)], "sum", [0, 0], world())
    ),
    "shard_dim_alltoall": lambda: torch.ops._dtensor.shard_dim_alltoall(ones(4, 4), 0, 1, world().group_name),
    "DTensor": dtensor,
}


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Counts(CommDebugMode):
    @property
    def seen(self):
        return {str(op): count for op, count in self.get_comm_counts().items()}


def seen_by(mode, program):
    def run():
        with mode() as seer:
            program()
        return seer.seen

    return run


@pytest.fixture
def fake_group():
    """torch's own fake backend; this process is rank 0 of 2."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.mark.few(40)
@pytest.mark.parametrize("mode", [Ops, Functions, Counts])
@pytest.mark.parametrize("name", PROGRAMS)
def test_modes_see_what_they_see_on_a_real_backend(name, mode, fake_group):
    program = seen_by(mode, PROGRAMS[name])
    expected = program()
    found = lt.run(program, ranks=2, leftovers="ignore")[0]
    if name == "DTensor" and mode is Ops:  # what is cached does not run again
        found, expected = ([op for op in seen if "c10d" in op] for seen in (found, expected))
    assert found == expected
    assert expected or mode is Counts  # which counts neither barriers nor messages


def parts(calls):
    return [(call.rank, call.kind, call.op, call.group, call.place) for call in calls if call.rank == 0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_calls_seen_on_a_real_backend_are_those_of_rank_threads(name, fake_group):
    def program():
        PROGRAMS[name]()

    with calls_seen() as calls:
        program()
    count = len(calls)
    program()
    assert len(calls) == count > 0  # only inside the block
    assert parts(calls) == parts(lt.run(program, ranks=2, leftovers="ignore").calls)


def many_calls():
    with calls_seen() as calls:
        for _ in range(2000):
            dist.all_reduce(ones(1))
    return len(calls)


def barrier_that_another_thread_lets_end():
    """Rank 1 comes to the barrier once a thread of rank 0 has written to the store, which it does when rank 0 is there."""
    store = dist.distributed_c10d._get_default_store()
    switch = sys.getswitchinterval()
    with calls_seen() as calls:

        def write():
            while not calls:
                time.sleep(0)  # lets the other thread run
            store.set("written", "yes")

        if dist.get_rank() == 0:
            sys.setswitchinterval(1000.0)  # the other thread runs only when this one lets go of the lock by itself
            threading.Thread(target=write, daemon=True).start()
        else:
            store.wait(["written"])
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=20))
        finally:
            sys.setswitchinterval(switch)
    return [call.kind for call in calls]


def test_a_backend_is_called_without_the_lock_of_the_interpreter():
    """With it the first of these hangs: a thread of gloo waits for it that has the lock of gloo's queue."""
    assert list(lt.run(many_calls, ranks=2, on="gloo", timeout=60)) == [2000, 2000]
    kinds = lt.run(barrier_that_another_thread_lets_end, ranks=2, on="gloo")
    assert list(kinds) == [["monitored_barrier"], ["monitored_barrier"]]


def test_a_mode_can_answer_for_a_collective_itself():
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops._c10d_functional.all_reduce.default:
                return args[0] * 10
            return func(*args, **(kwargs or {}))

    def program():
        with Nothing():
            return fc.all_reduce(ones(1), "sum", world()).item()

    assert lt.run(program, ranks=2).values == (10.0, 10.0)


def test_comm_debug_mode_counts_a_redistribution():
    def program():
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(ones(2, 4), mesh, [Shard(0)])
        with CommDebugMode() as counts:
            sharded.redistribute(mesh, [Replicate()])
        return {op.__name__: count for op, count in counts.get_comm_counts().items()}

    assert lt.run(program, ranks=2).values == ({"all_gather_into_tensor": 1},) * 2


REDUCTIONS = {"SUM": 6.0, "AVG": 2.0, "PRODUCT": 6.0, "MIN": 1.0, "MAX": 3.0}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_one_two_and_three(name):
    def program():
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        return x.item()

    assert lt.run(program, ranks=3).values == (REDUCTIONS[name],) * 3


@pytest.mark.parametrize(("name", "result"), [("BAND", 0), ("BOR", 3), ("BXOR", 0)])
def test_reductions_of_the_bits_of_one_two_and_three(name, result):
    def program():
        x = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        return x.item()

    assert lt.run(program, ranks=3).values == (result,) * 3


def scattered(x):
    out = torch.zeros(2)
    dist.reduce_scatter(out, [x])
    return out


def scattered_tensors(x):
    out = [torch.zeros(2), torch.zeros(2)]
    coalesced(dist.reduce_scatter_tensor, (out[0], x), (out[1], x))
    return out[1]


ALONE = {
    "all_reduce": dist.all_reduce,
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x, x.clone()]),
    "reduce": lambda x: dist.reduce(x, 0),
    "reduce_scatter": scattered,
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, x.clone()),
    "reduce_scatter_tensor, coalesced": scattered_tensors,
}


@pytest.mark.parametrize("name", ALONE)
def test_a_rank_alone_in_its_group_reduces_to_what_it_brings(name):
    def program():
        x = torch.tensor([1.0, 2.0])
        got = ALONE[name](x)
        return (x if got is None else got).tolist()

    assert lt.run(program, ranks=1).values == ([1, 2],)


def sparse(kind):
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    count = 7 + dist.get_rank() if kind != "empty" or dist.get_rank() else 0
    at = torch.stack([torch.randint(4, (count,), generator=generator), torch.randint(3, (count,), generator=generator)])
    shape = (4, 3, 5) if kind == "hybrid" else (4, 3)
    values = torch.randn(count, *shape[2:], generator=generator)
    dtype = {"int": torch.int64, "bfloat16": torch.bfloat16, "double": torch.float64}.get(kind, torch.float32)
    return torch.sparse_coo_tensor(at, (values * 4).to(dtype), shape, check_invariants=True)  # not coalesced


def sums_of_sparse_tensors():
    held = [sparse(kind) for kind in ("float", "hybrid", "empty", "int", "bfloat16", "double")]
    for x in held:
        dist.all_reduce(x)
    held.append(sparse("float"))
    dist.all_reduce(held[-1], async_op=True).wait()
    return [(x.is_coalesced(), x._indices().tolist(), x._values().tolist(), x.shape, x.dtype) for x in held]


@pytest.mark.parametrize("ranks", [1, 3])
def test_sparse_tensors_are_reduced_as_on_gloo_to_the_last_bit(ranks):
    want = lt.run(sums_of_sparse_tensors, ranks=ranks, on="gloo").values
    assert lt.run(sums_of_sparse_tensors, ranks=ranks).values == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_gloo_does_not_reduce_of_sparse_tensors_is_refused(dtype):
    def program():
        x, op = torch.eye(3).to_sparse().to(dtype), "MAX" if dtype == torch.float32 else "SUM"
        with pytest.raises(RuntimeError, match=r"all_reduce: .*Pass x.to_dense\(\)"):
            dist.all_reduce(x, op=getattr(dist.ReduceOp, op))

    lt.run(program, ranks=2)


def test_a_sparse_tensor_does_not_meet_a_dense_one():
    def program():
        x = torch.eye(3)
        dist.all_reduce(x.to_sparse() if dist.get_rank() else x)

    with pytest.raises(KindMismatch):
        lt.run(program, ranks=2)
