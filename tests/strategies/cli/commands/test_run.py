"""`localtensor run` with a trace, a page and a topology."""

import json
import os
import sys

import pytest

from strategies.cli.commands.run import note, planned
from strategies.cli.options import RunOptions
from tests.localtensor.collectives.trace.test_chrome import breaches
from tests.tools import warm

COMMAND = [sys.executable, "-c", "from strategies.cli.app import main; main()", "run", "-n", "2"]
SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
rows, columns = (distribute_tensor(torch.ones(64, 64), mesh, [Shard(dim)]) for dim in (0, 1))
(rows + columns).sum().full_tensor()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


ONE = "localtensor run: this runs 1 rank; -n 4 runs 4."


@pytest.mark.parametrize(("words", "said"), [
    (["train.py"], [ONE]),
    (["-n", "2", "train.py", "-n", "3", "--seed", "1", "0.5"], []),
    (["train.py", "-n", "4"], [ONE, "-n after train.py"]),
    (["train.py", "-n4", "--ranks=2"], [ONE, "-n4, --ranks after train.py"]),
    (["-n", "2", "train.py", "--on", "gloo", "--html=run.html", "--on", "gloo"], ["--on, --html after train.py"]),
    (["-n", "2", "train.py", "--only", "--htmls"], []),
])  # fmt: skip
def test_options_that_stand_after_the_script_are_noted(words, said):
    ranks = 2 if words[0] == "-n" else None
    name, *arguments = words[2:] if ranks else words
    lines = note(RunOptions(name, tuple(arguments), ranks)).splitlines()
    after = " goes to the script: options of this command stand before it."
    assert lines == [one if one == ONE else f"localtensor run: {one}{after}" for one in said]


def test_a_trace_a_page_and_a_summary_of_one_run(script):
    done = warm.run([*COMMAND, "--trace", "t.json", "--html", "p.html", "--summary", "train.py"], cwd=script)
    assert done.returncode == 0, done.stderr
    assert json.loads((script / "t.json").read_text())["otherData"]["ranks"] == 2
    assert planned("f32[64,64] @ tp=2: S(1) -> S(0)") in (script / "p.html").read_text().replace("&gt;", ">")
    assert "localtensor run: the trace is in t.json.\nlocaltensor run: the page is in p.html.\n" in done.stderr
    assert "largest implicit  16.4 kB in 2, train.py:7 in <module>: f32[64,64] @ tp=2: S(1) -> S(0)" in done.stderr


def seconds(script, topology):
    words = [*COMMAND, "--trace", "t.json", "--topology", topology, "train.py"]
    done = warm.run(words, cwd=script)
    assert done.returncode == 0, done.stderr
    events = json.loads((script / "t.json").read_text())["traceEvents"]
    return max(event["ts"] + event.get("dur", 0) for event in events if event["pid"] == 2 and event["ph"] == "X")


def test_the_modelled_clock_uses_the_links_of_the_topology(script):
    link = {"latency_us": 1000, "gigabytes_per_second": 25}
    (script / "slow.json").write_text(json.dumps({"ranks_per_node": 8, "inner": link, "outer": link}))
    assert seconds(script, "slow.json") > seconds(script, "300,25") + 3000


def test_an_axis_that_the_run_or_the_topology_lacks_is_noted(script):
    link = {"latency_us": 1, "gigabytes_per_second": 25}
    text = json.dumps({"ranks_per_node": 8, "inner": link, "outer": link, "axes": {"pp": link}})
    (script / "pp.json").write_text(text)
    for words in (["--summary", "--html", "p.html"], ["--trace", "t.json"]):
        done = warm.run([*COMMAND, *words, "--topology", "pp.json", "train.py"], cwd=script)
        lines = [line for line in done.stderr.splitlines() if line.startswith("localtensor run: topology: ")]
        assert done.returncode == 0 and [line.split(": ")[2] for line in lines] == [
            "no call of the run is along pp, which the topology names.",
            "the topology does not name tp, whose calls have the links of nodes.",
        ]
        modelled = [line for line in done.stderr.splitlines() if line.startswith("modelled  ")]
        assert all(line.endswith("of the time") for line in modelled) and len(modelled) == words.count("--summary")
    assert "no call of the run is along pp, which the topology names." in (script / "p.html").read_text()


INTERRUPTED = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10_000):
    dist.all_reduce(torch.ones(4))
    if step == 20 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_leaves_a_whole_trace_up_to_there(script):
    (script / "train.py").write_text(INTERRUPTED)
    done = warm.run([*COMMAND, "--trace", "t.json", "--html", "p.html", "train.py"], cwd=script)
    assert done.returncode == 130 and "stopped by Ctrl-C" in done.stderr
    trace = json.loads((script / "t.json").read_text())
    assert breaches(trace) == [] and trace["otherData"]["error"] == "KeyboardInterrupt"
    assert len([event for event in trace["traceEvents"] if event.get("cat") == "call" and event["pid"] == 1]) >= 40
    assert "The run failed: KeyboardInterrupt" in (script / "p.html").read_text()
    assert sorted(file.name for file in script.iterdir()) == ["p.html", "t.json", "train.py"]


@pytest.mark.parametrize(("words", "problem"), [
    (["--trace", "no/t.json"], "no/t.json"), (["--html", "no/p.html"], "no/p.html"),
    (["--trace", "one", "--html", "./one"], "--html: one: the trace would be overwritten by the page"),
    (["--trace", "./train.py"], "--trace: train.py: this is the script. Name another file."),
    (["--html", "train.py"], "--html: train.py: this is the script. Name another file."),
    (["--topology", "300,25"], "--topology: 300,25: it is for the modelled clock, and nothing shows that"),
    (["--summary", "--topology", "none.json"], "topology: none.json: file: it cannot be read"),
    (["--summary", "--on", "gloo"], "it is for rank threads"),
])  # fmt: skip
def test_bad_options_end_with_one_sentence_before_the_run(script, words, problem):
    (script / "train.py").write_text("print('it ran')")
    (script / "no").write_text("a file")
    done = warm.run([*COMMAND, *words, "train.py"], cwd=script)
    assert done.returncode == 2 and problem in done.stderr and done.stdout == ""
    assert (script / "train.py").read_text() == "print('it ran')"


def test_the_limit_of_the_environment_holds_where_none_is_given(script):
    (script / "endless.py").write_text("while True: pass")
    done = warm.run([*COMMAND, "endless.py"], cwd=script, env={**os.environ, "LOCALTENSOR_TIMEOUT": "0.5"}, timeout=60)
    assert done.returncode == 1 and "NeverEnded: run: timeout: timeout=0.5" in done.stderr
    done = warm.run(
        [*COMMAND, "--timeout", "60", "train.py"], cwd=script, env={**os.environ, "LOCALTENSOR_TIMEOUT": "much"}
    )
    assert done.returncode == 0, done.stderr
    done = warm.run([*COMMAND, "train.py"], cwd=script, env={**os.environ, "LOCALTENSOR_TIMEOUT": "much"})
    assert done.returncode == 2 and "'LOCALTENSOR_TIMEOUT'" in done.stderr
