"""The corpus is what it says, and `lt.run` finds what is planted in it, at the right line, and nothing else."""

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.tools.rankbugs import legal, shapes, stack, works
from tests.tools.rankbugs.corpus import HERE, LABELS, OURS, Case, cases, marked
from tests.tools.rankbugs.score import LEAST_HELPFULNESS, LEAST_RECALL, LONGEST_DIAGNOSIS, Score, judged, score

EVERY = cases()
FAULTY = [case for case in EVERY if case.label]
RIGHT = [case for case in EVERY if not case.label]
TOPICS = [file for file in sorted(HERE.glob("*.py")) if file.stem not in OURS]


def definition(program: Callable[[], object]) -> ast.FunctionDef:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(program))).body
    assert isinstance(node, ast.FunctionDef)
    return node


def body(program: Callable[[], object]) -> str:
    return "\n".join(ast.dump(statement) for statement in definition(program).body)


# -- the corpus itself


def test_the_corpus_is_large_and_about_half_of_it_is_right():
    assert len(EVERY) >= 200
    assert 0.45 <= len(RIGHT) / len(EVERY) <= 0.55


def test_each_class_of_fault_is_planted_several_times():
    planted = Counter(case.label for case in FAULTY)
    assert set(planted) == set(LABELS) and len(LABELS) >= 12
    assert min(planted.values()) >= 4


def test_no_two_programs_have_one_name_or_one_body():
    assert [name for name, count in Counter(case.name for case in EVERY).items() if count > 1] == []
    assert [dump for dump, count in Counter(body(case.program) for case in EVERY).items() if count > 1] == []


def test_the_numbers_of_ranks_vary():
    assert {2, 3, 4, 8} <= {case.ranks for case in FAULTY}
    assert {1, 2, 3, 4, 8} <= {case.ranks for case in RIGHT}


def test_each_faulty_program_has_a_marked_line_or_a_few():
    assert [case.name for case in FAULTY if not 1 <= len(case.lines) <= 3] == []


def test_each_right_program_asserts_and_has_no_mark():
    assert [case.name for case in RIGHT if list(marked(case.program))] == []
    assert [
        case.name for case in RIGHT if not any(isinstance(n, ast.Assert) for n in ast.walk(definition(case.program)))
    ] == []


def test_each_mark_belongs_to_a_program_and_stands_at_the_end_of_some_code():
    for file in TOPICS:
        lines = dict(enumerate(file.read_text().splitlines(), 1))
        marks = {number for number, line in lines.items() if "# fault" in line}
        assert len(lines) < 400, file
        assert all(lines[number].count("# fault") == 1 and lines[number].endswith("  # fault") for number in marks), (
            file
        )
        assert all(lines[number].split("#")[0].strip(" )]},") for number in marks), file
        assert marks == {line for case in FAULTY if case.file == file.resolve() for line in case.lines}, file


# -- what lt.run makes of it


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)], ids=["every second", "all"])
def whole(request) -> Score:
    """`make rankbugs` tries them all."""
    return score(EVERY[:: request.param])


def complaints(answers: list) -> list[str]:
    return [f"{answer.case.name}: {answer.complaint}" for answer in answers if answer.complaint]


@pytest.mark.few(1)
def test_no_right_program_is_accused(whole):
    assert complaints(whole.false_alarms) == []
    assert whole.precision == 1.0


def test_the_faults_are_found(whole):
    assert whole.recall >= LEAST_RECALL, complaints(whole.faulty)


def test_the_explanations_name_the_class_and_the_line(whole):
    assert whole.helpfulness >= LEAST_HELPFULNESS, complaints(whole.faulty)


def test_what_hangs_for_ever_is_explained_within_a_second(whole):
    assert [(answer.case.name, answer.seconds) for answer in whole.answers if answer.slow] == []
    assert LONGEST_DIAGNOSIS == 1.0


# -- the scorer, seen red


def test_an_accusation_of_a_right_program_counts_as_a_false_alarm():
    answer = judged(Case(shapes.one_rank_brings_a_longer_tensor, None, 2))
    got = Score((answer, judged(works.a_work_is_dropped.case)), 1.0)
    assert answer.complaint == "false alarm: ShapeMismatch"
    assert (got.false_alarms, got.recall, got.precision, got.passed) == ([answer], 1.0, 0.5, False)


def test_silence_about_a_faulty_program_counts_as_a_miss():
    answer = judged(Case(legal.the_world_is_named, "Deadlock", 3))
    got = Score((answer,), 1.0)
    assert answer.complaint == "missed Deadlock: nothing reported"
    assert (got.recall, got.helpfulness, got.passed) == (0.0, 0.0, False)


def crash():
    return 1 / 0


def test_a_crash_does_not_count_as_finding_a_fault():
    answer = judged(Case(crash, "Deadlock", 2))
    assert (answer.said, answer.found) == ("RankRaised", False)


def test_another_class_is_found_but_does_not_help():
    answer = judged(Case(shapes.one_rank_brings_a_longer_tensor, "DtypeMismatch", 2))
    assert (answer.found, answer.helpful) == (True, False)
    assert answer.complaint == "wrong class: ShapeMismatch, not DtypeMismatch"


def test_another_cause_does_not_help():
    case = stack.one_rank_runs_out_of_memory.case
    answer, other = judged(case), judged(replace(case, cause="OSError"))
    assert (answer.helpful, other.found, other.helpful) == (True, True, False)
    assert other.complaint == "wrong cause: MemoryError, not OSError"


def test_another_line_does_not_help():
    elsewhere = Case(shapes.one_rank_brings_a_longer_tensor, "ShapeMismatch", 2)
    answer = judged(elsewhere)
    assert answer.helpful
    moved = type(answer)(elsewhere, 0.1, "ShapeMismatch", "", (1,))
    assert moved.complaint.startswith("wrong line: [1], not [")
    assert Score((moved,), 1.0).helpfulness == 0.0
