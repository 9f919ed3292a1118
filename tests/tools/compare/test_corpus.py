"""The corpus is what it says: enough programs, in enough classes, each labelled and cited."""

import inspect
import re
from collections import Counter

import pytest

from tests.tools.compare.by_hand import difference
from tests.tools.compare.cases import WORDS, cases
from tests.tools.compare.score import Answer, ask, table

EVERY = list(cases())
FAULTY = [case for case in EVERY if case.kind]
RIGHT = [case for case in EVERY if not case.kind]


def named(name: str):
    [case] = [case for case in EVERY if case.name == name]
    return case


def test_there_are_sixty_faulty_programs_of_fifteen_classes_and_sixty_right_ones():
    assert len(FAULTY) >= 60 and len(RIGHT) >= 60
    assert len({case.kind for case in FAULTY}) >= 15
    assert sum(case.late for case in FAULTY) >= 10 and sum(case.late for case in RIGHT) >= 10
    assert [name for name, count in Counter(case.name for case in EVERY).items() if count > 1] == []


def test_each_set_that_was_written_last_has_ten_faulty_programs_and_ten_right_ones():
    for files in ("late", "last", "unseen_"):
        last = [case for case in EVERY if case.file.stem.startswith(files) and case.late]
        assert sum(bool(case.kind) for case in last) == sum(not case.kind for case in last) == 10, files
    assert sum(case.late for case in EVERY) == 60


def test_each_faulty_program_is_labelled_and_cited():
    for case in FAULTY:
        assert case.module and set(case.word.split("|")) <= set(WORDS) and case.places, case.name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|arXiv \d{4}\.\d{5}", case.source), case.name


def test_right_programs_have_no_mark():
    assert [case.name for case in RIGHT if case.places] == []


def test_a_program_gives_the_arguments_of_compare():
    for case in EVERY:
        given = case.program()
        assert {"build", "parallelize", "batch", "mesh"} <= set(given), case.name
        takes = inspect.signature(given["build"]).parameters.values()
        functions = any(one.default is one.empty for one in takes)
        assert ("loss" in given) != functions, case.name
        assert 2 <= max(given["mesh"].values()) <= 4, case.name


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("mlp_of_column_and_row", True),
        ("row_without_sum", False),
        ("gradients_summed", False),
        ("tied_vocabulary_of_thirteen", True),
        ("maximum_of_own_vocabulary", False),
    ],
)
def test_both_sides_by_hand_tell_right_from_faulty(name, right):
    assert (difference(named(name)) < 1e-6) == right


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("gradients_reduced_to_another_owner", "2.weight", "all_reduce of the gradient over dp is missing"),
        (
            "running_center_of_rank_zero_only",
            "center",
            r"replicas along dp differ: lerp_, \S+ in update has run on rank 0",
        ),
    ],
)
def test_what_is_right_after_the_step_and_what_one_rank_has_alone_are_distinguished(name, module, words):
    answer = ask(named(name))
    assert answer.module and f" of {module}, step 0" in answer.text
    assert re.search(words, answer.because)


def test_the_score_reads_module_line_and_words():
    case = named("row_bias_before_sum_on_four")
    text = "x\n  first at  output of fc2, step 0\n  because   fc2.bias is added 4 times\n  at " + case.places[0]
    right = Answer(case, text, 0.0, alarm=True)
    assert (right.module, right.line, right.word, right.complaint) == (True, True, True, "")
    other = Answer(case, text.replace("fc2", "fc1").replace("faulty", "x").replace("added", "lost"), 0.0, alarm=True)
    assert other.complaint == "wrong module, line, word"
    assert Answer(case, "", 0.0, alarm=False).complaint == "not detected"
    assert "1/2 50%" in table([right, Answer(case, "", 0.0, alarm=False)])[1]
