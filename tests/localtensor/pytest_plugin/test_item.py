"""Test bodies as rank programs."""

import re
import shlex

import pytest

pytest_plugins = ["pytester"]


def replay_of(result):
    [line] = [line for line in result.text.splitlines() if line.startswith("Replay: ")]
    return shlex.split(line.removeprefix("Replay: "))[1:]


def test_the_body_runs_on_every_rank(tried):
    tried(
        """
        @pytest.mark.ranks(4)
        def test_sum(rank, world_size, comms, tmp_path):
            x = torch.tensor(float(rank))
            dist.all_reduce(x)
            assert x.item() == 6 and world_size == dist.get_world_size() == 4 and dist.get_rank() == rank
            assert comms.kinds == ["all_reduce"] and comms.bytes == 4
            (tmp_path / str(rank)).write_text("here")
            dist.barrier()
            assert len(list(tmp_path.iterdir())) == 4
            assert comms.of_all_ranks.count("barrier") == 4

        @pytest.mark.mesh((2, 3), names=("dp", "tp"))
        def test_mesh(mesh):
            assert mesh.mesh_dim_names == ("dp", "tp") and mesh.shape == (2, 3)

        @pytest.mark.ranks(3)
        def test_mesh_of_one_dim(mesh):
            assert mesh.shape == (3,) and mesh.mesh_dim_names is None

        @pytest.mark.ranks(2, seed=7)
        def test_seed():
            mine, again = torch.rand(2), torch.Generator().manual_seed(7)
            assert torch.equal(mine, torch.rand(2, generator=again))
        """
    ).assert_outcomes(passed=4)


def test_several_numbers_make_a_test_of_each(tried):
    result = tried(
        """
        @pytest.mark.ranks(2, 4)
        @pytest.mark.parametrize("n", [1, 3])
        def test_a(n, world_size):
            assert world_size in (2, 4)

        @pytest.mark.parametrize("n", [3, pytest.param(5, marks=pytest.mark.ranks(5))])
        @pytest.mark.usefixtures("rank")
        def test_b(n):
            assert dist.get_world_size() == n
        """,
        "-v", "--ranks=3",
    )  # fmt: skip
    result.assert_outcomes(passed=6)
    assert re.findall(r"::test_a\[(\S+)\]", result.text) == ["ranks=2-1", "ranks=2-3", "ranks=4-1", "ranks=4-3"]


def test_methods_have_an_object_of_their_own_on_each_rank(tried):
    tried(
        """
        import unittest

        @pytest.mark.ranks(3)
        class TestMethods:
            def setup_method(self):
                self.seen = "set up"

            def test_own(self, rank):
                assert self.seen == "set up"
                self.seen = rank
                dist.barrier()
                assert self.seen == rank

            @staticmethod
            def test_static(rank):
                assert rank in range(3)

            @classmethod
            def test_class(cls, rank):
                assert cls is TestMethods

        class TestUnit(unittest.TestCase):
            def setUp(self):
                self.seen = "set up"

            @pytest.mark.ranks(3)
            def test_own(self):
                self.seen = dist.get_rank()
                dist.barrier()
                self.assertEqual(self.seen, dist.get_rank())

            @pytest.mark.ranks(2)
            @unittest.expectedFailure
            def test_expected(self):
                self.assertEqual(dist.get_rank(), 0)

        class TestAsyncUnit(unittest.IsolatedAsyncioTestCase):
            @pytest.mark.ranks(2)
            async def test_async(self):
                self.seen = dist.get_rank()
                dist.barrier()
                assert self.seen == dist.get_rank()
        """
    ).assert_outcomes(passed=5, xfailed=1)


def test_async_tests_run_on_a_loop_of_the_rank(tried):
    tried(
        """
        import asyncio

        @pytest.mark.ranks(2)
        async def test_async(rank):
            await asyncio.sleep(0)
            dist.barrier()
            left = asyncio.create_task(asyncio.sleep(100))
            assert asyncio.get_running_loop().is_running()
        """
    ).assert_outcomes(passed=1)


def test_what_pytest_offers_in_a_body_works_on_ranks(tried):
    tried(
        """
        import logging, os, subprocess, warnings

        @pytest.mark.ranks(2)
        def test_a(rank, capsys, caplog, monkeypatch, record_property):
            with pytest.raises(ZeroDivisionError, match="by zero"):
                1 / 0
            with pytest.warns(UserWarning, match="^mine"):
                dist.barrier()
                warnings.warn(f"mine {rank}")
                dist.barrier()
            print("rank", rank)
            logging.getLogger("a").warning("rank %d", rank)
            monkeypatch.setenv("MASTER_PORT", str(rank))
            dist.barrier()
            assert os.environ["MASTER_PORT"] == str(rank)
            assert caplog.messages == [f"rank {rank}"]
            dist.barrier()
            assert capsys.readouterr().out.splitlines() == [f"rank {rank}"]

        def test_environment():
            assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ
        """
    ).assert_outcomes(passed=2)


