"""The trace keeps the rules of the trace event format, which viewers need, and is whole after an error."""

import bisect
import json
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import localtensor as lt
from tests.tools.trace_cost import large

FIELDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"}, "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "C": {"name", "pid", "tid", "ts", "args"}, "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"}, "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}  # fmt: skip
"""What the document asks of each phase that is used here."""
OPTIONAL = {"X": {"args", "cname"}, "i": {"args"}}
KINDS = {"name": str, "cat": str, "cname": str, "s": str, "bp": str, "args": dict, "ts": float, "dur": float, "pid": int, "tid": int, "id": int}  # fmt: skip
COLOUR_NAMES = {
    "thread_state_uninterruptible", "thread_state_iowait", "thread_state_running", "thread_state_runnable",
    "thread_state_sleeping", "thread_state_unknown", "good", "bad", "terrible", "black", "grey", "white", "yellow", "olive",
    "rail_response", "rail_animation", "rail_idle", "rail_load", "startup", "generic_work",
}  # fmt: skip
"""Reserved colours of chrome://tracing, which refuses a trace with any other."""
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "process_sort_index": ("sort_index", int), "thread_sort_index": ("sort_index", int)}  # fmt: skip


def breaches(trace):
    """What a viewer would refuse, drop or show wrongly, by the document of the format and what the importers make of it."""
    found = [] if trace["displayTimeUnit"] in ("ms", "ns") and isinstance(trace["otherData"], dict) else ["the head"]
    spans, named, ends, counted = defaultdict(list), set(), defaultdict(list), {}
    for number, event in enumerate(trace["traceEvents"]):
        wrong = of_fields(event) or of_values(event)
        found += [f"{event}: {one}" for one in wrong]
        if wrong:
            continue
        phase, thread = event["ph"], (event["pid"], event["tid"])
        if phase == "X":
            begin = nanoseconds(event["ts"])
            spans[thread].append((begin, begin + nanoseconds(event["dur"]), number, event))
        elif phase == "M" and event["name"] == "thread_name":
            found += [f"thread {thread} has two names"] if thread in named else []
            named.add(thread)
        elif phase == "C" and counted.setdefault((event["pid"], event["name"]), set(event["args"])) != set(
            event["args"]
        ):
            found.append(f"{event} counts other things than the first one")
        elif phase in "sf":
            ends[event["cat"], event["name"], event["id"]].append((number, event))
    for here in spans.values():
        here.sort(key=lambda span: (span[0], span[2]))
    numbers, processes = [thread for _, thread in named], {process for process, _ in named}
    found += (
        ["a thread has the number of a process, or of another"]
        if {*numbers} & processes or len({*numbers}) < len(numbers)
        else []
    )
    found += [f"thread {thread} has no name" for thread in spans if thread not in named]
    found += [one for both in ends.values() for one in of_arrow(both, spans)]
    return found + [f"{thread}: {one}" for thread, here in spans.items() for one in overlaps(here)]


def nanoseconds(microseconds):
    """Perfetto keeps integers."""
    return round(microseconds * 1000)


def of_fields(event):
    """Fields that are missing, unknown or of another type."""
    phase = event.get("ph")
    if phase not in FIELDS:
        return ["an unknown phase"]
    needed, known = FIELDS[phase], FIELDS[phase] | OPTIONAL.get(phase, set())
    own = set(event) - {"ph"}
    found = [f"no {name}" for name in needed - own] + [f"{name} is not for {phase}" for name in own - known]
    return found + [
        f"{name} is no {KINDS[name].__name__}" for name in own & known if not isinstance(event[name], KINDS[name])
    ]


def of_values(event):
    """Values that mean nothing."""
    found = ["a negative time"] if event.get("ts", 0) < 0 or event.get("dur", 1) <= 0 else []
    found += ["an unknown colour"] if event.get("cname", "good") not in COLOUR_NAMES else []
    found += ["no scope"] if event.get("s", "g") not in "gpt" else []
    found += ["not bound to the span around it"] if event.get("bp", "e") != "e" else []
    args = event.get("args", {})
    if event.get("ph") == "C" and not (args and all(type(value) is int for value in args.values())):
        found.append("it counts no numbers")
    if event.get("ph") == "M":
        name, kind = METADATA.get(event.get("name"), ("", str))
        found += ["unknown metadata"] if not isinstance(args.get(name), kind) else []
    return found


