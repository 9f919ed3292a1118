"""What all errors share: five parts, one door, and that they survive the way to another process."""

import copy
import pickle

from localtensor import errors
from localtensor._util.events import Call, Place, Wait


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
    classes = [getattr(errors, name) for name in errors.__all__ if name not in {"in_a_line", "refusal"}]
    assert len(classes) > 70
    assert [kind for kind in classes if not issubclass(kind, errors.LocalTensorError)] == []


def test_every_public_class_of_the_rooms_is_at_the_door():
    kinds, found = [errors.LocalTensorError], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("localtensor.errors.") and not kind.__name__.startswith("_"):
            found.add(kind.__name__)
    assert found == set(errors.__all__) - {"in_a_line", "refusal"}
