import sys

import pytest

from strategies import stage
from strategies.dockets import Docket
from strategies.rules import overload
from strategies.trial import alone
from strategies.trials import hear
from tests.strategies import users
from tests.strategies.cases import numbers, sample


def silent(number):
    """Nobody listens."""


@pytest.fixture(autouse=True)
def undone():
    with users.undone():
        yield
    stage.at_home.cache_clear()


def test_an_op_alone_is_heard_as_the_trial_hears_it():
    docket = Docket("aten.cumprod.default", (sample("cumprod.default", numbers(4, 6), -1),), ((2,),), 0)
    assert repr(hear(docket, silent)) == repr(alone(docket, silent))
    assert [list(h.suspects) for h in hear(docket, silent) if h.suspects] == [["aten.cumprod.default: S(1) -> S(1)"]]


@pytest.mark.parametrize(("until", "count"), [(1.0, 0), (0.0, 4), (4e9, 4)])
def test_a_docket_whose_time_is_up_is_not_begun(until, count):
    docket = Docket("aten.cumprod.default", (sample("cumprod.default", numbers(4, 6), -1),), ((2,),), 0, until=until)
    assert len(hear(docket, silent)) == count


def test_the_users_module_is_imported_first(tmp_path):
    name = users.write(tmp_path, "heard_rules", users.RIGHT_AND_WRONG)
    assert name not in sys.modules
    docket = Docket(f"{name}.running.default", (), ((2,),), 0, home=(name, str(tmp_path)))
    assert [h.unit for h in hear(docket, silent)] == list(docket.units())
    assert overload(f"{name}.running.default")
