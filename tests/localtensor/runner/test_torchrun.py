"""`localtensor run`: one script on rank threads and on real processes, to the same end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from localtensor.runner.torchrun import TorchrunOptions, run_script
from tests.tools import warm

WAYS = ("threads", "gloo")
MOSTLY_THREADS = ("threads", pytest.param("gloo", marks=pytest.mark.slow))  # what both take from the same lines of ours
COMMAND = [sys.executable, "-c", "from strategies.cli.app import main; main()"]
HEAD = "import os, pickle, sys\nimport torch, torch.distributed as dist\n"
INIT = HEAD + "dist.init_process_group('gloo')\nrank = dist.get_rank()\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script, and runs it from its folder: exit code, output by stream."""
    monkeypatch.chdir(tmp_path)

    def write(text, **asked):
        Path("train.py").write_text(text)
        return TorchrunOptions("train.py", **{"ranks": 2, "timeout": 60.0, **asked})

    return write


def outcome(asked, capfd):
    code = run_script(asked)
    out, err = capfd.readouterr()
    return code, sorted(out.splitlines()), err


@pytest.mark.parametrize("on", WAYS)
def test_each_rank_runs_it_as_torchrun_would(on, script, capfd):
    Path("helper.py").write_text("value = 7\n")
    code, out, err = outcome(script(HEAD + """
import helper
class Point:
    pass
assert not dist.is_initialized()
assert __name__ == "__main__" and __file__ == os.path.abspath("train.py")
assert sys.modules["__main__"].__dict__ is globals()
dist.init_process_group()
rank = dist.get_rank()
assert type(pickle.loads(pickle.dumps(Point()))) is Point
x = torch.rand(2)
dist.all_reduce(x)
sys.argv.append(str(rank))
print(rank, os.environ["LOCAL_RANK"], sys.argv, helper.value, x.tolist())
dist.destroy_process_group()
""", arguments=("--ranks", "2", "3"), on=on, seed=5), capfd)  # fmt: skip
    assert (code, err) == (0, "")
    drawn = str((2 * torch.rand(2, generator=torch.Generator().manual_seed(5))).tolist())
    assert out == [
        f"[rank {rank}] {rank} {rank} ['train.py', '--ranks', '2', '3', '{rank}'] 7 {drawn}" for rank in (0, 1)
    ]


@pytest.mark.parametrize("on", MOSTLY_THREADS)
def test_a_program_sees_that_torchrun_launched_it(on, script, capfd, monkeypatch):
    """Libraries choose by these variables how they find the ranks; lightning takes WORLD_SIZE away without them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = (
        HEAD
        + """
store, rank, size = next(dist.rendezvous("env://"))
store.set(f"from {rank}", "x" * rank)
names = ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")
agent = [os.environ["TORCHELASTIC_" + name] for name in names]
there = store.get(f"from {size - 1 - rank}")
print(dist.is_torchelastic_launched(), agent, os.environ["ROLE_NAME"], os.environ["OMP_NUM_THREADS"], there)
"""
    )
    code, out, err = outcome(script(text, on=on), capfd)
    seen = "True ['none', '0', '0', 'True'] default 1"
    assert (code, out, err) == (0, [f"[rank 0] {seen} b'x'", f"[rank 1] {seen} b''"], "")
    assert "TORCHELASTIC_RUN_ID" not in os.environ


@pytest.mark.parametrize("on", MOSTLY_THREADS)
def test_lines_go_out_whole_with_their_rank(on, script, capfd):
    text = (
        INIT
        + """
