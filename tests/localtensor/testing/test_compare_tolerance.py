"""What other runs of a reference say, value by value."""

import torch

from localtensor.layout.tolerance import measured_slack, widen_slack
from localtensor.testing.compare.watch import Key, Observation, Watch
from localtensor.testing.compare_tolerance import Repeated, Slacks

KEY, OTHER = Key(0, "output", "a"), Key(0, "output", "b")
X = torch.linspace(-1, 1, 40)


def reference(**values):
    return Watch(seen={Key(0, "output", name): Observation(x) for name, x in values.items()})


def test_slacks_are_those_of_all_runs_together():
    noisy = [X + 1e-7 * seed * torch.arange(40).remainder(3) for seed in (1, 2)]
    exact = X.double() + 1e-6
    slacks = Slacks(reference(a=X))
    for one in noisy:
        slacks.take(reference(a=one, c=one))
    slacks.take(reference(a=exact), double=True)
    want = widen_slack(measured_slack(X, noisy), X, exact)
    assert set(slacks.found) == {KEY} and torch.equal(slacks.found[KEY], want)


def test_of_several_values_of_a_key_the_last_counts():
    slacks = Slacks(reference(a=X))
    with slacks.of_run() as take:
        take(KEY, X + 1)
        take(KEY, X)
    assert torch.equal(slacks.found[KEY], measured_slack(X, [X]))
    again = Repeated(reference(a=X, b=X))
    again.take(KEY, X)
    assert again.other == OTHER
    again.take(OTHER, X)
    assert again.other is None
    again.take(KEY, X + 1)
    assert again.other == KEY


def test_nan_is_equal_to_nan():
    x = torch.tensor([1.0, torch.nan])
    again = Repeated(reference(a=x))
    again.take(KEY, x.clone())
    assert again.other is None
