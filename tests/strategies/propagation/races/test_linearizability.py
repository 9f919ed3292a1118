"""Histories that a plain dict explains, and such that it does not."""

import itertools

import pytest

from strategies.propagation.races.linearizability import CacheCall, _history_text, is_linearizable

A, B, CLEAR = "get a", "get b", "clear"


@pytest.mark.parametrize("history", [
    [],
    [CacheCall(A, 0, 1, 1), CacheCall(A, 2, 3, 1)],
    [CacheCall(A, 0, 1, 1), CacheCall(B, 2, 3, 2)],
    [CacheCall(A, 0, 1, 1), CacheCall(CLEAR, 2, 3), CacheCall(A, 4, 5, 2)],
    [CacheCall(A, 0, 5, 1), CacheCall(CLEAR, 1, 2), CacheCall(A, 3, 4, 2)],  # the first came before the clear
    [CacheCall(A, 0, 5, 2), CacheCall(CLEAR, 1, 2), CacheCall(A, 3, 4, 2)],  # or after it
    [CacheCall(A, 0, 9, 1), CacheCall(A, 1, 9, 1), CacheCall(CLEAR, 2, 9)],
])  # fmt: skip
def test_what_a_dict_could_have_said_is_explained(history):
    assert is_linearizable(history)


@pytest.mark.parametrize("history", [
    [CacheCall(A, 0, 1, 1), CacheCall(A, 2, 3, 2)],  # computed twice
    [CacheCall(A, 0, 1, 1), CacheCall(B, 2, 3, 1)],  # another key's value
    [CacheCall(A, 0, 1, 1), CacheCall(CLEAR, 2, 3), CacheCall(A, 4, 5, 1)],  # from before the clear
    [CacheCall(A, 0, 9, 1), CacheCall(A, 1, 9, 2)],  # two at once, and neither saw the other
    [CacheCall(A, 0, 1, 1), CacheCall(CLEAR, 2, 3), CacheCall(A, 4, 5, 2), CacheCall(A, 6, 7, 1)],
])  # fmt: skip
def test_what_no_dict_could_have_said_is_not(history):
    assert not is_linearizable(history)


def test_the_order_in_which_calls_are_listed_is_nothing():
    history = [CacheCall(A, 0, 5, 1), CacheCall(CLEAR, 1, 2), CacheCall(A, 3, 4, 2), CacheCall(B, 3, 6, 3)]
    assert {is_linearizable(order) for order in itertools.permutations(history)} == {True}


def test_a_history_is_reported_with_its_times_and_answers():
    assert _history_text([CacheCall(A, 0, 5, 1), CacheCall(CLEAR, 1, 2)]) == "get a [0-5] -> 1; clear [1-2]"
