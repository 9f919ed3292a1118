import pytest

from localtensor._util.call_sites import place_of_error
from localtensor._util.events import Place


def fails():
    pytest.fail("by hand")


def test_the_line_is_the_test_s_own_and_not_one_of_pytest():
    with pytest.raises(pytest.fail.Exception) as caught:
        fails()
    assert place_of_error(caught.value) == Place(__file__, fails.__code__.co_firstlineno + 1, "fails")


def test_the_line_is_the_innermost_of_several():
    def outer():
        middle()

    def middle():
        inner()

    def inner():
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        outer()
    assert place_of_error(caught.value) == Place(__file__, inner.__code__.co_firstlineno + 1, "inner")


def test_an_exception_that_was_never_raised_came_from_nowhere():
    assert place_of_error(ValueError("made only")) is None
