"""A rules module that was edited is another module: its journal is not gone on with."""

import re
import sys

import pytest

from strategies.base.journal import BadJournal, load_journal
from strategies.model.settings import Settings
from strategies.sweep.session import validate
from strategies.torch_api import user_modules
from tests.strategies import users

WRONG = 'op("running", lambda x: x.cumsum(0), (R, R), (S0, S0))\n'
MENDED = 'op("running", lambda x: x.cumsum(0), (R, R), (S1, S1))\n# Along the other dim it is right.\n'


@pytest.fixture
def go(tmp_path):
    """A run of the module of this text, with its journal beside it."""

    def run(body, *, resume):
        name = users.write(tmp_path, "edited", body)
        given = {"ranks": (2,), "dtypes": ("float64",), "workers": 1, "confirm": "none"}
        with users.undone():
            return validate(Settings(rules=name, folder=str(tmp_path), journal=tmp_path / "j", resume=resume, **given))

    return run


def test_a_text_is_known_by_its_digest(tmp_path):
    def digest(body):
        with users.undone():
            user_modules.load_rules(users.write(tmp_path, "told", body), str(tmp_path))
            return user_modules.module_digest("told")

    first, other, again = digest(WRONG), digest(MENDED), digest(WRONG)
    assert first == again != other and re.fullmatch("[0-9a-f]{16}", first)


def test_a_module_without_a_text_has_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "told_by_nobody", type(sys)("told_by_nobody"))
    assert user_modules.module_digest("told_by_nobody") == user_modules.module_digest("sys") == ""


def test_to_go_on_after_the_module_was_edited_is_refused_in_one_sentence(go, tmp_path):
    assert go(WRONG, resume=False).counts.suspect == 1
    kept = (tmp_path / "j").read_bytes()
    before = load_journal(tmp_path / "j").begin["rules_text"]
    with pytest.raises(BadJournal) as refused:
        go(MENDED, resume=True)
    assert re.fullmatch(
        rf"localtensor validate: --journal: {tmp_path}/j: it is of another run: rules_text was '{before}', now "
        "'[0-9a-f]{16}'. Ask for the same again, or start anew.", str(refused.value),
    )  # fmt: skip
    assert (tmp_path / "j").read_bytes() == kept
    assert go(WRONG, resume=True).counts.suspect == 1


def test_a_run_that_is_refused_before_its_first_line_leaves_no_journal(go, tmp_path):
    with pytest.raises(user_modules.BadRules):
        go("raise LookupError('no luck')\n", resume=False)
    assert not (tmp_path / "j").exists()
    assert go(MENDED, resume=False).counts.suspect == 0
