"""Examples in docstrings are collected from the packages; the tests' own files are collected as tests only."""

import pytest
from _pytest.doctest import DoctestModule


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> object:
    collectors = yield
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]
