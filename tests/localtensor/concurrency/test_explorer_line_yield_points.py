"""Lines and bytecodes as yield points: races that nobody marked."""

import sys
import types

import pytest

from localtensor.concurrency.explorer import Program, by_lines, explore, replay


class Count:
    def __init__(self):
        self.hits = 0

    def in_two_lines(self):
        seen = self.hits
        self.hits = seen + 1

    def in_one_line(self):
        self.hits += 1


def adding(how):
    def program(sync):
        count = Count()

        def check():
            assert count.hits == 2, f"{count.hits} of 2"

        return Program([getattr(count, how)] * 2, check)

    return program


def test_an_unmarked_race_is_nothing_at_marked_yield_points():
    assert explore(adding("in_two_lines"), policy="bounded").complete


@pytest.mark.parametrize("policy", ["pct", "bounded"])
@pytest.mark.parametrize(("how", "opcodes"), [("in_two_lines", False), ("in_two_lines", True), ("in_one_line", True)])
def test_it_shows_between_lines_and_between_bytecodes(how, opcodes, policy):
    program = by_lines(adding(how), Count, opcodes=opcodes)
    found = explore(program, policy=policy)
    assert found.failure.detail == "1 of 2" and found.failure.repeats
    assert replay(program, found.failure.text) == found.failure
    assert f"{how} line " in str(found.failure)


def test_one_line_is_whole_between_lines():
    assert explore(by_lines(adding("in_one_line"), Count), policy="bounded").complete


def test_functions_and_modules_can_be_named_too(tmp_path):
    one = by_lines(adding("in_two_lines"), Count.in_two_lines)
    assert explore(one).failure is not None
    other = by_lines(adding("in_two_lines"), Count.in_one_line)
    assert explore(other, schedules=50).failure is None
    module = types.ModuleType("somewhere")
    module.__file__ = Count.in_two_lines.__code__.co_filename
    assert explore(by_lines(adding("in_two_lines"), module)).failure is not None


def test_no_one_is_traced_afterwards():
    before = sys.gettrace()
    explore(by_lines(adding("in_one_line"), Count), schedules=5)
    assert sys.gettrace() is before
