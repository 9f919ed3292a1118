"""What all errors share: five parts, one package, and that they survive the way to another process."""

import ast
import copy
import importlib
import pickle
import re
from pathlib import Path

import pytest

from localtensor import errors
from localtensor._util.events import Call, Place, Wait
from localtensor.errors import BadPlacement, ProgramFault, base, refusal_sentence

ROOT = Path(errors.__file__).parents[2]
FUNCTIONS = {"refusal_sentence", "error_in_one_line"}  # what the package has beside classes
PACKAGES = ("localtensor", "strategies")


def test_an_error_survives_pickle_with_its_class_words_and_facts():
    place = Place("a.py", 3, "f")
    wait = Wait(0, (1,), Call(0, "recv", "0", (0, 1), 0, peer=1, place=place))
    error = errors.EarlyReturn([wait], {1: None})
    error.replay = "round_robin"
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is errors.EarlyReturn and str(again) == str(error) and vars(again) == vars(error)
        assert again.places == (place,) and again.waits == (wait,)


def test_an_error_of_any_arguments_survives_pickle():
    for error in (errors.NoRanks("Pool", 0), errors.UnevenDim("scatter", 0, (5,), 2), errors.NestedRun(1)):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)


def test_what_was_noted_on_an_error_survives_pickle():
    error = errors.NestedRun(1)
    error.__notes__ = ["seen on Monday"]  # what add_note of Python 3.11 does
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen on Monday"]


def test_every_class_at_the_door_is_an_error_of_ours():
    classes = [getattr(errors, name) for name in errors.__all__ if name not in FUNCTIONS]
    assert len(classes) > 70
    assert [kind for kind in classes if not issubclass(kind, errors.LocalTensorError)] == []


def test_every_public_class_of_the_rooms_is_at_the_door():
    kinds, found = [errors.LocalTensorError], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("localtensor.errors.") and not kind.__name__.startswith("_"):
            found.add(kind.__name__)
    assert found == set(errors.__all__) - FUNCTIONS


