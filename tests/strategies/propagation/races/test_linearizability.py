"""Histories that a plain dict explains, and such that it does not."""

import itertools

import pytest

from strategies.propagation.races.linearizability import Call, _history_text, explained

A, B, CLEAR = "get a", "get b", "clear"


@pytest.mark.parametrize("history", [
    [],
    [Call(A, 0, 1, 1), Call(A, 2, 3, 1)],
    [Call(A, 0, 1, 1), Call(B, 2, 3, 2)],
    [Call(A, 0, 1, 1), Call(CLEAR, 2, 3), Call(A, 4, 5, 2)],
    [Call(A, 0, 5, 1), Call(CLEAR, 1, 2), Call(A, 3, 4, 2)],  # the first came before the clear
    [Call(A, 0, 5, 2), Call(CLEAR, 1, 2), Call(A, 3, 4, 2)],  # or after it
    [Call(A, 0, 9, 1), Call(A, 1, 9, 1), Call(CLEAR, 2, 9)],
])  # fmt: skip
def test_what_a_dict_could_have_said_is_explained(history):
    assert explained(history)


@pytest.mark.parametrize("history", [
    [Call(A, 0, 1, 1), Call(A, 2, 3, 2)],  # computed twice
    [Call(A, 0, 1, 1), Call(B, 2, 3, 1)],  # another key's value
    [Call(A, 0, 1, 1), Call(CLEAR, 2, 3), Call(A, 4, 5, 1)],  # from before the clear
    [Call(A, 0, 9, 1), Call(A, 1, 9, 2)],  # two at once, and neither saw the other
    [Call(A, 0, 1, 1), Call(CLEAR, 2, 3), Call(A, 4, 5, 2), Call(A, 6, 7, 1)],
])  # fmt: skip
def test_what_no_dict_could_have_said_is_not(history):
    assert not explained(history)


def test_the_order_in_which_calls_are_listed_is_nothing():
    history = [Call(A, 0, 5, 1), Call(CLEAR, 1, 2), Call(A, 3, 4, 2), Call(B, 3, 6, 3)]
    assert {explained(order) for order in itertools.permutations(history)} == {True}


def test_a_history_is_told_with_its_times_and_answers():
    assert _history_text([Call(A, 0, 5, 1), Call(CLEAR, 1, 2)]) == "get a [0-5] -> 1; clear [1-2]"
