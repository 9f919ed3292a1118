"""The trace keeps the rules of the trace event format, which viewers need, and is whole after an error."""

import json
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt


def breaches(trace):
    """What a viewer would not show, by the document of the format: an event without what its phase needs, and so on."""
    found = []
    spans, named, ends = defaultdict(list), set(), defaultdict(list)
    for event in trace["traceEvents"]:
        needs = {
            "X": {"ts", "dur"},
            "i": {"ts", "s"},
            "C": {"ts", "args"},
            "M": {"args"},
            "s": {"ts", "id"},
            "f": {"ts", "id"},
        }
        missing = {"name", "pid", "tid", *needs.get(event["ph"], {"a phase that is known"})} - set(event)
        found += [f"{event} has no {missing}"] if missing else []
        numbers = [event.get("ts", 0), event.get("dur", 0)]
        found += [f"{event} has a negative time"] if min(numbers) < 0 else []
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event.get("dur", 0), event))
        if event["ph"] == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]].append(event)
        if event["ph"] == "C" and not all(isinstance(value, int) for value in event["args"].values()):
            found.append(f"{event} counts no numbers")
        if event["ph"] == "i" and event["s"] not in "gpt":
            found.append(f"{event} has no scope")
    found += [f"thread {thread} has no name" for thread in spans if thread not in named]
    for both in ends.values():
        found += [] if [one["ph"] for one in both] == ["s", "f"] else [f"{both} is no arrow"]
        found += [] if both[0]["ts"] <= both[-1]["ts"] else [f"{both} goes back in time"]
        for one in both:  # an arrow is bound to the span around its end
            here = spans[one["pid"], one["tid"]]
            if not any(start - 0.002 <= one["ts"] <= end + 0.002 for start, end, _ in here):
                found.append(f"{one} lies in no span")
    return found + [f"{thread}: {one}" for thread, here in spans.items() for one in overlaps(here)]


def overlaps(spans):
    """Spans of one thread that overlap without one being inside of the other: a viewer draws them wrongly."""
    found, open_ends = [], []
    for start, end, event in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start + 0.002:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + 0.002:
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


@pytest.mark.parametrize("change", [
    lambda e: e.pop("dur", None), lambda e: e.update(ts=-1), lambda e: e.update(tid=99), lambda e: e.update(ph="Q"),
])  # fmt: skip
def test_the_check_sees_a_broken_event(tmp_path, change):
    file = tmp_path / "trace.json"
    lt.run(step, ranks=2, trace=file)
    trace = json.loads(file.read_text())
    change(next(event for event in trace["traceEvents"] if event["ph"] == "X"))
    assert breaches(trace) != []


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
    assert trace["otherData"]["error"].startswith("Deadlock")


def many(steps):
    for _ in range(steps):
        dist.barrier()


def test_a_hundred_thousand_events_take_less_than_fifty_megabytes(tmp_path):
    file = tmp_path / "trace.json"
    ran = lt.run(many, 12, ranks=2, trace=file)
    each = file.stat().st_size / len(ran.recording.events)
    assert len(ran.recording.events) >= 48 and each < 500
