"""What a book says of one call, and whether it holds, in few words: for the tests of all families of rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from localtensor.layout.spec import PARTIAL_KINDS
from strategies.inputs.variants.all_variants import adverse
from strategies.model.oracle import run_oracle
from strategies.model.rule import Sample
from strategies.model.verdict import Verdict
from strategies.ops.semantics.local_call import replacement_call
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleRegistry
from strategies.ops.validation.claims import own_claims, query_of_sample
from strategies.validation.probe import check_claims
from tests.strategies.cases import judged

SHORTHANDS = {"P(*)": PARTIAL_KINDS, "P(+)": ("sum", "avg")}
"""One text for several lines: all kinds of parts, or those that add up."""


def spelled_out(texts: Iterable[str]) -> set[str]:
    """`P(*) -> P(*)` is five lines, of one kind each."""
    found = set()
    for text in texts:
        short = next((short for short in SHORTHANDS if short in text), "")
        found |= {text.replace(short, f"P({kind})") for kind in SHORTHANDS[short]} if short else {text}
    return found


def lines_of(rules: Iterable[OpRule], one: Sample) -> set[PlacementRule]:
    """The lines that the rule among these has for the call."""
    entry = RuleRegistry.of(*rules).get(one.op)
    assert entry is not None, f"{one.op} has no rule"
    return set(entry.lines(replacement_call(entry, query_of_sample(one, run_oracle(one).raw), one.call)[0]))


def assert_lines(rules: Sequence[OpRule], one: Sample, *texts: str) -> None:
    """The rule has just these lines, and each holds on two, three and four ranks, where it can be had."""
    assert {str(line) for line in lines_of(rules, one)} == spelled_out(texts)
    entry, oracle = RuleRegistry.of(*rules).get(one.op), run_oracle(one)
    assert entry is not None
    others = adverse(one, oracle, 0, seed=0, budget=2)
    for ranks in (2, 3, 4):
        found = check_claims(one, oracle, ranks, own_claims(entry, one, ranks, oracle.raw), seed=0, variants=others)
        wrong = [f"{i.rule} on {ranks}: {i.evidence.reason}" for i in found if i.verdict is not Verdict.SOUND]
        assert not wrong


def assert_tempting(rules: Sequence[OpRule], one: Sample, text: str, because: str, ranks: int = 2) -> None:
    """A line that looks right is not among the rule's, for a call on which it is wrong, and the reason says this."""
    assert text not in {str(line).partition(", filled")[0] for line in lines_of(rules, one)}
    found = judged(one, text, ranks=ranks)
    assert found.verdict is Verdict.UNSOUND, f"{text} is {found.verdict}"
    assert because in found.evidence.reason, found.evidence.reason


def for_each_line_case(cases: Sequence[tuple[Sample, Sequence[str]]]) -> pytest.MarkDecorator:
    """Runs a test with `one` and `texts`: each call, and the lines that its rule has for it."""
    name = lambda x: " ".join([x.op, *x.arguments()]) if hasattr(x, "op") else ""  # noqa: E731
    return pytest.mark.parametrize(("one", "texts"), cases, ids=name)


def for_each_tempting_case(cases: Sequence[tuple[object, ...]]) -> pytest.MarkDecorator:
    """Runs a test with the arguments of `assert_tempting` but for the rules; a case begins with its name."""
    names = ("one", "text", "because", "ranks")[: len(cases[0]) - 1]
    return pytest.mark.parametrize(names, [case[1:] for case in cases], ids=[case[0] for case in cases])
