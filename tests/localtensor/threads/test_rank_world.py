"""What torch keeps once per process: harmless among rank threads, or refused by name."""

import gc
import importlib
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import localtensor as lt
from localtensor.errors import NotServed, RankRaised
from localtensor.threads import rank_world
from localtensor.threads.rank_world import PRIVATE, world_now
from tests.tools import warm


def lacks(path):
    """The first part of a dotted path that is not there, or None."""
    module, _, name = path.rpartition(".")
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, head = module.rpartition(".")
            name = f"{head}.{name}"
    for part in name.split("."):
        if not hasattr(found, part):
            return f"{path}: this torch ({torch.__version__}) has no {part} there"
        found = getattr(found, part)
    return None


@pytest.mark.parametrize("path", PRIVATE)
def test_each_private_part_of_torch_is_there(path):
    assert lacks(path) is None, PRIVATE[path]


def test_a_private_part_that_is_gone_is_named():
    said = lacks("torch.distributed.distributed_c10d._World.planted.deeper")
    assert said == (
        f"torch.distributed.distributed_c10d._World.planted.deeper: this torch ({torch.__version__}) has no planted there"
    )


# -- ranks do not see each other


@pytest.mark.ranks(3, schedule="shuffled:1")
def test_each_rank_has_a_world_of_its_own(rank):
    world, everybody = c10d._world, [None] * 3
    dist.all_gather_object(everybody, id(world))
    assert len(set(everybody)) == 3 and c10d._world is world
    assert dist.group.WORLD.rank() == rank


@pytest.mark.ranks(2)
def test_a_thread_that_a_rank_starts_has_the_world_of_the_rank(rank):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(world_now()))
    thread.start()
    thread.join()
    assert world_now().rank == rank and seen == [world_now()]


def test_outside_of_a_run_there_is_no_world():
    assert world_now() is None and lt.run(lambda: world_now().rank, ranks=2).values == (0, 1)


WAYS = [[Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Replicate()]]


@pytest.mark.few(2)
@pytest.mark.mesh((2, 2))
@pytest.mark.ranks(schedules=4)
@pytest.mark.parametrize("seed", range(5))
def test_uneven_shards_on_a_square_of_ranks_are_right_each_way_to_each_other_and_whole_again(mesh, seed):
    rows, columns = 5 - seed % 3, 3 + seed % 4
    whole = torch.arange(rows * columns, dtype=torch.float64).reshape(rows, columns)
    for source, target in product(WAYS, WAYS):
        there = distribute_tensor(whole, mesh, source).redistribute(mesh, target)
        assert torch.equal(there.full_tensor(), whole), (source, target)
    partial = distribute_tensor(whole, mesh, WAYS[0]).sum() - whole.sum()
    assert partial.redistribute(mesh, [Replicate()] * 2).to_local() == 0


def test_meshes_of_different_ranks_and_of_different_runs_are_not_equal():
    def program():
        return init_device_mesh("cpu", (2,))

    first, second = lt.run(program, ranks=2), lt.run(program, ranks=2)
    meshes = [*first, *second]
    assert [[a == b for b in meshes] for a in meshes] == [[i == j for j in range(4)] for i in range(4)]
    assert len({hash(mesh) for mesh in meshes}) == 4


def test_no_cache_of_torchs_keeps_a_mesh_of_a_run_that_is_over():
    meshes = []

    def program():
        mesh = init_device_mesh("cpu", (2, 2))
        spread = distribute_tensor(torch.ones(5, 3), mesh, WAYS[0])
        (spread.redistribute(mesh, WAYS[1]) + 1).full_tensor()
        meshes.append(weakref.ref(mesh))

    lt.run(program, ranks=4)
    gc.collect()
    assert [mesh() for mesh in meshes] == [None] * 4


def compiled_rank():
    return torch.compile(lambda x: x + dist.get_rank(), backend="eager")(torch.zeros(1)).item()


@pytest.mark.ranks(3)
def test_a_compiled_function_sees_the_rank_that_calls_it(rank):
    assert compiled_rank() == rank


def test_a_function_that_was_compiled_before_the_run_runs_eagerly_in_it():
    compilers = []

    def backend(graph, inputs):
        compilers.append(dist.is_initialized())
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    assert lt.run(lambda: compiled(torch.zeros(1)).item(), ranks=2).values == (1.0, 1.0) and compilers == []
    assert compiled(torch.zeros(1)).item() == 1.0 and compilers == [False]


COMPILES = """
import torch
import torch._dynamo
import torch.distributed as dist
dist.init_process_group("gloo")
made = []
def backend(graph, inputs):
    made.append(graph)
    return graph.forward
for _ in range(2):
    assert torch.compile(lambda x: x + 1, fullgraph=True, backend=backend)(torch.zeros(1)).item() == 1.0
    dist.barrier()
raise SystemExit(len(made))
"""


