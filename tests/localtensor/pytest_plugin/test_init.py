"""What a session says: options, ini settings, help, and one sentence for bad input."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.tools import warm

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]


def refusal(result):
    """The one sentence of a usage error."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "Traceback" not in result.text and "INTERNALERROR" not in result.text
    [line] = [line for line in result.text.splitlines() if line.startswith("ERROR: ")]
    return line.removeprefix("ERROR: ")


def sentence_of_error(result):
    """The one sentence of a test that cannot run; the other test of the file has passed."""
    result.assert_outcomes(passed=1, errors=1)
    assert "Traceback" not in result.text and "INTERNALERROR" not in result.text
    [line] = [line for line in result.text.splitlines() if line.startswith("test_it.py::")]
    return line


GOOD = "\n\n@pytest.mark.ranks(2)\ndef test_good(rank): assert rank < 2\n"


def test_a_session_without_rank_tests_imports_no_torch(tmp_path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\n\ndef test_plain(tmp_path):\n"
        "    assert 'localtensor.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'hypothesis'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "localtensor", "-p", "no:hypothesispytest"]
    ran = subprocess.run(
        [*command, "--ranks", "4"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_help_markers_and_fixtures_describe_everything(tried):
    words = tried("", "--help").text
    for option in (
        "--ranks=N",
        "--ranks-on=threads|gloo|nccl",
        "--rank-schedule=TEXT",
        "--rank-seed=N",
        "--rank-flaky=N",
        "--rank-leftovers=ignore|warn|raise",
    ):
        assert option in words
    for setting in ("ranks_on (string)", "rank_schedule (string)", "rank_timeout (string)"):
        assert setting in words
    markers = tried("", "--markers").text
    assert "@pytest.mark.ranks(*numbers" in markers and "@pytest.mark.mesh(shape" in markers
    fixtures = tried("", "--fixtures").text
    assert all(f"\n{name} -- " in fixtures for name in ("rank", "world_size", "mesh", "comms", "world"))


COUNTED = """
    def test_size(world_size):
        assert dist.get_world_size() == world_size == 3

    @pytest.mark.ranks
    def test_marked():
        assert dist.get_world_size() == 3

    @pytest.mark.ranks(2)
    def test_that_says_two():
        assert dist.get_world_size() == 2
"""


def test_ranks_are_counted_by_option_and_the_header_says_so(tried):
    result = tried(COUNTED, "--ranks", "3")
    result.assert_outcomes(passed=3)
    assert "localtensor: ranks 3" in result.text


def test_the_ini_file_speaks_where_the_command_line_does_not(tried, pytester):
    pytester.makeini("[pytest]\nranks = 3\nrank_seed = 5\nrank_schedule = shuffled:9\n")
    result = tried(COUNTED)
    result.assert_outcomes(passed=3)
    assert "localtensor:" not in result.text
    pytester.makeini("[pytest]\nranks = 8\n")
    tried(COUNTED, "--ranks", "3").assert_outcomes(passed=3)


def test_an_ordinary_test_stays_ordinary(tried):
    result = tried(
        """
        @pytest.mark.parametrize("rank", [0, 7])
        def test_own_parameter(rank):
            assert not dist.is_initialized()

        @pytest.fixture(name="mesh", scope="session")
        def own_mesh():
            return "mine"

        def test_own_fixture(mesh):
            assert mesh == "mine" and not dist.is_initialized()

        def test_plain(world, comms):
            assert not dist.is_initialized()
        """,
        "--ranks=2", "--strict-markers",
    )  # fmt: skip
    result.assert_outcomes(passed=4)


@pytest.mark.few(4)
@pytest.mark.parametrize(("mark", "sentence"), [
    ("ranks(0)", "@pytest.mark.ranks: 0: a number of ranks is a whole number from 1 up to 65,536."),
    ("ranks(10**30)", "@pytest.mark.ranks: 1000000000000000000000000000000: a number"),
    ("ranks(-1)", "@pytest.mark.ranks: -1: a number"),
    ("ranks(True)", "@pytest.mark.ranks: True: a number"),
    ("ranks('4')", "@pytest.mark.ranks: '4': a number"),
    ("ranks(2.0)", "@pytest.mark.ranks: 2.0: a number"),
    ("ranks(2, 2)", "@pytest.mark.ranks: (2, 2): each number makes a test, and one is there twice."),
    ("ranks(2, rank=3)", "@pytest.mark.ranks: rank: the keywords are schedule, schedules, seed, timeout, leftovers."),
    ("ranks(ranks=2)", "leftovers. Leave it out; a number of ranks has no keyword: @pytest.mark.ranks(4)."),
    ("ranks(2, seed=-3)", "@pytest.mark.ranks: seed: -3: a seed is"),
    ("ranks(2, timeout='x')", "@pytest.mark.ranks: timeout: x: a limit is"),
    ("ranks(2, schedule='tight')", "@pytest.mark.ranks: schedule: 'tight': there is no policy tight"),
    ("ranks(2, schedules=0)", "@pytest.mark.ranks: schedules: 0: a number of schedules is"),
    ("ranks(2, leftovers='sweep')", "@pytest.mark.ranks: leftovers: sweep: that is nothing to do"),
    ("mesh(())", "@pytest.mark.mesh: (): a shape is whole numbers from 1 up, of 65,536 ranks at most."),
    ("mesh((300, 300))", "@pytest.mark.mesh: (300, 300): a shape"),
    ("mesh((2, 0))", "@pytest.mark.mesh: (2, 0): a shape is"),
    ("mesh(2, 2)", "@pytest.mark.mesh: 2, 2: it takes a shape and names="),
    ("mesh((2, 2), names=('a',))", "@pytest.mark.mesh: names=('a',) of (2, 2): a mesh of 2 dims has as many names"),
    ("mesh((2, 2), names=5)", "@pytest.mark.mesh: names=(5,) of (2, 2): a mesh"),
])  # fmt: skip
def test_a_mark_that_cannot_be_followed_is_one_sentence(tried, mark, sentence):
    said = sentence_of_error(tried(f"@pytest.mark.{mark}\ndef test_a(): pass\n{GOOD}"))
    assert said.startswith("test_it.py::test_a") and sentence in said


@pytest.mark.few(4)
@pytest.mark.parametrize(("body", "sentence"), [
    ("@pytest.mark.ranks(3)\n@pytest.mark.mesh((2, 2))\ndef test_a(): pass",
     "@pytest.mark.mesh: (2, 2): that is a mesh of 4 ranks, and @pytest.mark.ranks says 3."),
    ("def test_a(rank): pass", "fixture rank: asked for outside a rank test"),
    ("@pytest.fixture\ndef model(mesh): pass\ndef test_a(model): pass", "fixture mesh: asked for outside a rank test"),
    ("def test_a(comms): pass", "fixture comms: asked for outside a rank test"),
    ("@pytest.mark.ranks\ndef test_a(world): pass", "fixture world: asked for in a rank test"),
    ("@pytest.fixture(scope='module')\ndef model(rank): pass\n@pytest.mark.ranks\ndef test_a(model): pass",
     "fixture model: asks for rank: it has module scope"),
    ("import unittest\nclass TestU(unittest.TestCase):\n    @pytest.mark.ranks(2, 4)\n    def test_a(self): pass",
     "@pytest.mark.ranks: (2, 4): several numbers"),
])  # fmt: skip
def test_a_test_that_asks_for_what_it_cannot_have_is_one_sentence(tried, body, sentence):
    assert sentence in sentence_of_error(tried(f"\n{body}\n{GOOD}"))


@pytest.mark.few(4)
@pytest.mark.parametrize(("option", "sentence"), [
    ("--ranks=0", "pytest: --ranks: 0: a number of ranks is"),
    ("--ranks=four", "pytest: --ranks: four: a number of ranks is"),
    (f"--ranks={'9' * 5000}", "9: a number of ranks is"),
    ("--ranks=65537", "pytest: --ranks: 65537: a number of ranks is"),
    ("--ranks-on=mpi", "pytest: --ranks-on: mpi: there is no such way to run."),
    ("--rank-schedule=pct:x", "pytest: --rank-schedule: 'pct:x': it is no POLICY"),
    ("--rank-flaky=0", "pytest: --rank-flaky: 0: a number of schedules is"),
    ("--rank-seed=-1", "pytest: --rank-seed: -1: a seed is"),
    ("--rank-leftovers=", "pytest: --rank-leftovers: : that is nothing to do about"),
    ("--rank-timeout=soon", "pytest: --rank-timeout: soon: a limit is"),
    ("-orank_trace=a\0b", "embedded null byte"),
    ("-oranks=none", "pytest: ranks: none: a number of ranks is"),
])  # fmt: skip
def test_an_option_that_makes_no_sense_is_one_sentence(tried, option, sentence):
    assert sentence in refusal(tried("def test_a(): pass", option))


def test_what_is_deselected_is_not_refused(tried):
    tried("def test_a(rank): pass\ndef test_b(): pass\n", "-k", "test_b").assert_outcomes(passed=1, deselected=1)


def test_a_run_in_this_process_leaves_one_copy_of_every_module_and_none_of_its_own(tried):
    before = dict(sys.modules)
    tried("import colorsys\n\ndef test_it():\n    pass\n").assert_outcomes(passed=1)
    assert "colorsys" in sys.modules and "test_it" not in sys.modules
    assert [name for name, module in before.items() if sys.modules.get(name) is not module] == []


LOADED = """
    import sys

    @pytest.fixture(autouse=True, scope="session")
    def at_first():
        assert ("localtensor.threads.run" in sys.modules) is {expected}

    {body}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("body", "expected"), [
    ("@pytest.mark.ranks(2)\n    def test_a(rank): pass", True), ("def test_a(world): pass", True), ("def test_a(): pass", False),
], ids=["a mark", "world", "neither"])  # fmt: skip
def test_the_engine_is_imported_before_the_first_test_where_there_are_rank_tests(body, expected, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n" + textwrap.dedent(LOADED.format(body=body, expected=expected))
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "localtensor"]
    ran = warm.run(command, cwd=tmp_path, timeout=100)
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr
