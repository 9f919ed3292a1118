import pytest

pytest.importorskip("spmd_types")

from strategies.model.oracle import run_oracle
from strategies.torch_api.rank_runs import RankProcesses, returned_values
from strategies.validation.probe import check_claims
from strategies.validation.sources import functions
from strategies.validation.sources.registry import source_named
from strategies.validation.sources.spmd_types import collectives, typed
from strategies.validation.sources.spmd_types import collectives_two_axes as two


def judged(label, dst, other):
    """The instances of a call and of its gradient; empty where the checker refuses it."""
    source, found = source_named("spmd_types"), []
    assert label in source.labels.values()
    (call,) = [one for one in two.calls((label,)) if (one.kwargs["dst"], one.kwargs["other"]) == (dst, other)]
    sample = functions.sample_of("spmd_types", call)
    for one in (sample, *source._gradient_samples(call, sample, 0)):
        oracle = run_oracle(one)
        assert not source.about(one, oracle, 0).claims(3)
        found += check_claims(one, oracle, 2, source.about(one, oracle, 0).claims(2), seed=0)
    return found


def verdicts(*which):
    return [i.verdict.value for i in judged(*which)]


@pytest.mark.parametrize("axis", two.AXES)
@pytest.mark.parametrize(("call", "dst", "other"), [
    ("all_reduce(P)", "R", "S(0)"), ("all_reduce(P)", "I", "P"), ("all_gather(S(1))", "R", "S(0)"),
    ("reduce_scatter(P)", "S(0)", "R"), ("all_to_all(S(0))", "S(1)", "P"), ("convert(R)", "S(0)", "S(1)"),
    ("redistribute(P)", "S(1)", "P"),
])  # fmt: skip
def test_a_collective_over_one_axis_keeps_the_layout_on_the_other(axis, call, dst, other):
    assert verdicts(f"{call} over the {axis} of two axes", dst, other) == ["sound", "sound"]


def test_gathering_the_outer_cut_of_a_dim_that_both_axes_cut_is_refused():
    label = "all_gather(S(0)) over the {} of two axes"
    assert verdicts(label.format("first"), "R", "S(0)") == []
    assert verdicts(label.format("second"), "R", "S(0)") == ["sound", "sound"]


def test_a_wrong_type_on_the_other_axis_is_found(monkeypatch):
    right = typed.layouts_on
    monkeypatch.setattr(typed, "layouts_on", lambda x, axes: right(x, axes)[::-1])
    assert set(verdicts("all_reduce(P) over the first of two axes", "R", "S(0)")) == {"unsound"}


@pytest.mark.slow
def test_a_wrong_collective_is_shown_by_four_processes(monkeypatch):
    from strategies.sweep.confirmation import run_script
    from strategies.validation.finding import Candidate, case_of

    monkeypatch.setattr(collectives, "_same", lambda x, ranks: 2 * x)
    source = source_named("spmd_types")
    wrong = judged("all_reduce(P) over the second of two axes", "R", "S(1)")
    assert {i.verdict.value for i in wrong} == {"unsound"}
    case = case_of(Candidate(wrong[0]).instance, 0)
    text = source.script(case, "wrong")
    assert source.mesh(case) == (2, 2) and "localtensor" not in text and "group('second')" in text
    with RankProcesses("gloo", 60.0) as processes:
        values = returned_values(processes.run(run_script, [text.replace("{name}", "wrong.py")] * 4))
    assert all(wrong for wrong, _ in values)
