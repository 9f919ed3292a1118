import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from strategies.base.signals import print_stdout, run_command, worker_count, write_stdout
from tests.strategies.base.test_signals import ROOT

SENTENCE = "localtensor: stopped by Ctrl-C; so.\n"


def left(work, capsys):
    """The exit code, and what was said."""
    with pytest.raises(typer.Exit) as leaving:
        run_command(work, "; so")
    return leaving.value.exit_code, capsys.readouterr().err


def raises(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_exit_code_is_that_of_the_work(code, capsys):
    assert left(lambda: code, capsys) == (code, "")


@pytest.mark.parametrize("work", [raises(KeyboardInterrupt()), lambda: 130], ids=["raised", "returned"])
def test_ctrl_c_is_130_and_a_sentence(work, capsys):
    assert left(work, capsys) == (130, SENTENCE)


def test_each_command_of_one_process_may_say_so(capsys):
    assert [left(raises(KeyboardInterrupt()), capsys) for _ in range(2)] == [(130, SENTENCE)] * 2


def test_an_error_of_ours_is_3(capsys):
    code, said = left(raises(ZeroDivisionError("ours")), capsys)
    assert code == 3
    assert said.startswith("Traceback") and "ZeroDivisionError: ours" in said
    assert said.endswith("localtensor itself failed, as shown above; this says nothing about any rule.\n")


@pytest.mark.parametrize("code", [0, None, 1, "text"])
def test_foreign_code_that_exits_is_3(code, capsys):
    assert left(raises(SystemExit(code)), capsys) == (
        3, f"localtensor: a module or an executor of yours has left the program (SystemExit: {code}); nothing was reported.\n"
    )  # fmt: skip


LEAVING = """
import atexit, os, sys, threading
from strategies.base import signals
from strategies.cli import app

signals.install_handlers()
signals.refuse_silent_exit()
signals.begin_command("")
HOW
"""
IN_A_THREAD = "t = threading.Thread(target=os._exit, args=(0,)); t.start(); t.join()"
SILENT = "localtensor: a module or an executor of yours has ended the program by os._exit(0).\n"


@pytest.mark.few(4)
@pytest.mark.parametrize(("how", "code", "said"), [
    ("os._exit(0)", 3, SILENT), ("os._exit(256)", 3, SILENT.replace("(0)", "(256)")), (IN_A_THREAD, 3, SILENT),
    ("import posix; posix._exit(0)", 3, SILENT), ("os._exit(5)", 5, ""),
    ("signals._end(2)", 130, "localtensor: stopped by Ctrl-C.\n"),
    ("if not os.fork(): os._exit(0)\nsys.exit(os.wait()[1])", 0, ""),
    ("signals._State.code = 0\natexit.register(os._exit, 0)", 0, ""),
    ("atexit.register(os._exit, 0)\napp.app(['report', 'nowhere'])", 2, SILENT),
], ids=["at once", "256", "thread", "posix", "5", "signal", "child", "at the end of 0", "at the end of 2"])  # fmt: skip
def test_os_exit_by_foreign_code_does_not_pass(how, code, said):
    done = subprocess.run(
        [sys.executable, "-c", LEAVING.replace("HOW", how)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr[-len(said) :] if code == 2 else done.stderr) == (code, said)


@pytest.mark.parametrize(("error", "what"), [
    (MemoryError(), "memory"), (OSError(24, "Too many open files"), "Too many open files"),
    (OSError(28, "No space left on device"), "No space left on device"),
])  # fmt: skip
def test_a_machine_without_room_is_a_sentence(error, what, capsys):
    said = f"localtensor: the machine has run out of a resource: {what}; this says nothing about any rule.\n"
    assert left(raises(error), capsys) == (3, said)


def test_a_working_folder_that_is_gone_is_a_sentence(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = "localtensor: the working folder is not there any longer, change to another; this says nothing about any rule.\n"
    assert left(os.getcwd, capsys) == (3, said)


def test_another_file_that_is_not_there_is_an_error_of_ours(capsys):
    assert left(raises(FileNotFoundError()), capsys)[1].startswith("Traceback")


def test_what_cannot_be_imported_is_a_sentence_and_not_exit_code_1():
    body = "sys.modules['strategies.cli.app'] = None\nfrom strategies.__main__ import main\nmain()"
    done = in_a_process(body)
    assert done.returncode == 3
    assert done.stderr.startswith("localtensor cannot start: ") and done.stderr.count("\n") == 1


def test_streams_that_were_closed_lead_nowhere_and_keep_their_numbers():
    body = (
        "from strategies.base.signals import open_streams\nimport typer\nfor at in (0, 1):\n    os.close(at)\n"
        "sys.stdin = sys.stdout = None\nopen_streams()\nprint('nowhere', flush=True)\n"
        "print(os.open(os.devnull, os.O_RDONLY) > 2, sys.stdin.read() == '', sys.stdout.write('n'), file=sys.stderr)"
    )
    done = in_a_process(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "True True 1\n")


@pytest.mark.parametrize(
    "said", ["raise OSError(28, 'no room')", "print('no room', file=sys.stderr, flush=True)", "1 / 0"]
)
def test_where_standard_error_is_full_the_exit_code_is_the_same(said):
    body = f"import typer\ndef work():\n    {said}\ntry:\n    run_command(work)\nexcept typer.Exit as left:\n    os._exit(left.exit_code)"
    with Path("/dev/full").open("w") as full:
        assert in_a_process(body, stderr=full).returncode == 3


def in_a_process(body, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options):
    text = (
        "import os, signal, sys\nfrom strategies.base import signals\nfrom strategies.base.signals import run_command, print_stdout, write_stdout\n"
        + body
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("PYTHONUNBUFFERED", None)  # with it nothing has to be flushed
    return subprocess.run(
        [sys.executable, "-c", text], env=environ, stdout=stdout, stderr=stderr, text=True, check=False,
        timeout=60, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("number", "code", "name"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")])
def test_what_the_interruption_became_on_the_way_is_not_shown(number, code, name):
    done = in_a_process(
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nsignals.install_handlers()\n"
        f"def work():\n    with signals.interruptible():\n        signal.raise_signal(signal.{number})\n"
        "import typer\ntry:\n    run_command(work, '; so')\nexcept typer.Exit as left:\n    sys.exit(left.exit_code)"
    )
    assert (done.returncode, done.stderr) == (code, f"localtensor: stopped by {name}; so.\n")


WAYS = pytest.mark.parametrize("how", ["write_stdout('text')", "print_stdout(lambda console: console.print('text'))"])


@WAYS
def test_what_is_written_is_out(how):
    assert in_a_process(f"sys.exit({how})").stdout.strip() == "text"


@WAYS
def test_a_full_disk_is_a_sentence_and_once(how):
    with Path("/dev/full").open("w") as full:
        done = in_a_process(f"print({how}, file=sys.stderr)", full)
    assert (done.returncode, done.stderr) == (0, "cannot write to standard output: No space left on device.\n")


@WAYS
def test_no_one_reading_any_longer_is_no_fault(how):
    reader, writer = os.pipe()
    os.close(reader)
    done = in_a_process(f"print(repr({how}), file=sys.stderr)", writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "''\n")


@WAYS
def test_no_standard_output_at_all_is_no_fault(how, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert {"write_stdout": write_stdout, "print_stdout": print_stdout}[how.partition("(")[0]](
        lambda console: None
    ) == ""


def test_there_is_a_worker_for_each_core_unless_somebody_says_otherwise():
    assert (worker_count(0), worker_count(3), worker_count(None)) == (0, 3, os.cpu_count())


def test_signals_are_not_ours_before_a_command_begins():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


TWICE = """
import signal, sys
from pathlib import Path
from localtensor.collectives.trace.output import write_file
from strategies.base import signals

def half(file):
    file.write("half of it")
    file.flush()
    assert len(list(Path(sys.argv[1]).parent.iterdir())) == 1
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        signal.raise_signal(signal.SIGINT)

signals.install_handlers()
with signals.interruptible():
    write_file("run", "trace", Path(sys.argv[1]), half)
"""


def test_a_second_ctrl_c_leaves_no_part_of_a_file(tmp_path):
    words = [sys.executable, "-c", TWICE, str(tmp_path / "trace.json")]
    done = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, list(tmp_path.iterdir())) == (130, []), done.stderr


CHANGED = """
import sys
from strategies.cli import app
sys.argv = ["localtensor", "report", "nowhere"]
HOW
app.main()
"""


@pytest.mark.parametrize(("how", "said"), [
    ("sys.exit = lambda *code: None", "localtensor: a module or an executor of yours has replaced sys.exit.\n"),
    ("app.app = lambda **words: 1 / 0", "localtensor itself failed, or a module of yours has changed Python; this says nothing about any rule.\n"),
])  # fmt: skip
def test_a_program_that_foreign_code_has_changed_does_not_end_with_a_verdict(how, said):
    done = subprocess.run(
        [sys.executable, "-c", CHANGED.replace("HOW", how)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and done.stderr.endswith(said)
    assert ("ZeroDivisionError" in done.stderr) is ("1 / 0" in how)


HELD = """
import atexit, sys, threading, time
from strategies.base import signals
from strategies.cli import app
signals.LEAVE_SECONDS = 0.1
sys.argv = ["localtensor", *sys.argv[1:]]
HOW
app.main()
"""


@pytest.mark.parametrize("how", [
    "threading.Thread(target=time.sleep, args=(600,)).start()", "atexit.register(time.sleep, 600)",
], ids=["thread", "handler"])  # fmt: skip
def test_what_foreign_code_has_left_running_does_not_hold_a_command_open(how):
    words = [sys.executable, "-c", HELD.replace("HOW", how), "report", "nowhere"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("of yours has not ended within 0.1 s of the report; it is left.\n")


def test_the_handlers_of_a_script_take_as_long_as_they_like(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import atexit, time\natexit.register(print, 'late')\natexit.register(time.sleep, 1)\n")
    words = [sys.executable, "-c", HELD.replace("HOW", ""), "run", str(script)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr


@pytest.mark.parametrize("left", [
    "import atexit, time\natexit.register(time.sleep, 600)\n",
    "import subprocess, sys, atexit\nwaits = [sys.executable, '-c', 'import time; time.sleep(600)']\natexit.register(subprocess.Popen(waits).wait)\n",
], ids=["handler", "process"])  # fmt: skip
def test_what_a_script_has_left_running_ends_with_the_time_of_the_run(left, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(left)
    words = [
        sys.executable,
        "-c",
        HELD.replace("HOW", "signals.EXIT_SECONDS = 0.1"),
        "run",
        "--timeout",
        "3",
        str(script),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "exit handler of the script has not ended within" in done.stderr
