"""What is made of a recorded run: files that can be written, the summary, the page's tables, on the modelled clock."""

import json
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import localtensor as lt
from localtensor.collectives.trace.clock import Modelled, set_clock
from localtensor.collectives.trace.output import PARTS, check_file, write_file
from localtensor.layout.links import Links, Network
from localtensor.runner.torchrun import TorchrunOptions, run_script
from localtensor.runner.trace.page import _real_seconds, _time_line, page_of
from localtensor.runner.trace.summary import summary_lines
from localtensor.runner.trace.tables import implicit, traffic, traffic_by, waits

NEVER = "never runs"


def step():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(model[0].weight.grad, group=mesh.get_group("dp"))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    columns = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1), Replicate()])
    return rows + columns


@pytest.mark.parametrize("name", ["no/such/folder/trace.json", "."])
def test_a_file_that_cannot_be_written_is_refused_in_one_sentence_before_the_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    def program():
        raise AssertionError(NEVER)

    with pytest.raises(lt.LocalTensorError) as caught:
        lt.run(program, ranks=2, trace=name)
    reason = os.strerror(21 if name == "." else 2)
    sentence = f"run: trace: trace={name}: it cannot be written ({reason}). "
    assert str(caught.value) == sentence + "Name a file in a folder that exists and that you may write to."


def half(file):
    file.write("half of it")
    file.flush()
    assert len(PARTS) == 1
    raise KeyboardInterrupt


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file, link = tmp_path / "trace.json", tmp_path / "link.json"
    link.symlink_to(file)
    with pytest.raises(KeyboardInterrupt):
        write_file("run", "trace", file, half)
    assert not file.exists() and not PARTS
    write_file("run", "trace", link, lambda one: one.write("the first"))
    with pytest.raises(KeyboardInterrupt):
        write_file("run", "trace", link, half)
    assert file.read_text() == "the first" and link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.json", "trace.json"]


