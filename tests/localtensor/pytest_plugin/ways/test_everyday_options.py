"""-x, --lf and --junitxml with rank tests."""

import xml.etree.ElementTree as ET

pytest_plugins = ["pytester"]

RANKS = """
    @pytest.mark.ranks(2)
    def test_first(rank):
        assert os.environ["RANK"] == str(rank)

    @pytest.mark.ranks(2)
    def test_fails(rank):
        assert rank == 5

    @pytest.mark.ranks(2)
    def test_last(rank):
        assert rank < 2
"""


def test_x_stops_at_the_failure_of_any_rank_and_lf_runs_that_test_alone_again(session, pytester):
    said = session.inside(pytester, RANKS, "-x", "-p", "no:randomly", "--junitxml", str(session.folder / "found.xml"))
    assert "1 failed, 1 passed" in said, said
    suite = ET.parse(session.folder / "found.xml").find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    failure = suite.find(".//failure")
    assert failure.get("message") in ("assert 0 == 5", "assert 1 == 5")
    assert "First cause: rank " in failure.text and "Replay: pytest" in failure.text
    again = session.inside(pytester, RANKS, "--lf", "-p", "no:randomly", "-rA")
    assert "1 failed, 2 deselected" in again and "test_it.py::test_fails - assert" in again, again
