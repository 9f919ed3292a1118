import pytest

from strategies.model.verdict import CLEAN, FAULTS, NOTHING, USAGE, WRONG, Evidence, Verdict, exit_code

HARMLESS = [verdict for verdict in Verdict if verdict not in FAULTS]


def test_the_codes_are_those_of_the_documentation():
    assert (CLEAN, WRONG, USAGE, NOTHING) == (0, 1, 2, 3)


@pytest.mark.parametrize("verdict", HARMLESS, ids=str)
def test_only_unsound_rules_are_wrong(verdict):
    assert exit_code([verdict], tested=1) == CLEAN


@pytest.mark.parametrize("verdict", HARMLESS, ids=str)
def test_nothing_tested_is_never_a_pass(verdict):
    assert exit_code([verdict], tested=0) == NOTHING


@pytest.mark.parametrize("others", [[], [Verdict.SOUND], [Verdict.CRASHED, Verdict.SUSPECT]], ids=str)
@pytest.mark.parametrize("tested", [0, 1, 100])
def test_one_unsound_rule_is_wrong_whatever_else_there_is(others, tested):
    assert exit_code([*others, Verdict.UNSOUND], tested=tested) == WRONG


@pytest.mark.parametrize("tested", [0, 1])
def test_a_registration_that_torch_never_asks_is_wrong(tested):
    assert exit_code([Verdict.SOUND], tested=tested, ignored=1) == WRONG


def test_verdicts_may_come_from_a_generator():
    assert exit_code((v for v in [Verdict.SOUND, Verdict.UNSOUND]), tested=2) == WRONG


def test_evidence_without_values_is_a_sentence_alone():
    assert Evidence("why") == Evidence("why", variant="", draw=0, got="", want="")


def test_every_verdict_has_a_word_of_its_own():
    assert len({verdict.value for verdict in Verdict}) == len(Verdict) == 7
