"""Rank tests beside other plugins of pytest; `pip install -e '.[plugins]'` installs them, and without one its test is skipped."""

import os
from importlib.util import find_spec

import pytest


@pytest.fixture
def beside(session):
    """Called with a plugin's module, the text of a test file and options, gives the run of pytest with that plugin and ours."""

    def run(module, source, *options, warning="error"):
        if find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"needs {module}")
        session.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        ours = ["-p", "localtensor.pytest_plugin", "-p", module, "-W", warning]
        done = session(source, *ours, *options)
        done.text = done.stdout + done.stderr
        return done

    return run


@pytest.mark.parametrize(("module", "mark"), [("pytest_asyncio.plugin", "asyncio"), ("anyio.pytest_plugin", "anyio")])
def test_coroutines_run_in_the_loop_of_their_rank(module, mark, beside):
    scope = ["-o", "asyncio_default_fixture_loop_scope=function"] if mark == "asyncio" else []
    done = beside(module, f"""
        import asyncio

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        @pytest.mark.{mark}
        @pytest.mark.ranks(2)
        async def test_ranks(rank):
            await asyncio.sleep(0)
            total = torch.tensor(rank)
            dist.all_reduce(total)
            assert total == 1 and asyncio.get_running_loop().is_running()

        @pytest.mark.{mark}
        async def test_plain():
            await asyncio.sleep(0)

        @pytest.mark.{mark}
        @pytest.mark.ranks(2)
        async def test_fails(rank):
            await asyncio.sleep(0)
            assert rank == 0
    """, *scope)  # fmt: skip
    assert "1 failed, 2 passed" in done.stdout and "rank 1: assert 1 == 0" in done.stdout, done.text


def test_coverage_sees_what_ranks_run(beside, session):
    (session.folder / "helper.py").write_text("def f(rank):\n    if rank:\n        return 1\n    return 0\n")
    done = beside("pytest_cov.plugin", """
        import sys

        sys.path.insert(0, os.path.dirname(__file__))
        import helper

        @pytest.mark.ranks(2)
        def test_it(rank):
            assert helper.f(rank) == rank
    """, "--cov=helper", "--cov-report=term-missing", warning="default")  # fmt: skip
    assert done.returncode == 0 and "100%" in done.stdout, done.text


def test_mocks(beside):
    done = beside("pytest_mock", """
        @pytest.mark.ranks(2)
        def test_it(rank, mocker):
            stub = mocker.stub()
            stub(rank)
            dist.barrier()
            stub.assert_called_once_with(rank)

        @pytest.mark.ranks(2)
        def test_patched(mocker):
            mocker.patch("os.getcwd", return_value="here")
            dist.barrier()
            assert os.getcwd() == "here"

        def test_it_is_gone():
            assert os.getcwd() != "here"
    """)  # fmt: skip
    assert "3 passed" in done.stdout, done.text


def test_a_failed_test_runs_again_with_its_ranks(beside):
    done = beside("pytest_rerunfailures", """
        TURNS = []

        @pytest.mark.flaky(reruns=2)
        @pytest.mark.ranks(2)
        def test_it(rank):
            if rank == 0:
                TURNS.append(rank)
            dist.barrier()
            assert len(TURNS) == 2
    """)  # fmt: skip
    assert "1 passed, 1 rerun" in done.stdout, done.text


def test_snapshots(beside):
    source = """
        @pytest.mark.ranks(2)
        def test_it(rank, snapshot):
            assert snapshot(name=f"rank {rank}") == {"twice": 2 * rank}
    """
    assert "2 snapshots generated" in beside("syrupy", source, "--snapshot-update").stdout
    done = beside("syrupy", source)
    assert done.returncode == 0 and "2 snapshots passed" in done.stdout, done.text
    assert "1 failed" in beside("syrupy", source.replace("2 * rank", "3 * rank")).stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="pytest-timeout has another method there")
def test_a_time_limit_shows_where_the_ranks_are(beside):
    done = beside("pytest_timeout", """
        @pytest.mark.ranks(2)
        def test_quick(rank):
            dist.barrier()

        @pytest.mark.timeout(5)
        @pytest.mark.ranks(2)
        def test_spins(rank):
            while rank:
                pass
            dist.barrier()
    """, "--timeout=100")  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.text
    section = done.stdout.split("- ranks -")[1]
    assert "  rank 1 was running at test_it.py:" in section and "  rank 0 waits for rank 1 in barrier #0" in section