@pytest.mark.slow
def test_a_compiler_that_a_rank_has_imported_itself_is_off_on_each_rank(tmp_path):
    (tmp_path / "compiles.py").write_text(COMPILES)
    command = [sys.executable, "-m", "localtensor", "run", "-n", "2", "compiles.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_run_that_compiles_nothing_does_not_import_the_compiler():
    look = "import sys, localtensor as lt; lt.run(int, ranks=2); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def test_compiling_is_as_before_after_a_run():
    compile_before = torch.compile
    lt.run(compiled_rank, ranks=2)
    assert torch.compile is compile_before
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.ranks(2, timeout=20)
def test_futures_that_are_collected_are_waited_for():
    x, y, z = torch.ones(1), torch.full((1,), 2.0), torch.full((1,), 3.0)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    futures = torch.futures.collect_all([work.get_future() for work in works]).wait()
    assert [future.value()[0].item() for future in futures] == [2.0, 4.0]
    assert torch.futures.wait_all([dist.all_reduce(z, async_op=True).get_future()])[0][0].item() == 6.0


def averaged(state, bucket):
    return future_of(bucket).then(lambda done: done.value()[0] / 2)


def future_of(bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def gradient_with(hook):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model.register_comm_hook(None, hook)
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return model.module.weight.grad.tolist()


@pytest.mark.ranks(2, timeout=20)
def test_the_future_of_a_communication_hook_is_waited_for():
    assert gradient_with(averaged) == [[1.5, 1.5]]


@pytest.mark.ranks(2, timeout=20)
def test_the_future_of_a_collective_is_no_answer_of_a_communication_hook():
    """Torch wants a tensor and finds a list, on gloo as well."""
    with pytest.raises(RuntimeError) as caught:
        gradient_with(lambda state, bucket: future_of(bucket))
    assert type(caught.value) is RuntimeError


@pytest.mark.ranks(2)
def test_one_rank_may_profile(rank):
    with profiler.profile() if rank == 1 else nullcontext() as profile:
        dist.all_reduce(torch.ones(2))
    assert rank == 0 or len(profile.function_events) > 0


def calls_in_a_profile(made):
    """What a profile shows of calls to torch.distributed: name, shapes, whether another thread makes it."""
    return [(e.name, e.input_shapes, e.is_async) for e in made if e.name.startswith(("gloo:", "c10d:"))]


def everybody_profiles():
    rank, x = dist.get_rank(), torch.ones(2)
    halves = [torch.zeros(1), torch.zeros(1)]
    with profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2, 2), 0, async_op=True).wait()
        dist.all_gather([torch.zeros(2), torch.zeros(2)], x)
        dist.all_gather_into_tensor(torch.zeros(4), x)
        dist.reduce_scatter_tensor(torch.zeros(1), x)
        dist.reduce_scatter(torch.zeros(1), halves)
        dist.reduce(x, 0)
        dist.all_to_all_single(torch.zeros(2), x)
        dist.gather(x[:1], halves if rank == 0 else None)
        dist.scatter(x[:1], halves if rank == 0 else None)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        dist.send(x, 1) if rank == 0 else dist.recv(x)
        dist.barrier()
        (torch.sin if rank else torch.cos)(x)
    own = [e.name for e in profile.function_events if e.name in ("aten::sin", "aten::cos")]
    return calls_in_a_profile(profile.function_events), own


def test_every_rank_has_its_own_profile_with_the_events_of_gloo():
    want = lt.run(everybody_profiles, ranks=2, on="gloo").values
    assert len(want[0][0]) > 20
    assert [own for _, own in want] == [["aten::cos"], ["aten::sin"]]
    for seed in range(3):
        assert lt.run(everybody_profiles, ranks=2, schedule=lt.shuffled(seed)).values == want


@pytest.mark.ranks(3)
def test_a_scheduled_profile_of_every_rank_is_written_and_summed(rank, tmp_path):
    ready, file = [], tmp_path / f"{rank}.json"
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=ready.append) as profile:
        for _ in range(8):
            dist.all_reduce(torch.ones(2))
            profile.step()
    assert ready == [profile, profile]
    profile.export_chrome_trace(str(file))
    assert "c10d::allreduce_" in file.read_text()
    [reduced] = [each for each in profile.key_averages() if each.key == "c10d::allreduce_"]
    assert reduced.count == 2 and "c10d::allreduce_" in profile.key_averages().table()


