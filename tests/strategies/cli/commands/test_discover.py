import logging
import warnings

import pytest
import torch

from strategies.base.options import BadOption
from strategies.cli.commands.discover import run
from strategies.cli.options import DiscoverOptions
from strategies.model.verdict import CLEAN, NOTHING, USAGE


@pytest.fixture(autouse=True)
def _noise_as_it_was():
    threads, silence = torch.get_num_threads(), logging.root.manager.disable
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)
    logging.disable(silence)


def discovered(op, **options):
    return run(DiscoverOptions(op, **{"workers": 1, **options}))


@pytest.mark.slow
def test_what_is_missing_is_listed_and_is_nothing_wrong(capsys):
    assert discovered("aten.mv.default") == CLEAN
    told = capsys.readouterr().out
    assert "aten.mv.default: 2 rules are missing" in told
    assert "  P(avg), R -> P(avg) where numbers in ('ff', 'ii')" in told


def test_a_module_goes_to_standard_output_and_nothing_else_does(capsys):
    assert discovered("mv", emit=True) == CLEAN
    told = capsys.readouterr()
    compile(told.out, "found.py", "exec")
    assert told.out.startswith('"""2 sharding rules of aten.mv.default') and not told.err


def test_nothing_missing_is_clean_and_nothing_to_emit_is_said(capsys):
    assert discovered("aten.neg.default") == CLEAN
    assert "0 rules are missing" in capsys.readouterr().out
    assert discovered("aten.neg.default", emit=True) == USAGE
    told = capsys.readouterr()
    assert "no rule is missing" in told.err and not told.out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nosuch", {}, "no op and no overload has this name"),
        ("mean", {"emit": True}, "Name one: aten.mean.default or aten.mean.dim"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_sentence(name, options, said, capsys):
    assert discovered(name, **options) == USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": (1,)}, "localtensor discover: --ranks: 1: "),
        ({"ranks": (2, 65)}, "localtensor discover: --ranks: 65: "),
        ({"seed": -1}, "localtensor discover: --seed: -1: "),
        ({"workers": 0}, "localtensor discover: --workers: 0: "),
    ],
)
def test_options_that_cannot_be_followed_are_refused(options, said):
    with pytest.raises(BadOption) as refused:
        DiscoverOptions("neg", **options)
    assert str(refused.value).startswith(said)


def test_nothing_searched_is_never_a_pass(capsys):
    assert discovered("aten.rand_like.default") == NOTHING
    assert "nothing was tested" in capsys.readouterr().err
