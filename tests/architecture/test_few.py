"""Of the cases of a test marked `few(n)` n run, spread evenly; all of them with --slow, or where they are asked for."""

import pytest

from tests.end_to_end.test_docs import ROOT

pytest_plugins = ["pytester"]

CASES = """
import pytest

@pytest.mark.few(3)
@pytest.mark.parametrize("case", range(10))
def test_many(case): pass

@pytest.mark.few(3)
@pytest.mark.parametrize("case", range(2))
def test_two(case): pass
"""


@pytest.mark.parametrize(
    ("chosen", "ran"),
    [
        (["test_cases.py"], ["many[0]", "many[3]", "many[6]", "two[0]", "two[1]"]),
        (["test_cases.py", "--slow", "-k", "many"], [f"many[{case}]" for case in range(10)]),
        (["test_cases.py", "-k", "many and not 0"], ["many[1]", "many[4]", "many[7]"]),
        ([f"test_cases.py::test_many[{case}]" for case in (1, 2, 3, 4)], [f"many[{case}]" for case in (1, 2, 3, 4)]),
    ],
    ids=["a few", "all", "a few of those with a name", "those that are named"],
)
def test_of_many_cases_a_few_run(pytester, chosen, ran):
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    slow: slow\n    few(n): few\n")
    pytester.makepyfile(test_cases=CASES)
    listed = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:randomly", *chosen).outlines
    assert [line.partition("::test_")[2] for line in listed if "::" in line] == ran
