"""The examples of docs/sources.md do what the page says."""

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("spmd_types")

from strategies.model import settings
from strategies.model.settings import Settings
from strategies.sweep.session import validate
from strategies.validation.sources import registry

PAGE = (Path(__file__).parents[4] / "docs/sources.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\S+)\.py\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes an example and makes it importable; returns its name."""

    def write(name):
        (tmp_path / f"{name}.py").write_text(BLOCKS[name])
        monkeypatch.syspath_prepend(tmp_path)
        return name

    yield write
    for name in BLOCKS:
        sys.modules.pop(name, None)


def test_the_source_of_the_page_is_swept_by_its_entry_point(module, monkeypatch):
    (declared,) = re.findall(r'^keeps_shards = "(.*)"$', PAGE, re.MULTILINE)
    module("keeps_shards")
    found = metadata.EntryPoints([metadata.EntryPoint("keeps_shards", declared, settings.SOURCE_GROUP)])
    monkeypatch.setattr(settings.metadata, "entry_points", lambda group: found)
    registry.source_named.cache_clear()
    report = validate(Settings(source="keeps_shards", ranks=(2,), workers=1))
    assert sorted(f.name for f in report.findings) == [
        "keeps_shards.torch_cumsum.default: S(0) -> S(0)",
        "keeps_shards.torch_cumsum.gradient: S(0), S(0) -> S(0)",
    ]
    assert {f.confirmed_on for f in report.findings} == {"gloo"}
    assert report.counts.sound + report.counts.unsound == 12  # six layouts of two functions, forward and backward
    registry.source_named.cache_clear()


def test_the_tests_of_the_page_pass(module):
    scope = {"__name__": "test_square"}
    exec(BLOCKS["test_square"], scope)
    assert scope["test_the_hook_of_square"]() is scope["test_the_wrong_hook_is_found"]() is None


def test_the_typed_program_of_the_page_is_compared(module, tmp_path):
    name = module("test_row_linear")
    (tmp_path / f"{name}.py").write_text(f"# {name}.py\n{BLOCKS[name]}")
    assert importlib.import_module(name).test_row_linear() is None
