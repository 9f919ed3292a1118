"""`--rank-trace DIR`: a trace of each rank test, of those that fail, too."""

import json

from tests.localtensor.pytest_plugin.test_init import refusal

pytest_plugins = ["pytester"]
TESTS = """
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("number", [1, 2])
    def test_sum(rank, number):
        x = torch.ones(number)
        torch.distributed.all_reduce(x)
        assert number == 1

    def test_plain(): pass
"""


def test_each_rank_test_has_a_trace(tried, tmp_path):
    folder = tmp_path / "new" / "traces"
    result = tried(TESTS, "--rank-trace", str(folder))
    result.assert_outcomes(passed=2, failed=1)
    traces = {file.name: json.loads(file.read_text()) for file in folder.iterdir()}
    assert sorted(traces) == ["test_it.py_test_sum[1].json", "test_it.py_test_sum[2].json"]
    for name, trace in traces.items():
        calls = [event for event in trace["traceEvents"] if event.get("cat") == "call" and event["pid"] == 1]
        assert [call["name"] for call in calls] == ["all_reduce"] * 2
        assert ("error" in trace["otherData"]) == ("[2]" in name)


def test_a_folder_that_cannot_be_made_is_refused(tried, tmp_path):
    (tmp_path / "file").write_text("")
    sentence = refusal(tried(TESTS, "--rank-trace", str(tmp_path / "file" / "x")))
    assert sentence.startswith("pytest: --rank-trace: ") and "it cannot be made (Not a directory)." in sentence


def test_real_processes_are_not_traced(tried, tmp_path):
    sentence = refusal(tried(TESTS, "--rank-trace", str(tmp_path), "--ranks-on", "gloo"))
    assert "--rank-trace" in sentence and "threads" in sentence


def test_help_names_the_option(tried):
    assert "--rank-trace=DIR" in tried("", "--help").text
