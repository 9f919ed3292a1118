import dataclasses
import pickle
import subprocess
import sys
import typing

import pytest

from localtensor._util.events import Died, Outcome, Raised, Returned, Waiting

ONE_OF_EACH = [Returned(0, 5), Raised(1, "ValueError", "no", "Traceback..."), Waiting(2, "x.py:3 in f"), Died(3, -9)]


def test_an_outcome_is_one_of_these_four():
    assert set(typing.get_args(Outcome)) == {type(outcome) for outcome in ONE_OF_EACH}


@pytest.mark.parametrize("outcome", ONE_OF_EACH, ids=lambda outcome: type(outcome).__name__)
def test_an_outcome_is_a_small_fixed_value(outcome):
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcome.rank = 7
    assert not hasattr(outcome, "__dict__")
    assert dataclasses.fields(outcome)[0].name == "rank"
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    assert hash(outcome) == hash(dataclasses.replace(outcome))
    assert dataclasses.replace(outcome, rank=8) != outcome


def test_an_exception_that_no_one_timed_was_raised_at_no_time():
    assert ONE_OF_EACH[1].at == 0.0 and "at=" not in repr(ONE_OF_EACH[1])


def test_outcomes_can_be_read_without_torch():
    look = "import sys, localtensor._util.events; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0