def of_arrow(both, spans):
    """What is wrong with the ends of an arrow: the innermost span that is open there is a wait, and a call."""
    if [one["ph"] for _, one in both] != ["s", "f"]:
        return [f"{both} is no arrow"]
    found = [] if both[0][1]["ts"] <= both[1][1]["ts"] else [f"{both} goes back in time"]
    for (number, one), kind in zip(both, ("wait", "call"), strict=True):
        at = nanoseconds(one["ts"])
        here = spans[one["pid"], one["tid"]]
        begun = range(bisect.bisect_right(here, at, key=lambda span: span[0]) - 1, -1, -1)
        innermost = next((here[i] for i in begun if at < here[i][1] and here[i][2] < number), None)
        if innermost is None or innermost[3]["cat"] != kind:
            found.append(f"{one} lies in no {kind} that was written before it")
    return found


def overlaps(spans):
    """Spans of one thread that overlap by a nanosecond without one being inside of the other: Perfetto drops the later."""
    found, open_ends = [], []
    for start, end, _, event in spans:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            found.append(f"{event} ends after what it lies in")
        open_ends.append(end)
    return found


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def step(fails=False):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.rand(3, 4)).sum().backward()
        works = [dist.all_reduce(x.grad, async_op=True) for x in model.parameters()]
        for work in works:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
    if fails and dist.get_rank() == 1:
        raise ValueError("it broke")
    dist.barrier()


def test_the_trace_keeps_the_rules_of_the_format(tmp_path):
    file = tmp_path / "trace.json"
    lt.run(step, ranks=3, trace=file)
    trace = json.loads(file.read_text())
    assert breaches(trace) == []
    phases = {event["ph"] for event in trace["traceEvents"]}
    assert phases == {"X", "i", "C", "M", "s", "f"}
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["rank 0", "rank 1", "rank 2"]
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["ranks: real time of the simulation", "ranks: modelled time of a cluster"]
    call = next(e for e in trace["traceEvents"] if e.get("cat") == "call")
    assert (
        call["args"]["bytes"] == 64
        and call["args"]["tensors"] == "f32[4,4]"
        and "test_chrome.py:" in call["args"]["line"]
    )


def first(trace, phase, last=False, **fields):
    found = [
        e
        for e in trace["traceEvents"]
        if e["ph"] == phase and all(e.get(key) == value for key, value in fields.items())
    ]
    return found[-1 if last else 0]


def longer_by_a_nanosecond(trace):
    inner = first(trace, "X", cat="forward", name="two")
    outer = first(trace, "X", cat="forward", name="Model", tid=inner["tid"], pid=inner["pid"])
    inner["dur"] = (nanoseconds(outer["ts"]) + nanoseconds(outer["dur"]) + 1 - nanoseconds(inner["ts"])) / 1000


