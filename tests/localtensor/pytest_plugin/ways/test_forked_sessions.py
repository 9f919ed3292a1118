"""`pytest --forked`: each test in a process of its own, with its ranks."""

import pytest

pytest.importorskip("pytest_forked", reason="needs pytest-forked")

PLAIN = """
    def test_plain():
        pass
"""
RANKS = PLAIN + """
    @pytest.mark.ranks(3)
    def test_sum(rank, tmp_path):
        total = torch.tensor(rank)
        dist.all_reduce(total)
        assert total == 3 and os.path.isdir(tmp_path)

    @pytest.mark.ranks(3)
    def test_fails(rank):
        assert rank % 2 == 5

    @pytest.mark.ranks(2)
    def test_skips():
        pytest.skip("not here")
"""  # fmt: skip


@pytest.mark.parametrize("on", ["threads", "gloo"])
def test_a_test_in_its_own_process_has_ranks_and_its_failure_comes_home(session, on):
    ran = session(RANKS, "--forked", "-p", "no:randomly", "--ranks-on", on)
    if "1 passed" not in ran.stdout and "2 passed" not in ran.stdout:
        alone = session(PLAIN, "--forked", "-p", "no:randomly")
        if alone.returncode:
            pytest.skip("this pytest-forked cannot run a plain test with this pytest")
    assert ran.returncode == 1 and "1 failed, 2 passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr
    assert f" of 3, at test_it.py:{session.line('% 2 == 5')} in test_fails" in ran.stdout
    assert all(f"  rank {rank}: assert ({rank} % 2) == 5" in ran.stdout for rank in range(3))
    assert 'Replay: pytest "test_it.py::test_fails"' in ran.stdout