print("one", end=" ")
dist.barrier()
print("line")
sys.stderr.write("to the other stream\\n")
sys.stdout.writelines(["two\\n", "three"])
"""
    )
    code, out, err = outcome(script(text, on=on), capfd)
    assert code == 0
    assert out == sorted(f"[rank {r}] {words}" for r in (0, 1) for words in ("one line", "two", "three"))
    assert sorted(err.splitlines()) == [f"[rank {r}] to the other stream" for r in (0, 1)]


@pytest.mark.parametrize(
    ("on", "asked"),
    [
        ("threads", {"ranks": 1}),
        ("threads", {"prefix": False}),
        pytest.param("gloo", {"prefix": False}, marks=pytest.mark.slow),
    ],
)
def test_the_prefix_is_left_out(on, asked, script, capfd):
    code, out, err = outcome(script(INIT + "print('plain')\n", on=on, **asked), capfd)
    assert (code, set(out), err) == (0, {"plain"}, "")


@pytest.mark.parametrize(("on", "leave", "want"), [
    ("threads", "sys.exit()", 0), ("threads", "sys.exit(0)", 0), ("threads", "sys.exit(None)", 0),
    ("threads", "raise SystemExit", 0), ("threads", "sys.exit(rank * 5)", 5), ("threads", "sys.exit(rank * -1)", 255),
    ("threads", "sys.exit('words' if rank else 0)", 1),
    ("threads", "import os; os._exit(0)", 0), ("threads", "import os; os._exit(rank * 5)", 5),
    pytest.param("gloo", "sys.exit('words' if rank else 0)", 1, marks=pytest.mark.slow),  # python's own, as in the test of the order
])  # fmt: skip
def test_the_exit_code_is_that_of_the_first_rank_that_failed(on, leave, want, script, capfd):
    code, _, err = outcome(script(f"{INIT}{leave}\n", on=on), capfd)
    assert code == want
    assert ("[rank 1] words" in err) == ("words" in leave)
    told = f"run: script: rank 1 with exit code {want}: these ranks ended with an error. "
    assert (told in err) == bool(want)


def shown_of_rank_1(err):
    return re.findall(r"^\[rank 1\] (?:\[rank1\]: )?(.*)$", err, re.MULTILINE)


@pytest.mark.parametrize("on", MOSTLY_THREADS)  # on gloo the next test shows it, too
def test_an_exception_is_shown_as_python_shows_it_and_no_line_of_ours(on, script, capfd):
    code, _, err = outcome(script(INIT + "if rank:\n    raise ValueError('oh')\ndist.barrier()\n", on=on), capfd)
    assert code == 1
    shown = shown_of_rank_1(err)
    assert shown[:3] == [
        "Traceback (most recent call last):", f'  File "{Path("train.py").absolute()}", line 6, in <module>',
        "    raise ValueError('oh')",
    ]  # fmt: skip
    assert "ValueError: oh" in shown
    assert "/localtensor/" not in err.replace(str(Path.cwd()), "")
    assert re.search(r"^(RankRaised: )?run: (script: )?rank 1", err, re.MULTILINE)


@pytest.mark.slow
def test_the_first_rank_to_fail_is_named_first_though_another_process_ends_before_it(script, capfd):
    """Rank 1 raises; as it ends it lets rank 0 fail, and goes on ending."""
    text = """import atexit, os, sys, threading
from pathlib import Path
def until(name):
    while not Path(name).exists():
        threading.Event().wait(0.01)
def as_it_ends():
    Path("raised").touch()
    until("left")
if os.environ["RANK"] == "1":
    atexit.register(as_it_ends)
    raise ValueError("first")
until("raised")
atexit.register(Path("left").touch)
sys.exit(3)
"""
    code, _, err = outcome(script(text, on="gloo"), capfd)
    assert (code, "run: script: rank 1 with exit code 1; then rank 0 with exit code 3" in err) == (1, True)
    assert shown_of_rank_1(err) == [
        "Traceback (most recent call last):", f'  File "{Path("train.py").absolute()}", line 11, in <module>',
        '    raise ValueError("first")', "ValueError: first",
    ]  # fmt: skip


def test_a_fault_of_the_program_is_reported_without_a_traceback(script, capfd):
    code, _, err = outcome(script(INIT + "if rank:\n    dist.barrier()\n"), capfd)
    assert code == 1
    assert err.startswith("EarlyReturn: rank 0 returned while rank 1 waits for it: ") and "Traceback" not in err
    assert "at train.py:6 in <module>" in err


def test_a_rank_that_left_with_an_error_is_named_though_others_wait_for_it(script, capfd):
    code, _, err = outcome(script(INIT + "if rank:\n    sys.exit(4)\ndist.barrier()\n"), capfd)
    assert code == 4
    assert "rank 1 returned while rank 0 waits for it" in err and "rank 1 with exit code 4" in err


def test_a_rank_that_ends_its_process_at_once_ends_alone_and_its_children_end_as_they_do(script, capfd):
    text = """import os
if rank == 0:
    child = os.fork()
    if child == 0:
        os._exit(7)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
