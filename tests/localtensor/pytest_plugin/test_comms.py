"""`comms` by axis, kind and reason; `comms_snapshot`, which no schedule changes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import localtensor as lt
from localtensor.collectives.argument_checks import SPARSE_ALL_REDUCE
from localtensor.collectives.c10d_table import COLLECTIVE_OPS
from localtensor.pytest_plugin.comms import KINDS, Comms, CommsSnapshot
from tests.localtensor.pytest_plugin.test_init import refusal

pytest_plugins = ["pytester"]


def step():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(6), group=mesh.get_group("tp"))
    dist.all_reduce(torch.ones(2).double(), group=mesh.get_group("dp"))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    columns = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1), Replicate()], src_data_rank=None)
    (rows + columns).full_tensor()
    if dist.get_rank() in (0, 1):
        (dist.recv if dist.get_rank() else dist.send)(torch.ones(2), 1 - dist.get_rank())
    dist.barrier()


def comms_of(schedule="round_robin"):
    ran = lt.run(step, ranks=4, schedule=schedule)
    return Comms(lambda: ran.calls, None)


def test_bytes_by_axis_and_kind_are_those_of_a_hand_count():
    one = Comms(lambda: comms_of().calls, 2)
    assert one.bytes_by_axis_and_kind == {
        ("tp", "all_reduce"): 24, ("dp", "all_reduce"): 16, ("dp", "all_gather_into_tensor"): 2 * 32, (None, "barrier"): 0,
    }  # fmt: skip
    assert one.along("dp").kinds == ["all_reduce", "all_gather_into_tensor", "all_gather_into_tensor"]
    assert one.along("dp").of("all_reduce").bytes == 16


def test_implicit_are_the_calls_of_ops_alone():
    comms = comms_of()
    assert sorted((call.rank, call.kind) for call in comms.implicit) == [
        (rank, "all_gather_into_tensor") for rank in range(4)
    ]
    assert len(comms.of("all_gather_into_tensor")) == 8 and len(comms.implicit.along("tp")) == 0


@pytest.mark.parametrize(
    ("kind", "remedy"), [("allreduce", "Did you mean all_reduce?"), ("zzz", "Choose of all_gather, ")]
)
def test_a_kind_that_no_call_has_is_refused(kind, remedy):
    comms = comms_of()
    for ask in (comms.of, comms.count):
        with pytest.raises(lt.LocalTensorError) as caught:
            ask(kind)
        assert str(caught.value).startswith(f"comms: kind: {kind!r}: no collective has this name. {remedy}")
    assert comms.count("scatter") == comms.count("symm_mem.rendezvous") == len(comms.of("monitored_barrier")) == 0


def test_the_kinds_are_those_of_the_calls():
    assert {op.kind for op in COLLECTIVE_OPS.values()} | {SPARSE_ALL_REDUCE, "send", "recv"} == set(KINDS)


def argmax():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    return x.argmax().redistribute(placements=[Replicate()]).to_local()


def test_calls_of_dtensors_own_handlers_are_implicit():
    ran = lt.run(argmax, ranks=2)
    comms = Comms(lambda: ran.calls, 0)
    assert len(comms.implicit) == len(comms) >= 1


def test_the_text_is_the_same_under_every_schedule():
    texts = {comms_of(schedule).text() for schedule in ("round_robin", *(f"shuffled:{n}" for n in range(5)), "pct:3")}
    (text,) = texts
    all_do = [
        "  all_reduce of f32[6] along tp, op=sum, 24 bytes",
        "  all_reduce of f64[2] along dp, op=sum, 16 bytes",
        "  all_gather_into_tensor of f32[4,2] along dp, 32 bytes, implicit",
        "  all_gather_into_tensor of f32[2,4] along dp, 32 bytes",
    ]
    barrier = "  barrier in ranks 0, 1, 2, 3, 0 bytes"
    message = "of f32[2] in ranks 0, 1, 2, 3, peer={}, tag=0, 8 bytes"
    assert text.splitlines() == [
        "rank 0:", *all_do, f"  send {message.format(1)}", barrier, "rank 1:", *all_do, f"  recv {message.format(0)}", barrier,
        "ranks 2, 3:", *all_do, barrier,
    ]  # fmt: skip


TESTS = """
    @pytest.mark.ranks(2)
    def test_it(comms, comms_snapshot):
        torch.distributed.all_reduce(torch.ones({size}))
        torch.distributed.all_reduce(torch.ones({size}))
        assert comms == comms_snapshot

    def test_world(world, comms, comms_snapshot):
        world.run(torch.distributed.barrier, ranks=2)
        assert comms == comms_snapshot