CHANGES = {
    "no duration": lambda t: first(t, "X").pop("dur"),
    "before the beginning": lambda t: first(t, "X").update(ts=-1.0),
    "a thread without a name": lambda t: first(t, "X").update(tid=99),
    "an unknown phase": lambda t: first(t, "X").update(ph="Q"),
    "a duration of a moment": lambda t: first(t, "i").update(dur=1.0),
    "a text as a time": lambda t: first(t, "X").update(ts="1.0"),
    "an unknown colour": lambda t: first(t, "X", cat="forward").update(cname="pink"),
    "a scope that is none": lambda t: first(t, "i").update(s="x"),
    "longer than what it lies in, by a nanosecond": longer_by_a_nanosecond,
    "a kind that is left out of a counter": lambda t: first(t, "C", last=True)["args"].popitem(),
    "a counter of texts": lambda t: first(t, "C")["args"].update(parameters="1"),
    "metadata without a name": lambda t: first(t, "M", name="thread_name").update(args={}),
    "an arrow without an end": lambda t: t["traceEvents"].remove(first(t, "f")),
    "an arrow that is bound to the next span": lambda t: first(t, "f").pop("bp"),
    "an arrow before the spans": lambda t: t["traceEvents"].insert(0, t["traceEvents"].pop(t["traceEvents"].index(first(t, "s")))),
    "the thread of a process": lambda t: [e.update(tid=1) for e in t["traceEvents"] if e["tid"] == 1001],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "trace.json"
    lt.run(step, ranks=2)  # the first step of an optimizer imports modules, during which gradients live on in frames
    lt.run(step, ranks=2, trace=file)
    return file.read_text()


@pytest.mark.parametrize("change", CHANGES)
def test_the_check_sees_a_broken_trace(whole, change):
    trace = json.loads(whole)
    assert breaches(trace) == []
    CHANGES[change](trace)
    assert breaches(trace) != []


def test_the_memory_of_a_rank_counts_all_its_kinds_from_the_first_event_on(whole):
    events = [e["args"] for e in json.loads(whole)["traceEvents"] if e["ph"] == "C" and e["name"] == "memory of rank 1"]
    assert {"parameters", "gradients", "activations"} <= set(events[0]) and events[0]["gradients"] == 0
    assert max(one["gradients"] for one in events) == (4 * 4 + 4) * 2 * 4


def detached():
    mesh = init_device_mesh("cpu", (2,))
    (distribute_tensor(torch.ones(4), mesh, [Shard(0)]).detach() + 1).detach()


def test_detach_is_no_event_and_the_ops_around_it_are(tmp_path):
    lt.run(detached, ranks=2, trace=tmp_path / "trace.json")
    names = [
        e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("cat") == "op"
    ]
    assert names == ["aten.add.Tensor"] * 2


def moves_and_waits():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows, columns = (distribute_tensor(torch.ones(64, 64), mesh, [Shard(dim)]) for dim in (0, 1))
    if dist.get_rank() == 1:
        torch.ones(1000, 1000).add_(1)
    (rows + columns).redistribute(placements=[Replicate()])


def test_redistributions_differ_in_name_and_colour_on_both_clocks_and_the_modelled_one_has_arrows(tmp_path):
    file = tmp_path / "trace.json"
    lt.run(moves_and_waits, ranks=2, trace=file)
    trace = json.loads(file.read_text())
    assert breaches(trace) == []
    for process in (1, 2):
        moved = {
            (e["name"], e["cname"])
            for e in trace["traceEvents"]
            if "redistribution" in e.get("cat", "") and e["pid"] == process
        }
        assert moved == {("implicit S(1) -> S(0)", "terrible"), ("written S(0) -> R", "rail_response")}
    ends = [e for e in trace["traceEvents"] if e["ph"] in "sf" and e["pid"] == 2]
    assert (
        len(ends) >= 2 and breaches({**trace, "traceEvents": [e for e in trace["traceEvents"] if e["pid"] == 2]}) == []
    )
    late = {
        e["args"]["for"] for e in trace["traceEvents"] if e.get("cat") == "wait" and e["pid"] == 2 and e["dur"] > 1.5
    }
    assert "rank 1" in late


def test_a_run_that_fails_leaves_a_whole_trace_with_the_error(tmp_path):
    file = tmp_path / "trace.json"
    with pytest.raises(lt.errors.RankRaised):
        lt.run(step, True, ranks=2, trace=str(file))
    trace = json.loads(file.read_text())
    assert breaches(trace) == []
    errors = [event for event in trace["traceEvents"] if event.get("cat") == "error"]
    assert [event["name"] for event in errors if event["s"] == "t"] == ["ValueError"]
    assert any("it broke" in event["args"]["message"] for event in errors if event["s"] == "t")
    assert trace["otherData"]["error"].startswith("RankRaised")
    assert [event for event in trace["traceEvents"] if event["name"] == "SGD"] != []


def deadlock():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), src=1)
    else:
        dist.recv(torch.ones(2), src=0)


def test_a_deadlock_is_in_the_trace(tmp_path):
    file = tmp_path / "trace.json"
    with pytest.raises(lt.errors.Deadlock):
        lt.run(deadlock, ranks=2, trace=file)
    trace = json.loads(file.read_text())
    waits = [event for event in trace["traceEvents"] if event.get("cat") == "wait" and event["pid"] == 1]
    assert [event["args"]["unfinished"] for event in waits] == [True, True]
    assert {(event["tid"], event["args"]["for"]) for event in waits} == {(1000, "rank 1"), (1001, "rank 0")}
    assert trace["otherData"]["error"].startswith("Deadlock")


def many(steps):
    for _ in range(steps):
        dist.barrier()


def test_an_event_takes_less_than_five_hundred_bytes(tmp_path):
    file = tmp_path / "trace.json"
    ran = lt.run(many, 12, ranks=2, trace=file)
    each = file.stat().st_size / len(ran.recording.events)
    assert len(ran.recording.events) >= 48 and each < 500


@pytest.mark.slow
def test_a_hundred_thousand_events_take_less_than_fifty_megabytes_and_keep_the_rules(tmp_path):
    found = large(tmp_path)
    assert found["events"] >= 100_000 and found["MB of the trace"] < 50
    assert breaches(json.loads((tmp_path / "trace.json").read_text())) == []