def test_outcomes_inside_of_ranks_are_the_outcome_of_the_test(tried):
    result = tried(
        """
        import sys

        @pytest.mark.ranks(3)
        def test_skip(rank):
            if rank == 1:
                pytest.skip("not here")

        @pytest.mark.ranks(3)
        def test_skip_that_leaves_the_others_in_a_barrier(rank):
            if rank == 1:
                pytest.skip("left them")
            dist.barrier()

        @pytest.mark.ranks(3)
        def test_skip_and_fail(rank):
            if rank == 0:
                pytest.skip("not here")
            assert rank == 1

        @pytest.mark.ranks(3)
        @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
        def test_xfail(rank):
            1 / rank

        @pytest.mark.ranks(3)
        @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
        def test_xfail_that_is_something_else(rank):
            assert rank

        @pytest.mark.ranks(3)
        @pytest.mark.xfail(strict=True)
        def test_xpass():
            pass

        @pytest.mark.ranks(3)
        def test_xfail_inside(rank):
            if rank == 2:
                pytest.xfail("known")

        @pytest.mark.ranks(3)
        def test_system_exit(rank):
            sys.exit(rank)

        from localtensor.errors import KindMismatch

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(raises=KindMismatch, strict=True)
        def test_fault(rank):
            dist.all_reduce(torch.ones(1)) if rank else dist.barrier()
        """,
        "-rs",
    )
    result.assert_outcomes(skipped=1, failed=5, xfailed=3)
    assert "not here (on rank 1 of 3)" in result.text
    assert "rank 1: Skipped: left them" in result.text and "ranks 0, 2 wait for others since" in result.text


def test_what_ends_the_session_ends_it_from_a_rank_too(tried):
    body = """
        @pytest.mark.ranks(2)
        def test_a(rank):
            if rank:
                {}
            dist.barrier()

        def test_b():
            pass
        """
    stopped = tried(body.format("pytest.exit('enough', returncode=9)"))
    assert stopped.ret == 9 and "Exit: enough" in stopped.text
    assert "no tests ran" in stopped.text


STRICT = """
    pytestmark = pytest.mark.filterwarnings("error")
"""
LEFT = """
    @pytest.mark.ranks(2)
    def test_left():
        dist.new_group([0, 1])

    @pytest.mark.mesh((2, 2))
    def test_mesh(mesh):
        dist.all_reduce(torch.ones(1), group=mesh.get_group(0))

    def test_of_world(world):
        world.run(dist.new_group, (0, 1))
"""


@pytest.mark.slow
def test_groups_that_are_left_are_no_matter_unless_asked(tried, pytester):
    tried(STRICT + LEFT).assert_outcomes(passed=3)
    pytester.makeini("[pytest]\nrank_leftovers = warn\n")
    warned = tried(LEFT)
    warned.assert_outcomes(passed=3, warnings=2)
    assert "LeftoverWarning: new_group: group" in warned.text and "test_it.py::test_left" in warned.text
    failed = tried(LEFT, "--rank-leftovers=raise")
    failed.assert_outcomes(passed=1, failed=2)
    assert failed.text.count("GroupsLeftOver: new_group: group") >= 2
    assert replay_of(failed)[1:3] == ["--rank-leftovers", "raise"]
    marked = LEFT.replace("ranks(2)", "ranks(2, leftovers='ignore')")
    tried(STRICT + marked).assert_outcomes(passed=2, failed=1)


ORDER = """
    pytest.ORDER = []

    @pytest.mark.ranks(3)
    def test_order(rank):
        if rank == 0:
            pytest.ORDER.clear()
        dist.barrier()
        pytest.ORDER.append(rank)
        dist.barrier()
        assert pytest.ORDER[0] == 2, pytest.ORDER
"""


@pytest.mark.slow
def test_a_flaky_test_is_found_and_its_replay_fails_alike(tried):
    tried(ORDER).assert_outcomes(passed=1)
    result = tried(ORDER, "--rank-flaky=5")
    result.assert_outcomes(failed=1)
    assert "Flaky: under 1 of 5 schedules it passed, then it failed under shuffled:0." in result.text
    words = replay_of(result)
    assert words[0] == "test_it.py::test_order" and words[1] == "--rank-schedule"
    again = tried(ORDER, *words)
    again.assert_outcomes(failed=1)
    seen = re.compile(r"E +AssertionError: (\[.*\])")
    assert seen.findall(again.text) == seen.findall(result.text) != []
    assert replay_of(again) == words


