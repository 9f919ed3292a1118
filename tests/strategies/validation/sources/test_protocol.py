from collections import Counter

import pytest
import torch

from strategies.model.oracle import run_oracle
from strategies.model.settings import BadSource
from strategies.model.verdict import Verdict
from strategies.validation.finding import case_of
from strategies.validation.probe import check_claims
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.protocol import (
    FunctionSource,
    NamedLayout,
    RefusedLayouts,
    SourceRaises,
    layout_tuples,
    replicated,
    sharded,
    summed,
)


class Toy(FunctionSource):
    """Claims that a function keeps the layout of its only tensor."""

    name = "toy_protocol"

    def __init__(self, function, x, *args):
        self.given = FunctionCall("torch.some", function, (x, *args))

    def calls(self, names, seed):
        yield self.given

    def layouts(self, x, ranks):
        return [replicated(), summed(), *(sharded(d) for d in range(x.ndim))]

    def outputs(self, call, inputs, ranks):
        return inputs


def verdicts(source, ranks=2):
    """The verdict on each claim, by the op's overload and the source's own words."""
    found = {}
    for sample in source.samples((), 0):
        oracle = run_oracle(sample)
        about = source.about(sample, oracle, 0)
        for instance in check_claims(sample, oracle, ranks, about.claims(ranks), seed=0):
            found[sample.op.rpartition(".")[2], instance.source] = instance.verdict
    return found


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_right_source_is_sound_forward_and_backward():
    found = verdicts(Toy(torch.neg, X))
    assert set(found.values()) == {Verdict.SOUND}
    assert set(found) == {(way, f"{p} -> {p}") for way in ("default", "gradient") for p in ("R", "P", "S(0)", "S(1)")}


def test_a_square_of_parts_is_unsound_both_ways():
    found = verdicts(Toy(torch.square, X))
    assert {key for key, verdict in found.items() if verdict is Verdict.UNSOUND} == {
        ("default", "P -> P"), ("gradient", "P -> P"),
    }  # fmt: skip


def test_a_running_sum_is_unsound_along_its_own_dim_only():
    found = verdicts(Toy(torch.cumsum, X, 0))
    wrong = {key for key, verdict in found.items() if verdict is Verdict.UNSOUND}
    assert wrong == {("default", "S(0) -> S(0)"), ("gradient", "S(0) -> S(0)")}


def test_a_claim_that_the_gradient_is_the_same_on_each_rank_is_distinguished_from_that_it_is_a_part():
    class Invariant(Toy):
        def layouts(self, x, ranks):
            return [NamedLayout("I", replicated().meaning, replicated().meaning)]

        def outputs(self, call, inputs, ranks):
            return [replicated()]  # takes the gradient to be a part

    assert verdicts(Invariant(torch.neg, X)) == {
        ("default", "I -> R"): Verdict.SOUND, ("gradient", "I -> R"): Verdict.UNSOUND,
    }  # fmt: skip


def test_shards_of_any_sizes_are_right_only_where_the_source_says_so():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    source = Toy(torch.flatten, x)
    source.layouts = lambda x, ranks: [sharded(0)]  # 9 and 6 elements, where torch.chunk has 8 and 7
    assert verdicts(source)["default", "S(0) -> S(0)"] is Verdict.UNSOUND
    source.concatenated = True
    assert verdicts(source)["default", "S(0) -> S(0)"] is Verdict.SOUND


def test_refusals_are_no_claims_and_errors_are_kept_as_sentences():
    class Picky(Toy):
        def outputs(self, call, inputs, ranks):
            if inputs[0].name == "P":
                raise RefusedLayouts("no parts")
            if inputs[0].name == "S(1)":
                raise SourceRaises("KeyError: 1")
            return inputs

    source = Picky(torch.neg, X)
    sample = next(iter(source.samples((), 0)))
    about = source.about(sample, run_oracle(sample), 0)
    assert [claim.source for claim in about.claims(2)] == ["R -> R", "S(0) -> S(0)"]
    assert about.failures == ["KeyError: 1"]


def test_tuples_have_the_same_layout_for_all_first_and_each_once():
    rows = [[replicated(), summed(), sharded(0)], [replicated(), summed()]]
    found = [tuple(one.name for one in row) for row in layout_tuples(rows)]
    assert found[:2] == [("R", "R"), ("P", "P")]
    assert max(Counter(found).values()) == 1 and len(found) == 6


