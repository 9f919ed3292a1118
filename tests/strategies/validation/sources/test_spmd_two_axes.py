import pytest
import torch

pytest.importorskip("spmd_types")

from strategies.inputs.variants.all_variants import adverse
from strategies.model.oracle import run_oracle
from strategies.torch_api.rank_runs import RankProcesses, returned_values
from strategies.validation.probe import check_claims
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.registry import source_named
from strategies.validation.sources.spmd_types import op_table, two_axes, typed


def judged(label, *args, values=0, **kwargs):
    """The instances of one call and of its gradients, with every kind of layouts on the second axis.

    `values` is the number of other values that each is tried with.
    """
    source = source_named("spmd_types")
    assert source.labels
    function = op_table.functions()[label]
    plain = FunctionCall(label, function, args, kwargs)
    found = []
    for number, call in enumerate(two_axes.calls(label, function, [plain])):
        sample = two_axes.functions.sample_of("spmd_types", call)
        for one in (sample, *source._gradient_samples(call, sample, number)):
            oracle = run_oracle(one)
            about = source.about(one, oracle, 0)
            other = adverse(one, oracle, 0, seed=0, budget=values)
            found += [(i, one, oracle) for i in check_claims(one, oracle, 2, about.claims(2), seed=0, variants=other)]
    return found


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = drawn(4, 8), drawn(8, 4, seed=2)


def words(found):
    second = [i.sample.call.args[1].partition("second_axis=")[2].strip("'") for i, _, _ in found]
    return {f"{i.source} | {row}" for (i, one, _), row in zip(found, second, strict=True) if one.op.endswith("default")}


def test_a_product_is_sound_with_a_shard_on_one_axis_and_parts_on_the_other():
    found = judged("torch.mul", X, drawn(4, 8, seed=3))
    assert {i.verdict.value for i, _, _ in found} == {"sound"}
    assert any(one.op.endswith("gradient") for _, one, _ in found)
    assert any(text.startswith("S(") and text.endswith("| P, R") for text in words(found))


def test_a_contraction_is_sound_on_two_axes_forward_and_backward():
    found = judged("torch.matmul", X, Y)
    assert {i.verdict.value for i, _, _ in found} == {"sound"} and len(found) > 12


def test_parts_on_the_second_axis_of_infinite_values_are_no_fault():
    found = judged("torch.mv", X, drawn(8, seed=4), values=99)
    assert {i.verdict.value for i, _, _ in found} == {"sound"}


def test_types_on_the_wrong_axes_are_found(monkeypatch):
    right = typed.layouts_on
    monkeypatch.setattr(typed, "layouts_on", lambda x, axes: right(x, axes)[::-1])
    verdicts = {i.verdict.value for i, _, _ in judged("torch.mul", X, drawn(4, 8, seed=3))}
    assert "unsound" in verdicts


def test_what_is_not_drawn_is_counted():
    source = source_named("spmd_types")
    assert source.labels
    (call, *_) = two_axes.calls(
        "torch.mul", torch.mul, [FunctionCall("torch.mul", torch.mul, (X, drawn(4, 8, seed=3)))]
    )
    tried, every = source.drawn(call, 2)
    assert tried == two_axes.MOST_FIRST < every and source.drawn(call, 3) is None


def test_a_claim_that_is_wrong_on_one_axis_is_not_drawn_on_two():
    index = torch.tensor([[0, 1, 1, 0]])
    assert not any("P, P" in text for text in words(judged("torch.gather", X, 0, index.expand(2, 4).contiguous())))


def test_parts_are_exact_and_make_the_value():
    for x in (X, torch.arange(8), torch.tensor([torch.inf, 1.0])):
        one, two = two_axes.inner_pieces(x, typed.P.meaning, 0)
        assert torch.equal(one + two, x) and not (x.numel() > 2 and torch.equal(one, x))


@pytest.mark.slow
def test_a_wrong_claim_on_two_axes_is_shown_by_four_processes(monkeypatch):
    from strategies.sweep.confirmation import run_script
    from strategies.validation.finding import Candidate, case_of

    monkeypatch.setattr(two_axes, "MOST_FIRST", 99)
    source = source_named("spmd_types")
    wrong = [i for i, _, _ in judged("torch.squeeze", drawn(4, 1, 4, 1)) if i.verdict.value == "unsound"]
    case = case_of(Candidate(wrong[0]).instance, 0)
    text = source.script(case, "wrong")
    assert source.mesh(case) == (2, 2) and "localtensor" not in text
    with RankProcesses("gloo", 60.0) as processes:
        values = returned_values(processes.run(run_script, [text.replace("{name}", "wrong.py")] * 4))
    assert all(wrong for wrong, _ in values) and "S(0), S(0)" in values[0][1]
