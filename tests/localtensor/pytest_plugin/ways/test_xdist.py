"""`pytest -n 2`: workers side by side, each with ranks, threads or processes, and failures that come home whole."""

import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("xdist", reason="needs pytest-xdist")

RANKS = """
    @pytest.fixture(scope="session")
    def shared(tmp_path_factory):
        return tmp_path_factory.getbasetemp().parent

    @pytest.mark.parametrize("turn", range(6))
    @pytest.mark.ranks(3)
    def test_sum(turn, rank, shared):
        total = torch.tensor(10 * turn + rank)
        dist.all_reduce(total)
        assert total == 30 * turn + 3
        group = dist.new_group([0, 2])
        dist.barrier()  # else who is through closes the connection that the other is still making
        dist.destroy_process_group(group)
        (shared / f"{os.environ['PYTEST_XDIST_WORKER']}-{turn}-{rank}").touch()

    @pytest.mark.ranks(3)
    def test_fails(rank):
        dist.barrier()
        assert rank % 2 == 5
"""


@pytest.mark.parametrize("on", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
def test_two_workers_do_not_meet_and_a_failure_comes_home_with_its_ranks(session, on):
    ran = session(RANKS, "-n", "2", "--ranks-on", on, "--basetemp", "base", "--junitxml", "found.xml", "-W", "error")
    assert ran.returncode == 1 and "1 failed, 6 passed" in ran.stdout, ran.stdout + ran.stderr
    done = sorted(path.name.split("-", 1) for path in (session.folder / "base").iterdir() if path.is_file())
    assert sorted(what for _, what in done) == [f"{turn}-{rank}" for turn in range(6) for rank in range(3)]
    assert {worker for worker, _ in done} == {"gw0", "gw1"}
    in_xml = ET.parse(session.folder / "found.xml").find(".//failure").text
    for text in (ran.stdout, in_xml):
        assert f" of 3, at test_it.py:{session.line('% 2 == 5')} in test_fails" in text, text
        assert all(f"  rank {rank}: assert ({rank} % 2) == 5" in text for rank in range(3)), text
        assert 'Replay: pytest "test_it.py::test_fails"' in text