@pytest.mark.slow
def test_a_mark_may_ask_for_several_schedules(tried):
    marked = ORDER.replace("ranks(3)", "ranks(3, schedules=5)")
    result = tried(marked)
    result.assert_outcomes(failed=1)
    assert "Flaky: under 1 of 5 schedules it passed, then it failed under shuffled:0." in result.text
    tried(marked, "--rank-schedule=round_robin").assert_outcomes(passed=1)
    tried(marked, "--rank-flaky=1").assert_outcomes(passed=1)
    always = tried(marked.replace("== 2", "== 9"))
    always.assert_outcomes(failed=1)
    assert "Flaky" not in always.text and replay_of(always)[1:3] == ["--rank-schedule", "round_robin"]


def test_a_replay_says_what_the_marks_do_not_and_the_typed_schedule_wins(tried):
    body = """
        def test_seed(rank):
            assert torch.rand(1).item() < 0, torch.initial_seed()
        """
    words = replay_of(tried(body, "--ranks=2", "--rank-seed=5"))
    assert words == ["test_it.py::test_seed", "--ranks", "2", "--rank-schedule", "round_robin", "--rank-seed", "5"]
    marked = ORDER.replace("ranks(3)", 'ranks(3, schedule="shuffled:0")')
    tried(marked).assert_outcomes(failed=1)
    tried(marked, "--rank-schedule=round_robin").assert_outcomes(passed=1)


def test_a_replay_names_the_file_from_where_pytest_was_called(tried, pytester, monkeypatch):
    (pytester.path / "below").mkdir()
    pytester.makeini("[pytest]")
    pytester.makepyfile(test_other="")
    monkeypatch.chdir(pytester.path / "below")
    (pytester.path / "test_odd.py").write_text(
        "import pytest\n\n\n@pytest.mark.ranks(1)\n@pytest.mark.parametrize('x', ['$HOME'])\ndef test_a(x):\n    assert not x\n"
    )
    words = replay_of(tried("", "../test_odd.py"))
    assert words[0] == "../test_odd.py::test_a[$HOME]"


def test_a_test_past_its_limit_is_ended(tried):
    result = tried(
        """
        @pytest.mark.ranks(2, timeout=0.2)
        def test_a(rank):
            while rank:
                pass
        """
    )
    result.assert_outcomes(failed=1)
    assert (
        "NeverEnded: run: timeout: timeout=0.2: the run has not ended in time; rank 1 was running at test_it.py"
        in result.text
    )


def test_given_runs_each_example_on_the_ranks(tried):
    result = tried(
        """
        from hypothesis import assume, given, note, settings, strategies as st

        pytest.MADE = []

        @pytest.fixture
        def tenfold(rank):
            pytest.MADE.append(rank)
            return rank * 10

        @pytest.mark.ranks(2)
        @settings(max_examples=10, database=None, derandomize=True)
        @given(x=st.integers(-9, 9))
        def test_right(rank, x, tenfold):
            assume(x != 3)
            y = torch.tensor(x + rank)
            dist.all_reduce(y)
            assert y.item() == 2 * x + 1 and tenfold == 10 * rank

        def test_fixtures_were_made_for_each_example():
            assert pytest.MADE.count(0) == pytest.MADE.count(1) >= 10

        class TestMethod:
            @pytest.mark.ranks(2)
            @settings(max_examples=5, database=None, derandomize=True)
            @given(data=st.data())
            def test_own(self, rank, data):
                self.seen = data.draw(st.integers()), rank
                dist.barrier()
                assert self.seen[1] == rank

        @pytest.mark.ranks(2)
        @settings(max_examples=50, database=None, derandomize=True)
        @given(x=st.integers(0, 999))
        def test_wrong(rank, x):
            note(f"noted by {rank}")
            y = torch.tensor(x)
            dist.all_reduce(y)
            assert y.item() < 100
        """,
        "--rank-schedule=shuffled:3",
    )
    result.assert_outcomes(passed=3, failed=1)
    assert "x=50" in result.text and "rank=<rank: a value in each rank>" in result.text
    assert "noted by 0" in result.text and "noted by 1" in result.text
    assert replay_of(result)[1:] == ["--rank-schedule", "shuffled:3", "--rank-seed", "0"]