"""


def test_a_snapshot_is_written_once_and_compared_from_then_on(tried, pytester):
    tried(TESTS.format(size=3)).assert_outcomes(failed=2)
    tried(TESTS.format(size=3), "--rank-snapshots", "update").assert_outcomes(passed=2)
    folder = pytester.path / "__snapshots__" / "test_it"
    assert sorted(file.name for file in folder.iterdir()) == [
        "test_it.rank0.txt",
        "test_it.rank1.txt",
        "test_world.txt",
    ]
    text = "rank 1:\n  all_reduce of f32[3] in ranks 0, 1, op=sum, 12 bytes, 2 times\n"
    assert (folder / "test_it.rank1.txt").read_text() == text
    tried(TESTS.format(size=3), "--rank-schedule", "shuffled:3").assert_outcomes(passed=2)
    result = tried(TESTS.format(size=4))
    result.assert_outcomes(passed=1, failed=1)
    assert "-  all_reduce of f32[3] in ranks 0, 1, op=sum, 12 bytes, 2 times" in result.text
    assert "+  all_reduce of f32[4] in ranks 0, 1, op=sum, 16 bytes, 2 times" in result.text


ALIKE = """
    class TestOne:
        @pytest.mark.ranks(2)
        def test_it(self, comms, comms_snapshot):
            torch.distributed.barrier()
            assert comms == comms_snapshot

    class TestTwo:
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("name", ["a/b", "a_b"])
        def test_it(self, comms, comms_snapshot, name):
            torch.distributed.all_reduce(torch.ones(1 if "/" in name else 2))
            assert comms == comms_snapshot
"""


def test_tests_of_one_name_have_their_own_snapshots_and_traces(tried, pytester):
    tried(ALIKE, "--rank-snapshots", "update", "--rank-trace", "traces").assert_outcomes(passed=3)
    tried(ALIKE).assert_outcomes(passed=3)
    files = sorted(file.name for file in (pytester.path / "__snapshots__" / "test_it").iterdir())
    assert len(files) == 6 and files[0] == "TestOne.test_it.rank0.txt" and "TestTwo.test_it[a_b].rank0.txt" in files
    traces = sorted(file.name for file in (pytester.path / "traces").iterdir())
    assert len(traces) == 3 and traces[0] == "test_it.py_TestOne_test_it.json"


def test_without_a_snapshot_the_failure_says_how_to_make_one(tried):
    assert "run the test once with --rank-snapshots update" in tried(TESTS.format(size=3)).text


def test_another_value_of_the_option_is_refused(tried):
    assert refusal(tried(TESTS.format(size=3), "--rank-snapshots", "yes")).endswith("Write update or check.")


def test_a_snapshot_equals_no_other_thing(tmp_path):
    assert CommsSnapshot(tmp_path / "test_x.py", "test_y", update=True) != 3
    assert list(tmp_path.iterdir()) == []


def test_memory_and_waits_of_a_traced_run():
    def program():
        kept = torch.ones(1000, 250)  # 1 MB
        if dist.get_rank() == 1:
            kept = torch.cat([kept, kept])
        dist.barrier()
        return kept.sum()

    ran = lt.run(program, ranks=2, trace=True)
    assert 1_000_000 <= ran.memory.peak(0) < 1_010_000 and 3_000_000 <= ran.memory.peak(1) < 3_010_000
    assert ran.memory.at_peak(1).by_kind["other"] == ran.memory.peak(1)
    assert (ran.waits[0].rank, ran.waits[0].late) == (0, 1) or ran.waits[0].late == ran.waits[0].rank
    assert any((one.rank, one.late) == (0, 1) for one in ran.waits)


@pytest.mark.parametrize("name", ["memory", "waits"])
def test_a_run_without_a_trace_has_neither(name):
    with pytest.raises(
        lt.LocalTensorError, match=f"Run: {name}: a run without a recording: it was not recorded. Pass trace=True"
    ):
        getattr(lt.run(dist.barrier, ranks=1), name)