def test_a_pipe_is_written_directly(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_file("run", "trace", pipe, lambda one: one.write("all of it"))
    reader.join(60)
    assert read == ["all of it"]


def test_the_check_leaves_a_file_as_it_was(tmp_path):
    old, new, link = (tmp_path / f"{name}.json" for name in ("old", "new", "link"))
    old.write_text("kept")
    link.symlink_to(new)
    for file in (old, new, link):
        check_file("run", "trace", file)
    assert old.read_text() == "kept" and not new.exists() and link.is_symlink()


@pytest.mark.parametrize(("trace", "on", "kind"), [
    (3, "threads", "WrongType"), ("t.json", "gloo", "ThreadsOnly"), (True, "gloo", "ThreadsOnly"),
])  # fmt: skip
def test_other_values_of_trace_are_refused(tmp_path, monkeypatch, trace, on, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(getattr(lt.errors, kind)):
        lt.run(step, ranks=4, trace=trace, on=on)
    assert list(tmp_path.iterdir()) == []


def test_tables_of_traffic_and_implicit_redistributions():
    recording = lt.run(step, ranks=4, trace=True).recording
    set_clock(recording, Links())
    by_axis = {axis: (one.calls, one.bytes) for axis, one in traffic_by(recording, 1).items()}
    reduced, scattered, moved = 4 * 64, 2 * 4 * 32, 4 * 32  # by hand: bytes of all ranks
    assert traffic(recording)["", "dp", "all_reduce"].bytes == reduced
    assert by_axis["dp"][1] >= reduced + scattered + moved
    (found,) = implicit(recording)
    assert (found.spec, found.times, found.bytes) == ("f32[4,4] @ dp=2,tp=2: S(1),R -> S(0),R", 4, moved)
    assert "test_files.py" in str(found.place)


def test_the_summary_has_twelve_lines_of_a_terminal():
    recording = lt.run(step, ranks=4, trace=True).recording
    lines = summary_lines(recording, set_clock(recording, Links()))
    assert len(lines) == 12 and all(0 < len(line) <= 118 and "\n" not in line for line in lines)
    names = [line.partition("  ")[0] for line in lines]
    assert names[:5] == ["run", "modelled", "communication", "by axis", "by module"]
    assert lines[0][18:].startswith("4 ranks, ") and lines[0].endswith("ended")
    assert "f32[4,4] @ dp=2,tp=2: S(1),R -> S(0),R" in lines[6]


def nothing():
    return None


def test_a_run_without_any_event_has_a_summary_and_a_page():
    recording = lt.run(nothing, ranks=1, trace=True).recording
    clock = set_clock(recording, Links())
    assert len(summary_lines(recording, clock)) == 12 and clock == Modelled(0.0, [0.0], [0.0])
    assert "none that communicates" in page_of(recording, clock)


def late():
    x = torch.ones(1000, 1000)
    if dist.get_rank() == 1:
        for _ in range(10):
            x.add_(1)
    dist.barrier()


def test_waits_are_split_between_the_late_rank_and_the_transfer():
    recording = lt.run(late, ranks=2, trace=True).recording
    links = Links(inner=Network(1e-3, 0))
    set_clock(recording, links)
    found = {(one.rank, one.late): one.seconds for one in waits(recording)}
    assert set(found) == {(0, 1), (0, 0), (1, 1)}
    bytes_moved = 10 * 2 * 4_000_000  # in place: read and written
    assert found[0, 1] == pytest.approx(10 * 1e-6 + bytes_moved * 1e-12, rel=0.01)
    assert found[0, 0] == pytest.approx(1e-3) == found[1, 1]


def test_the_page_has_what_it_promises():
    recording = lt.run(step, ranks=4, trace=True).recording
    text = page_of(recording, set_clock(recording, Links()), lambda spec: f"the plan of {spec}")
    assert "the plan of f32[4,4] @ dp=2,tp=2: S(1),R -&gt; S(0),R" in text
    for head in ("Time line", "Communication by module and axis", "Memory by rank", "Who waits how long for whom"):
        assert head in text
    assert text.count("<svg viewBox") >= 2 and "http:" not in text.replace("http://www.w3.org/2000/svg", "")


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3)
dist.all_reduce(x)
if dist.get_rank() == 1 and {fails}:
    raise ValueError("broken here")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_is_recorded_also_if_it_fails(tmp_path, monkeypatch, capfd, fails):
    monkeypatch.chdir(tmp_path)
    script, trace, page = tmp_path / "train.py", tmp_path / "trace.json", tmp_path / "page.html"
    script.write_text(SCRIPT.format(fails=fails))
    code = run_script(TorchrunOptions("train.py", ranks=2, timeout=60.0, trace=trace, html=page, summary=True))
    out, err = capfd.readouterr()
    assert code == int(fails) and out == ""
    assert "all_reduce 24 B in 2" in err and ("failed: RankRaised" in err) == fails
    assert ("broken here" in trace.read_text()) == fails == ("broken here" in page.read_text())
    assert len([line for line in err.splitlines() if line[:16].strip() and line[16:18] == "  "]) == 12


LEAVES = """
import sys, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
sys.exit(3 * dist.get_rank())
"""


def test_a_rank_that_exits_with_an_error_is_in_the_trace(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LEAVES)
    code = run_script(TorchrunOptions("train.py", ranks=2, timeout=60.0, trace=tmp_path / "t.json", summary=True))
    trace = json.loads((tmp_path / "t.json").read_text())
    assert code == 3 and "failed: run: script: rank 1 with exit code 3" in capfd.readouterr().err
    assert trace["otherData"]["error"].startswith("run: script: rank 1 with exit code 3")
    found = [e for e in trace["traceEvents"] if e.get("cat") == "error" and e["s"] == "t"]
    assert [(e["name"], e["tid"], e["args"]["message"]) for e in found] == [("SystemExit", 1001, "3")]


def test_a_script_with_a_file_that_cannot_be_written_does_not_begin(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('it ran')\n")
    code = run_script(TorchrunOptions("train.py", ranks=2, trace=tmp_path / "no" / "trace.json"))
    out, err = capfd.readouterr()
    assert code == 2 and out == "" and "trace.json: it cannot be written (No such file or directory)." in err


def many_spans():
    x = torch.ones(8, 8)
    model = nn.Sequential(*[nn.Identity() for _ in range(30)])
    for _ in range(3):
        model(x)
        dist.all_reduce(x)


def test_spans_beyond_the_most_are_drawn_together_and_counted(monkeypatch):
    recording = lt.run(many_spans, ranks=2, trace=True).recording
    clock = set_clock(recording, Links())
    monkeypatch.setattr("localtensor.runner.trace.page.PARTS", 7)
    every = _time_line(recording, "real", _real_seconds(recording))
    monkeypatch.setattr("localtensor.runner.trace.page.MOST_BARS", 40)
    line = _time_line(recording, "real", _real_seconds(recording))
    together = [bar for bar in line.bars if bar.look == "many"]
    assert (every.together, every.short, line.together) == (0, 0.0, len(every.bars) - 40)
    assert sum(int(bar.label.split()[0]) for bar in together) == line.together and 2 <= len(together) <= 2 * 7
    drawn = [bar for bar in line.bars if bar.look != "many"]
    assert len(drawn) == 40 and min(bar.end - bar.begin for bar in drawn) * line.seconds >= line.short * 0.999
    for lane, (_, top) in enumerate(line.lanes):  # the row of short spans is the last of its lane
        below = line.lanes[lane + 1][1] if lane + 1 < len(line.lanes) else line.height
        here = [bar for bar in line.bars if top <= bar.y < below]
        assert max(bar.y for bar in here if bar.look != "many") < min(bar.y for bar in here if bar.look == "many")
    assert f"The {line.together} shortest spans, of at most" in page_of(recording, clock)


@pytest.mark.parametrize(("rank", "kind", "sentence"), [
    (2, IndexError, "rank: 2: the run has 2 ranks. Name a rank from 0 to 1."),
    (-1, IndexError, "rank: -1: the run has 2 ranks. Name a rank from 0 to 1."),
    ("0", TypeError, "rank: '0': it is no int. Pass the number of a rank."),
    (True, TypeError, "rank: True: it is no int. Pass the number of a rank."),
])  # fmt: skip
def test_a_rank_that_the_run_has_not_has_no_memory(rank, kind, sentence):
    memory = lt.run(late, ranks=2, trace=True).memory
    for name in ("peak", "at_peak"):
        with pytest.raises(kind) as caught:
            getattr(memory, name)(rank)
        assert isinstance(caught.value, lt.LocalTensorError) and str(caught.value) == f"memory.{name}: {sentence}"


def test_waits_and_memory_print_in_short():
    ran = lt.run(late, ranks=2, trace=True)
    assert repr(ran.memory) == "RunMemory(peaks: 4.0 MB, 4.0 MB)"
    assert repr(ran.waits[0]).startswith("Waited(rank=0, late=1, times=1, seconds=") and len(repr(ran.waits)) < 400
