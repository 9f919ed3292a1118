"""Wrong calls of the Python API: an error class of ours, one message that names the call and the argument, within half a second."""

import re
import time

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import localtensor as lt
from localtensor.errors import LocalTensorError

X = torch.arange(8.0)
ADD = torch.ops.aten.add.Tensor


def nothing(*given):
    return None


def spec(placement, shape):
    return lt.Spec(lt.Mesh.of(dp=2), (lt.parse(placement),), shape, torch.float32)


def in_lockstep(call, ranks=4):
    def inside():
        with lt.LocalTensorMode(ranks):
            call(lt.rank_map(lambda rank: torch.full((4,), float(rank))))

    return inside


CALLS = {
    # runs of programs
    "run, no function": (lambda: lt.run("train.py", ranks=2), "run: fn: "),
    "run, no ranks": (lambda: lt.run(nothing, ranks=0), "run: ranks: ranks=0"),
    "run, negative ranks": (lambda: lt.run(nothing, ranks=-2), "run: ranks: "),
    "run, a text of ranks": (lambda: lt.run(nothing, ranks="4"), "run: ranks: "),
    "run, half a rank": (lambda: lt.run(nothing, ranks=2.5), "run: ranks: "),
    "run, elsewhere": (lambda: lt.run(nothing, ranks=2, on="mpi"), "run: on: "),
    "run, no schedule": (lambda: lt.run(nothing, ranks=2, schedule="best"), "run: schedule: "),
    "run, a number for a schedule": (lambda: lt.run(nothing, ranks=2, schedule=7), "run: schedule: "),
    "run, a limit of nothing": (lambda: lt.run(nothing, ranks=2, timeout=0), "run: timeout: "),
    "run, a text of a limit": (lambda: lt.run(nothing, ranks=2, timeout="soon"), "run: timeout: "),
    "run, no seed": (lambda: lt.run(nothing, ranks=2, seed="7"), "run: seed: '7': "),
    "run, a seed of many digits": (lambda: lt.run(nothing, ranks=2, seed=10**30), "run: seed: "),
    "run, ranks by the million": (lambda: lt.run(nothing, ranks=10**9), "run: ranks: "),
    "explore_ranks, no seconds": (lambda: lt.explore_ranks(nothing, ranks=2, seconds=(2,)), "seconds"),
    "run, faults of a rank that is not there": (lambda: lt.run(nothing, ranks=2, faults=lt.Faults(kill={5: 1})), "5"),
    "run, no faults": (lambda: lt.run(nothing, ranks=2, faults="kill"), "run: faults"),
    "run, faults before the first call": (lambda: lt.run(nothing, ranks=2, faults=lt.Faults(kill={0: -1})), "faults.kill"),
    # schedules
    "shuffled, no seed": (lambda: lt.shuffled("x"), "seed has to be"),
    "pct, no depth": (lambda: lt.pct(1, depth=-1), "depth has to be"),
    "replay, no text": (lambda: lt.replay(7), "schedule: 7"),
    "replay, no schedule": (lambda: lt.replay("fastest"), "schedule: 'fastest'"),
    # lockstep
    "mode, no ranks": (lambda: lt.LocalTensorMode(0), "LocalTensorMode"),
    "mode, a text": (lambda: lt.LocalTensorMode("four"), "LocalTensorMode"),
    "rank_map without a mode": (lambda: lt.rank_map(float), "rank_map"),
    "rank_map, no function": (in_lockstep(lambda x: lt.rank_map(3)), "rank_map: "),
    "rank_map, no tensor": (in_lockstep(lambda x: lt.rank_map(lambda rank: "x")), "rank_map"),
    "all_reduce without a mode": (lambda: lt.all_reduce(X, "sum"), "all_reduce"),
    "all_reduce, no op": (in_lockstep(lambda x: lt.all_reduce(x, "median")), "all_reduce: op: "),
    "all_reduce, no tensor": (in_lockstep(lambda x: lt.all_reduce("x", "sum")), "all_reduce: "),
    "broadcast, no such root": (in_lockstep(lambda x: lt.broadcast(x, 9)), "broadcast: "),
    "scatter, too few pieces": (in_lockstep(lambda x: lt.scatter([x, x], 0)), "scatter: "),
    "scatter, a number": (in_lockstep(lambda x: lt.scatter(3, 0)), "scatter: pieces: "),
    "reduce_scatter, a number": (in_lockstep(lambda x: lt.reduce_scatter(3)), "reduce_scatter: pieces: "),
    "all_to_all, a number": (in_lockstep(lambda x: lt.all_to_all(3)), "all_to_all: pieces: "),
    "scatter, no tensors": (in_lockstep(lambda x: lt.scatter([1, 2, 3, 4], 0)), "scatter: "),
    "tensor_map, no function": (in_lockstep(lambda x: lt.tensor_map(x, None)), "tensor_map: change: "),
    "reduce_scatter_tensor, uneven": (
        in_lockstep(lambda x: lt.reduce_scatter_tensor(x[:3], "sum")), "reduce_scatter_tensor: "
    ),
    "all_to_all_single, uneven": (in_lockstep(lambda x: lt.all_to_all_single(x[:3])), "all_to_all_single: "),
    "permute, not a permutation": (in_lockstep(lambda x: lt.permute(x, [0, 0, 1, 2])), "permute: "),
    "gather, a text of a root": (in_lockstep(lambda x: lt.gather(x, "first")), "gather: "),
    "reconcile, values that differ": (in_lockstep(lambda x: x.reconcile()), "reconcile"),
    "redistribute, no placements": (in_lockstep(lambda x: lt.redistribute(x, "R")), "redistribute: "),
    # layouts
    "Mesh, no size": (lambda: lt.Mesh((0,), ("dp",)), "Mesh: "),
    "split, no tensor": (lambda: lt.split("x", spec("S(0)", (4,))), "split: x: "),
    "assemble, no pieces": (lambda: lt.assemble("x", spec("S(0)", (4,))), "assemble: held: "),
    "ordered, no spec": (lambda: lt.ordered("S(0)"), "ordered: spec: "),
    "strided, no spec": (lambda: lt.strided(3), "strided: spec: "),
    "lies_alike, no spec": (lambda: lt.lies_alike(spec("R", (4,)), "R"), "lies_alike: spec: "),
    "spec_to_torch, no spec": (lambda: lt.spec_to_torch("R", None), "to_torch: spec: "),
    "spec_to_torch, no mesh": (lambda: lt.spec_to_torch(spec("R", (4,)), (2,)), "to_torch: mesh: "),
    "overlay_dtensor, a number": (lambda: lt.overlay_dtensor(only=3), "only: 3: "),
    "Mesh, a text": (lambda: lt.Mesh("two", "dp"), "Mesh: "),
    "Mesh, names too few": (lambda: lt.Mesh((2, 2), ("dp",)), "Mesh: "),
    "parse, no text": (lambda: lt.parse(7), "parse: "),
    "parse, no placement": (lambda: lt.parse("Q"), "parse: "),
    "parse, no dim": (lambda: lt.parse("S(x)"), "parse: "),
    "parse, no reduction": (lambda: lt.parse("P(median)"), "parse: "),
    "Spec, a dim too far": (lambda: spec("S(3)", (4,)), "Spec: "),
    "Spec, placements too many": (lambda: lt.Spec(lt.Mesh.of(dp=2), (Shard(0), Shard(0)), (4,), torch.float32), "Spec: "),
    "split, no spec": (lambda: lt.split(X, "S(0)"), "split: "),
    "split, another shape": (lambda: lt.split(X, spec("S(0)", (4,))), "split: "),
    "assemble, too few": (lambda: lt.assemble([X], spec("S(0)", (8,))), "assemble: "),
    "assemble, no spec": (lambda: lt.assemble([X, X], "S(0)"), "assemble: "),
    "spec_from_torch, no spec": (lambda: lt.spec_from_torch("R"), "of_torch: spec: "),
    # rules and plans
    "plan, no specs": (lambda: lt.plan("R", "S(0)"), "plan: "),
    "plan, other shapes": (
        lambda: lt.plan(spec("R", (4,)), spec("R", (8,))), "plan: "
    ),
    "assert_rule, no op": (lambda: lt.assert_rule("add", "R -> R"), "assert_rule: "),
    "assert_rule, no rule": (lambda: lt.assert_rule(ADD, "sideways"), "assert_rule: "),
    "assert_rule, no placement": (lambda: lt.assert_rule(ADD, "Q, Q -> Q"), "placement: 'Q'"),
    "assert_sharding, no op": (lambda: lt.assert_sharding(7, [Shard(0)], [Replicate()]), "assert_sharding: "),
    "validate, no settings": (lambda: lt.validate("cumprod"), "validate: "),
    "Settings, no dtype": (lambda: lt.validate(lt.Settings(("cumprod",), dtypes=("float9",))), "dtype"),
    "Settings, one rank": (lambda: lt.validate(lt.Settings(("cumprod",), ranks=(1,))), "ranks"),
    "compare, no functions": (lambda: lt.compare(1, 2, X, mesh={"tp": 2}), "compare: "),
    "compare, no mesh": (lambda: lt.compare(nothing, nothing, X, mesh=2), "compare: mesh: "),
    "compare_functions, no function": (lambda: lt.compare_functions(1, 2, (X,), mesh={"tp": 2}), "compare_functions: "),
    "overlay_dtensor, no rules": (lambda: lt.overlay_dtensor("mine").__enter__(), "overlay_dtensor: "),
    "compare, no build": (lambda: lt.compare(nothing, nothing, X, mesh={"tp": 2}), "compare: build: "),
    "compare, an empty mesh": (lambda: lt.compare(nothing, nothing, nothing, mesh={}), "compare: mesh: "),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_one_message_that_names_the_call_and_takes_no_time(name):
    call, begin = CALLS[name]
    with pytest.raises(LocalTensorError):
        call()  # what it imports at its first use is no part of the call that is timed
    before = time.process_time()
    with pytest.raises(LocalTensorError) as caught:
        call()
    seconds = time.process_time() - before
    text = str(caught.value)
    assert begin in text.partition("\n")[0], text
    assert re.search(r"[.?!)]$", text.partition("\n")[0]) and "Traceback" not in text and len(text) < 1200
    assert seconds < 0.5


def test_there_are_sixty_of_them():
    assert len(CALLS) >= 60
