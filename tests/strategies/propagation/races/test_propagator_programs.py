"""Our propagator under schedules: nothing is found, and a key that forgets the placement is found out."""

import pytest

from localtensor.concurrency.explorer import explore
from strategies.propagation.propagator import Propagator
from strategies.propagation.races import explore as races
from strategies.propagation.races import propagator_programs


@pytest.mark.slow
def test_nothing_is_found_in_it():
    tried = races.explore_all(propagator_programs.PROGRAMS, 300)
    assert [(one.name, one.failure) for one in tried if one.failure] == []
    assert sum(one.schedules for one in tried) == 300


@pytest.mark.parametrize("policy", ["pct", "bounded"])
def test_an_answer_to_another_question_is_found_out(monkeypatch, policy):
    first = {}

    class Forgets(Propagator):
        """Whoever asks for an op is told what the first was told."""

        def propagate(self, op, specs, *args, **kwargs):
            answer = super().propagate(op, specs, *args, **kwargs)
            return first.setdefault((id(self), op), answer)

    monkeypatch.setattr(propagator_programs, "Propagator", Forgets)
    found = explore(propagator_programs.other_keys, policy=policy, schedules=100)
    assert "another answer than alone" in found.failure.detail