def test_what_the_profile_of_a_second_rank_has_not_is_refused_by_name():
    def program():
        with profiler.profile() as profile:
            dist.barrier()
        return profile.kineto_results.experimental_event_tree() and None

    with pytest.raises(RankRaised) as refused:
        lt.run(program, ranks=2)
    assert isinstance(refused.value.__cause__, NotServed)
    assert str(refused.value.__cause__) == (
        "torch.profiler: experimental_event_tree: on: rank threads: this call is not served there (another rank profiles, "
        "and torch has one tracer per process: let one rank profile, or ask for its events). Run the program on real "
        "processes, with on='gloo'."
    )


def test_the_profiler_is_as_before_after_a_run():
    before = profiler.profile._start_trace, profiler.profile.__exit__, torch.futures.collect_all
    lt.run(dist.get_rank, ranks=1)
    assert (profiler.profile._start_trace, profiler.profile.__exit__, torch.futures.collect_all) == before


FAKES = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import localtensor as lt

def fake():
    with FakeTensorMode():
        return tuple(torch.ones(2, 3).shape)

assert lt.run(fake, ranks=2).values == ((2, 3), (2, 3))
for _ in range(5):  # what was theirs is somebody else's now
    thread = threading.Thread(target=torch.randn, args=(100,))
    thread.start()
    thread.join()
print(fake())
"""


def test_fake_tensors_outlive_the_ranks_that_made_the_first():
    """Of a process of its own: torch 2.11 with CUDA and without a GPU died here."""
    done = warm.run([sys.executable, "-c", FAKES], timeout=240)
    assert (done.returncode, done.stdout) == (0, "(2, 3)\n"), done.stderr


ENDS = """
import torch
import localtensor as lt
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

def program():
    mesh = DeviceMesh("cpu", [0, 2])
    x = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
    return tuple((x + 1).shape)

for _ in range(3):
    assert lt.run(program, ranks=6).values == ((5, 3),) * 6
"""


def test_a_rank_that_ends_does_not_hold_up_the_first_op_of_the_next():
    """In a process of its own: with torch 2.11 it stood still for ever, and no timer of Python could run."""
    done = warm.run([sys.executable, "-c", ENDS], timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks(2)
def test_a_rank_that_is_over_keeps_none_of_dtensors_answers():
    x = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    asked = torch._C._get_DTensor_sharding_propagator_cache_stats
    torch._C._clear_DTensor_sharding_propagator_cache()
    assert (x + 1, asked(), x + 2, asked())[1::2] == ((0, 1), (1, 1))
    rank_world.clear_sharding_cache()
    assert (x + 1, asked())[1] == (0, 1)


def test_torch_still_has_the_private_parts_that_are_touched():
    from torch._dynamo import eval_frame

    assert set(rank_world.PROCESS_GLOBALS_PRIVATE) == {
        "torch.autograd.profiler.profile._prepare_trace",
        "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
        "torch.autograd._enable_profiler_legacy",
        "torch.autograd._disable_profiler_legacy",
        "torch.autograd.profiler_legacy._parse_legacy_records",
        "torch.autograd.profiler_util.EventList._build_tree",
        "torch._C._profiler._RecordFunctionFast",
        "torch.autograd.profiler.profile._start_trace",
        "torch._dynamo.eval_frame._stance",
        "torch.distributed._register_comm_hook",
        "torch._C._ensureCUDADeviceGuardSet",
        "torch._C._clear_DTensor_sharding_propagator_cache",
    }
    assert hasattr(profiler.profile, "_prepare_trace") and hasattr(profiler.profile, "_start_trace")
    assert hasattr(torch.autograd, "_enable_profiler_legacy") and hasattr(torch.autograd, "_disable_profiler_legacy")
    assert hasattr(torch.autograd.profiler_legacy, "_parse_legacy_records")
    assert hasattr(torch.autograd.profiler_util.EventList, "_build_tree")
    assert hasattr(torch._C._profiler, "_RecordFunctionFast")
    assert hasattr(eval_frame, "_stance")
    assert hasattr(torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data")
    assert hasattr(dist, "_register_comm_hook")
    assert hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache")
    assert hasattr(torch._C, "_ensureCUDADeviceGuardSet") or not torch.__version__.startswith("2.11.")


def logged_by_ddp():
    dist.init_process_group("gloo")
    data = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))._get_ddp_logging_data()
    return data["backend_name"], data["gloo_num_threads"]


def test_what_ddp_logs_names_the_backend_as_on_gloo():
    assert lt.run(logged_by_ddp, ranks=2, leftovers="ignore").values == (("gloo", 2),) * 2
    assert lt.run(logged_by_ddp, ranks=2, on="gloo", leftovers="ignore").values == (("gloo", 2),) * 2