def test_each_error_is_raised_with_as_many_facts_as_its_sentence_names():
    texts = {file: file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    classes = {
        node.name: (file, node)
        for file, text in texts.items()
        if "Refusal" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and any(_last_name(base).endswith("Refusal") for base in node.bases)
    }
    kinds = {name: _imported(file, name) for name, (file, _) in classes.items()}
    assert len(kinds) > 80
    plain = [name for name, kind in kinds.items() if "__init__" not in vars(kind)]
    raised = re.compile(rf"\b({'|'.join(plain)})\(")  # what parsing every file takes is seconds
    sites = [
        (kinds[name], node)
        for text in texts.values()
        if raised.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and (name := _last_name(node.func)) in plain
    ]
    inside = [
        (kinds[name], node)
        for name, (_, tree) in classes.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and _last_name(node.func) == "__init__"
        and ast.unparse(node.func) == "super().__init__"
    ]
    for kind, call in [*sites, *inside]:
        assert not call.keywords, ast.unparse(call)
        errors.Refusal.__init__(kind.__new__(kind), *call.args)  # a ValueError if there are more of them, or fewer


def _last_name(node):
    """`c` of `a.b.c`.  ast.unparse of every call of the packages takes seconds."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _imported(file, name):
    return getattr(importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)), name)


# How a fault reads: ranks that did the same on one line, the odd one first, and the line that replays it.


HERE, THERE = Place("a.py", 3, "f"), Place("b.py", 9, "g")


def call(rank, **facts):
    return Call(rank, **{"kind": "all_reduce", "group_name": "0", "group": (0, 1), "number": 4, "place": HERE, **facts})


def test_places_and_ranks_are_distinct_and_keep_their_order():
    error = ProgramFault("a: b: c: d. E", [], [THERE, None, HERE, THERE], [2, 0, 2])
    assert error.places == (THERE, HERE) and error.ranks == (2, 0)


def test_details_follow_the_sentence_and_the_replay_line_is_last():
    error = ProgramFault("a: b: c: d. E", ["  rank 0: x"], [], [0])
    assert str(error) == "a: b: c: d. E\n  rank 0: x"
    error.replay = "shuffled 7"
    assert str(error) == "a: b: c: d. E\n  rank 0: x\nReplay: shuffled 7"


@pytest.mark.parametrize(("text", "line"), [
    ("x" * 192, "Replay: " + "x" * 192),
    ("x" * 193, "Replay: 193 characters, too many for this line: see .replay of this error"),
])  # fmt: skip
def test_a_replay_line_has_at_most_200_characters_and_its_text_is_never_cut(text, line):
    error = ProgramFault("a", [], [], [0])
    error.replay = text
    assert str(error) == f"a\n{line}" and len(line) <= 200
    assert error.replay == text


def test_a_replay_of_several_lines_is_not_printed_as_one():
    error = ProgramFault("a", [], [], [0])
    error.replay = "x\ny"
    assert str(error) == "a\nReplay: 3 characters, too many for this line: see .replay of this error"


def test_ranks_that_did_the_same_share_a_line():
    calls = [call(3), call(0), call(1, tensors=("f32[4]",)), call(2)]
    assert base.call_lines(calls) == [
        "  ranks 0, 2, 3: all_reduce #4, in group 0 (ranks 0, 1), at a.py:3 in f",
        "  rank 1: all_reduce #4 of f32[4], in group 0 (ranks 0, 1), at a.py:3 in f",
    ]


def test_a_rank_that_did_the_same_twice_is_named_once():
    assert base.merge_equal_lines([(0, "x"), (1, "x"), (0, "x")]) == ["  ranks 0, 1: x"]


def test_the_line_of_a_lone_rank_is_its_call():
    assert base.call_lines([call(0)]) == [f"  {call(0)}"]


def test_a_thousand_ranks_are_a_few_words():
    everyone = tuple(range(1000))
    calls = [call(rank, group=everyone) for rank in everyone]
    assert base.call_lines(calls) == ["  ranks 0-999: all_reduce #4, in group 0 (ranks 0-999), at a.py:3 in f"]


@pytest.mark.parametrize(("ranks", "last"), [(25, "  rank 24: x24"), (26, "  and 2 lines more")])
def test_a_thousand_lines_are_two_dozen(ranks, last):
    lines = base.merge_equal_lines((rank, f"x{rank}") for rank in range(ranks))
    assert len(lines) == 25 and lines[23:] == ["  rank 23: x23", last]


def test_ranks_that_wait_alike_share_a_line_and_are_in_order():
    waits = [Wait(1, (3,), call(1, kind="recv", peer=3, tag=5)), Wait(2, (1,), call(2)), Wait(0, (1,), call(0))]
    assert base.wait_lines(waits) == [
        "  ranks 0, 2 wait for rank 1 in all_reduce #4 in group 0 at a.py:3 in f",
        "  rank 1 waits for rank 3 in recv #4 from 3 with tag 5 at a.py:3 in f",
    ]


@pytest.mark.parametrize(("made", "text"), [
    (call(0), "all_reduce #4 in group 0 at a.py:3 in f"),
    (call(0, place=None), "all_reduce #4 in group 0"),
    (call(0, kind="isend", peer=0, tag=0), "isend #4 to 0 at a.py:3 in f"),
    (call(0, kind="irecv", peer=1, tag=2, place=None), "irecv #4 from 1 with tag 2"),
])  # fmt: skip
def test_a_call_in_brief(made, text):
    assert base.call_summary(made) == text


def test_the_rarest_fact_comes_first_and_of_two_that_of_the_lower_rank():
    assert base.minority_first({2: "b", 0: "a", 1: "b"}) == [("a", [0]), ("b", [1, 2])]
    assert base.minority_first({1: "a", 0: "b"}) == [("b", [0]), ("a", [1])]


def test_more_than_four_facts_are_counted():
    assert base.facts_by_rank(dict(enumerate("abcd"))) == "a on rank 0, b on rank 1, c on rank 2, d on rank 3"
    assert (
        base.facts_by_rank(dict(enumerate("abcdef")))
        == "a on rank 0, b on rank 1, c on rank 2, d on rank 3 and 2 others"
    )


@pytest.mark.parametrize("facts", ["ab", "abc", "aabb", "aabc", "aaa"])
def test_no_one_is_suspected_where_no_majority_disagrees(facts):
    assert base.likely_culprit_lines(dict(enumerate(facts))) == []


def test_who_differs_from_more_than_half_is_suspected():
    assert base.likely_culprit_lines(dict(enumerate("abaca"))) == ["Likely culprit: ranks 1, 3; ranks 0, 2, 4 agree."]


def test_the_first_line_that_says_anything_is_cut_at_its_limit():
    assert base.first_line("\n  boom \nmore") == "boom"
    assert base.first_line("x" * 200) == "x" * 200
    assert base.first_line("x" * 201) == "x" * 197 + "..."
    assert base.first_line("") == ""


def test_an_error_is_reported_in_its_first_line():
    assert base.error_in_one_line(ValueError("no\nmore")) == "ValueError: no"
    assert base.error_in_one_line(ValueError()) == "ValueError: -"
    assert base.error_in_one_line(ValueError("x" * 30), 20) == f"ValueError: {'x' * 17}..."


def test_long_values_are_shortened_and_the_rest_is_whole():
    long = "a" * 100_000
    for sentence in (
        refusal_sentence("f", "x", long, "wrong", "Go on."),
        str(BadPlacement("f", long, "wrong", "Go on.")),
    ):
        assert len(sentence) < 1_100 and sentence.endswith(": wrong. Go on.")
    assert refusal_sentence("f", "x", "a" * 999, long, "Go on.").count("a") == 100_999