dist.barrier()
"""
    code, out, err = outcome(script(INIT + text), capfd)
    assert code == 1 and "rank 0 returned while rank 1 waits for it" in err  # it ended all ranks, with exit code 0
    assert out == ["[rank 0] child 7"]


def test_a_script_that_starts_its_ranks_itself_is_told_how_to_run(script, capfd, monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda work, nprocs: print("started", nprocs))
    code, out, err = outcome(script("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n", ranks=1), capfd)
    assert (code, out) == (0, ["started 2"])
    assert "starts processes by torch.multiprocessing.spawn, which are no ranks of this run" in err


def test_an_exception_is_shown_though_another_rank_had_left_with_an_error(script, capfd):
    code, _, err = outcome(script(INIT + "if rank:\n    raise ValueError('of rank 1')\nsys.exit(4)\n"), capfd)
    assert code and "ValueError: of rank 1" in err and "Traceback" in err


@pytest.mark.parametrize("on", MOSTLY_THREADS)
def test_a_module_runs_as_python_runs_it(on, script, capfd):
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text("")
    Path("pack/__main__.py").write_text("import sys\nfrom pack.near import x\nprint(x, __package__, len(sys.argv))\n")
    Path("pack/near.py").write_text("x = 5\n")
    for name in ("pack", "pack.__main__")[on == "gloo" :]:
        code, out, err = outcome(TorchrunOptions(name, ("a",), 2, on, module=True), capfd)
        assert (code, out, err) == (0, ["[rank 0] 5 pack 2", "[rank 1] 5 pack 2"], "")
    sys.modules.pop("pack.near", None), sys.modules.pop("pack", None)


def test_a_schedule_is_replayed_and_told(script, capfd):
    text = INIT + "dist.barrier()\nprint(rank, flush=True)\n"
    orders = set()
    for seed in range(6):
        run_script(script(text, ranks=3, schedule=f"shuffled:{seed}"))
        first = capfd.readouterr().out
        run_script(script(text, ranks=3, schedule=f"shuffled:{seed}"))
        assert capfd.readouterr().out == first
        orders.add(first)
    assert len(orders) > 1


def test_what_the_caller_had_is_back(script, capfd):
    before = (sys.argv, list(sys.path), sys.modules["__main__"], sys.stdout, sys.stderr, dict(os.environ))
    run_script(script(INIT + "sys.path.append('x')\nsys.argv = []\nos.environ['LT_X'] = '1'\n"))
    assert before == (sys.argv, list(sys.path), sys.modules["__main__"], sys.stdout, sys.stderr, dict(os.environ))


PATH_SAYS = "there is no such file. Give the path of a Python file that exists."
ON_SAYS = "there is no such way to run. Write 'threads', 'gloo'."
TIME_SAYS = "a limit is more than 0 seconds, and at most a day. Give it 30, say."
BAD = {
    "no script": ({"name": "nope.py"}, f"run: script: nope.py: {PATH_SAYS}"),
    "too long a name": ({"name": "n" * 300}, f"run: script: {'n' * 300}: {PATH_SAYS}"),
    "a folder": ({"name": "."}, f"run: script: .: {PATH_SAYS}"),
    "no module": ({"name": "nope.x", "module": True},
        ("run: script: nope.x: there is no such module. Give the dotted name of a module or package that can be "
         "imported and run from here.")),
    "no ranks": (
        {"ranks": 0}, ("run: ranks: ranks=0: a group has at least one rank, and a whole number of them. Ask for "
                       "1 rank or more.")),
    "another way": ({"on": "mpi"}, f"run: on: on='mpi': {ON_SAYS}"),
    "no time": ({"timeout": -1.0}, f"run: timeout: timeout=-1.0: {TIME_SAYS}"),
    "a bad schedule": ({"schedule": "x"},
        ("run: schedule: 'x': there is no policy x, only round_robin, shuffled, pct. Write round_robin or shuffled:7, "
         "or copy the text after 'Replay:' in an error's message whole.")),
    "a schedule for processes": ({"schedule": "round_robin", "on": "gloo"},
        ("run: schedule: schedule=round_robin: it is for rank threads, and this is on='gloo'. Leave it out, or run on threads.")),
    "faults for processes": ({"faults": "kill={1: 1}", "on": "gloo"},
        "run: faults: faults=kill={1: 1}: it is for rank threads, and this is on='gloo'. Leave it out, or run on threads."),
    "no faults": ({"faults": "kill 1"},
        ("run: faults: 'kill 1': it has to be written like \"kill={2: 5}, restart=1\". "
         "Give it as localtensor.Faults documents it.")),
    "another fault": ({"faults": "halt={1: 1}"},
        ("run: faults.halt: {1: 1}: there is no such fault; there are kill, restart, delay, drop, split, split_at. "
         "Give it as localtensor.Faults documents it.")),
    "a fault of no rank": ({"faults": "kill={7: 1}"},
        ("run: faults.kill: {7: 1}: it has to give ranks below 1 the number of a call from 1 on. "
         "Give it as localtensor.Faults documents it.")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_question_is_refused_word_for_word(name, script, capfd):
    asked, message = BAD[name]
    Path("train.py").write_text("print('never')\n")
    code, out, err = outcome(TorchrunOptions(**{"name": "train.py", **asked}), capfd)
    assert (code, out, err) == (2, [], f"localtensor {message}\n")


def test_a_script_that_does_not_compile_is_shown(script, capfd):
    code, _, err = outcome(script("def f(:\n"), capfd)
    assert code == 1 and "train.py" in err and "SyntaxError" in err and "Traceback" not in err


SLEEPS = INIT + "print('up', os.getpid(), flush=True)\nimport time\ntime.sleep(60)\n"


def gone(pid):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", pytest.param("kill", marks=pytest.mark.slow)])
def test_no_process_is_left_when_we_are_stopped(how, script):
    script(SLEEPS)
    process = subprocess.Popen([*COMMAND, "run", "-n", "2", "--on", "gloo", "train.py"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how == "interrupt" else -9)
    assert err == ("localtensor: stopped by Ctrl-C.\n" if how == "interrupt" else "")
    assert all(gone(pid) for pid in pids)


def test_ctrl_c_stops_rank_threads(script):
    script(INIT + "print('up', flush=True)\nwhile True:\n    pass\n")
    process = subprocess.Popen([*COMMAND, "run", "-n", "2", "train.py"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout.readline().endswith("up\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "localtensor: stopped by Ctrl-C.\n")


@pytest.mark.parametrize("on", MOSTLY_THREADS)
def test_a_limit_ends_it(on, script, capfd):
    loop = SLEEPS.replace("time.sleep(60)", "\nwhile True:\n    time.sleep(0.01)")
    code, _, err = outcome(script(loop, on=on, timeout=4.0 if on == "gloo" else 0.5), capfd)
    assert code == 1
    assert re.search(r"^NeverEnded: run: timeout: timeout=[\d.]+: the run has not ended in time; ", err, re.MULTILINE)


def test_the_command_leaves_the_scripts_words_alone(script):
    script("import sys\nprint(sys.argv[1:])\n")
    words = ["--ranks", "2", "3", "-n", "5", "--help", "--dtype=bool"]
    done = warm.run([*COMMAND, "run", "--ranks", "1", "train.py", *words])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{words}\n", "")


def test_help_has_examples():
    done = subprocess.run([*COMMAND, "run", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "localtensor run -n 8 train.py --epochs 1" in done.stdout


RESUMES = (
    INIT
    + """
folder = sys.argv[1]
path = os.path.join(folder, f"{rank}.pt")
step = torch.load(path) if os.path.exists(path) else 0
while step < 4:
    x = torch.ones(1)
    dist.all_reduce(x)
    step += 1
    torch.save(step, path)
print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], "step", step)
"""
)


def test_a_script_is_killed_and_started_again(script, capfd, tmp_path):
    asked = script(RESUMES, arguments=(str(tmp_path),), faults="kill={1: 3}, restart=1")
    code, out, err = outcome(asked, capfd)
    assert (code, out) == (0, ["[rank 0] start 1 step 4", "[rank 1] start 1 step 4"])
    assert err == "localtensor run: a rank has died on purpose; start 2\n"


def test_the_replay_line_of_a_killed_script_is_what_the_option_takes(script, capfd):
    text = INIT + "for _ in range(3):\n    dist.all_reduce(torch.ones(1))\n"
    code, _, err = outcome(script(text, faults="kill={1: 2}"), capfd)
    line = next(line for line in err.splitlines() if line.startswith("Replay: "))
    assert code == 1 and "Connection closed by peer" in err
    assert outcome(script(text, faults=line.removeprefix("Replay: ")), capfd)[2].count("Connection closed by peer") > 0