def scripts(source, ranks):
    """The script of the first wrong claim about each sample."""
    for sample in source.samples((), 0):
        oracle = run_oracle(sample)
        tried = check_claims(sample, oracle, ranks, source.about(sample, oracle, 0).claims(ranks), seed=0)
        bad = [instance for instance in tried if instance.verdict is Verdict.UNSOUND]
        yield source.script(case_of(bad[0], 0), bad[0].evidence.reason)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_script_asks_nothing_of_ours(ranks):
    for text in scripts(Toy(torch.square, X), ranks):
        script = {}
        exec(compile(text, "script", "exec"), script)
        ten = torch.arange(10.0)
        assert script["verdict"](ten, ten + 1e-9, 1e-6) == "" and script["verdict"](ten, ten[:9], 0.0) == "  WRONG"
        off = ten.index_fill(0, torch.tensor(9), 7.0)
        assert script["verdict"](ten, off, 0.0) == "  WRONG, first at [9]: 9.0 for 7.0"
        assert script["verdict"](None, ten, 0.0) == "  WRONG"
        assert "localtensor" not in text and "strategies" not in text and f"--nproc-per-node {ranks}" in text


@pytest.mark.parametrize("made", ["P", "S(1)"])
def test_pieces_of_different_sizes_make_no_whole_in_a_script(made):
    scope = {"__name__": "script"}
    exec(compile(next(scripts(Toy(torch.square, X), 2)), "script", "exec"), scope)
    even, uneven = [X[:2], X[2:4]], [X[:3], X[3:]]
    assert scope["joined"](even, made, 0).shape == ((2, 4) if made == "P" else (2, 8))
    assert scope["joined"](uneven, made, 0) is None and scope["joined"]([None, None], made, 0) is None
    assert scope["joined"](uneven, "S(0)", 0).equal(X)
    assert scope["some"](None) == "pieces that make no whole"


def squared(x):
    return x * x


SHORT = squared  # the first name counts


@pytest.mark.parametrize(("label", "function", "called", "imported"), [
    ("torch.square", torch.square, "torch.square(x[0])", ""),
    ("squared", squared, "squared(x[0])", f"\nfrom {__name__} import squared\n"),
    ("my_kernels.square", squared, "squared(x[0])", f"\nfrom {__name__} import squared\n"),
    ("given", lambda x: x * x, "given(x[0])", ""),
], ids=["of torch", "by its name", "under another label", "in no module"])  # fmt: skip
def test_a_script_imports_a_function_that_is_not_torchs(label, function, called, imported):
    source, call = Toy(function, X), FunctionCall(label, function, (X,))
    assert source.code(call, "x[0]") == called
    assert source.wording(call, [summed()], [summed()]).imports == imported


class Failing(Toy):
    """A source whose `outputs` fails: by an exception, or by a value that is no layout."""

    def __init__(self, answer):
        super().__init__(torch.neg, X)
        self.answer = answer

    def outputs(self, call, inputs, ranks):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(("answer", "sentence"), [
    (KeyError("oops"), "KeyError: 'oops', in outputs"),
    (AttributeError("no such field"), "AttributeError: no such field, in outputs"),
    (["S(0)"], "TypeError: not one layout for each of 1 results: 'S(0)', in outputs"),
    (None, "TypeError: 'NoneType' object is not iterable, in outputs"),
    ((sharded(0), sharded(0)), "TypeError: not one layout for each of 1 results: S(0), S(0), in outputs"),
])  # fmt: skip
def test_an_error_of_a_source_is_no_finding(answer, sentence):
    source = Failing(answer)
    sample = next(iter(source.samples((), 0)))
    about = source.about(sample, run_oracle(sample), 0)
    assert about.claims(2) == [] and set(about.failures) == {sentence}


def test_an_error_in_layouts_is_no_finding():
    source = Toy(torch.neg, X)
    source.layouts = lambda x, ranks: x.no_such_field
    for sample in source.samples((), 0):
        about = source.about(sample, run_oracle(sample), 0)
        assert about.claims(2) == []
        assert about.failures == ["AttributeError: 'Tensor' object has no attribute 'no_such_field', in layouts"]


@pytest.mark.parametrize(("given", "sentence"), [
    (ZeroDivisionError("too small"), "ZeroDivisionError: too small, in calls. Fix that first, or uninstall it."),
    (sharded(0), "TypeError: no FunctionCall: S(0), in calls. Fix that first, or uninstall it."),
])  # fmt: skip
def test_calls_that_cannot_be_drawn_are_refused_in_one_sentence(given, sentence):
    class Drawing(Toy):
        def calls(self, names, seed):
            if isinstance(given, Exception):
                raise given
            yield given

    with pytest.raises(BadSource) as caught:
        list(Drawing(torch.neg, X).samples((), 0))
    assert str(caught.value) == f"localtensor validate: --source: toy_protocol: {sentence}"


def test_a_call_of_a_function_that_is_not_listed_is_refused():
    source = Toy(torch.neg, X)
    source.functions = lambda: {"torch.abs": torch.abs}
    with pytest.raises(BadSource, match=r"functions lacks torch.some, which calls yields\. List every label there\."):
        list(source.samples((), 0))
