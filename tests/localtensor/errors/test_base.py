"""What all errors share: five parts, one door, and that they survive the way to another process."""

import ast
import copy
import importlib
import pickle
from pathlib import Path

from localtensor import errors
from localtensor._util.events import Call, Place, Wait

ROOT = Path(errors.__file__).parents[2]
FUNCTIONS = {"refusal_sentence", "error_in_one_line"}  # what the door has beside classes
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
    trees = {file: ast.parse(file.read_text()) for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    classes = {
        node.name: (file, node)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Refusal") for base in node.bases)
    }
    kinds = {name: _imported(file, name) for name, (file, _) in classes.items()}
    assert len(kinds) > 80
    plain = [name for name, kind in kinds.items() if "__init__" not in vars(kind)]
    sites = [
        (kinds[name], node)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in plain
    ]
    inside = [
        (kinds[name], node)
        for name, (_, tree) in classes.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"
    ]
    for kind, call in [*sites, *inside]:
        assert not call.keywords, ast.unparse(call)
        errors.Refusal.__init__(kind.__new__(kind), *call.args)  # a ValueError if there are more of them, or fewer


def _imported(file, name):
    return getattr(importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)), name)
