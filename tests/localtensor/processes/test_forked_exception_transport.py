import pytest

from localtensor._util.call_sites import place_of_error
from localtensor.processes.forked import rebuild_exception, record_exception, substitute_exception


class NeedsTwo(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class BadLoss(ArithmeticError):
    pass


def errors_to_send():
    class OfThisTest(KeyError):  # a new class of this name at each call
        pass

    unpicklable = BadLoss("closure", lambda: None)
    skipped = pytest.skip.Exception("not today")
    noted = ValueError("noted")
    noted.__notes__ = ["a note"]
    return {
        "ours": noted, "skip": skipped, "local": OfThisTest("key"), "two": NeedsTwo(1, 2), "lambda": unpicklable,
        "exit": SystemExit(3),
    }  # fmt: skip


EXACT = {"ours", "skip", "local", "exit"}


@pytest.mark.parametrize("name", sorted(errors_to_send()))
def test_an_exception_is_itself_again_or_one_of_the_same_name_and_nature(name):
    error = errors_to_send()[name]
    found = rebuild_exception(record_exception(error, repr))
    assert (type(found).__name__, str(found)) == (type(error).__name__, str(error))
    assert (type(found) is type(error)) == (name in EXACT)
    assert isinstance(found, Exception) == isinstance(error, Exception)
    assert isinstance(found, ArithmeticError) == isinstance(error, ArithmeticError)
    assert getattr(found, "__notes__", []) == getattr(error, "__notes__", [])


def test_a_stand_in_says_its_message_and_no_more():
    error = substitute_exception("Skipped", "why", "BaseException")
    assert str(error) == "why" and not isinstance(error, Exception)


def test_an_exception_leads_to_the_line_where_it_was_raised_and_to_no_other():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    found = rebuild_exception(record_exception(caught.value, repr))
    assert place_of_error(found) == place_of_error(caught.value) is not None
    assert found.__traceback__.tb_next is None
    assert rebuild_exception(record_exception(ValueError("made only"), repr)).__traceback__ is None
