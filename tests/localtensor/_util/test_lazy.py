"""localtensor._util.lazy: names that a package's stub lists, imported on first use; our package `strategies` beside a user's folder of that name."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import strategies
from localtensor._util import lazy

ROOT = Path(strategies.__file__).parents[1]
STUB = (
    "from planted_lazy.tools import make as make\nfrom planted_lazy.tools import make as other\n"
    "from planted_lazy import tools as tools\n"
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "planted_lazy"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from localtensor._util import lazy as _lazy\n\n__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)\n"
    )
    (folder / "__init__.pyi").write_text(STUB)
    (folder / "tools.py").write_text("def make(): return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("planted_lazy")
    for name in [name for name in sys.modules if name.startswith("planted_lazy")]:
        del sys.modules[name]


def test_a_name_is_imported_on_first_use_and_kept(package):
    assert "planted_lazy.tools" not in sys.modules and "make" not in vars(package)
    assert package.make() == 7 and package.other is package.make
    assert vars(package)["make"] is sys.modules["planted_lazy.tools"].make


def test_a_module_is_a_name_too(package):
    assert package.tools is importlib.import_module("planted_lazy.tools")


def test_all_and_dir_have_every_name(package):
    assert package.__all__ == ["make", "other", "tools"] and {"make", "other", "tools", "__name__"} <= set(dir(package))


def test_another_name_is_refused(package):
    with pytest.raises(
        AttributeError, match=r"^module 'planted_lazy' has no attribute 'mak'; it has make, other, tools$"
    ):
        package.mak  # noqa: B018  # the access is the call under test


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A user's package `strategies`, first on the path."""
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies/__init__.py").write_text("raise SystemExit('the package of the user was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_our_folder_comes_first_where_another_package_would_be_imported(theirs):
    assert sys.path[0] == str(theirs)
    lazy.find_strategies()
    assert sys.path[:2] == [str(ROOT), str(theirs)]
    lazy.find_strategies()
    assert sys.path[:2] == [str(ROOT), str(theirs)]


def test_the_path_is_left_alone_where_ours_is_found(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    before = list(sys.path)
    lazy.find_strategies()
    assert sys.path == before


@pytest.mark.parametrize("file", ["/theirs/strategies/__init__.py", None])
def test_another_package_that_is_imported_already_is_refused(file, monkeypatch):
    other = ModuleType("strategies")
    other.__path__ = ["/theirs/strategies"]
    if file:
        other.__file__ = file
    monkeypatch.setitem(sys.modules, "strategies", other)
    with pytest.raises(
        ImportError, match=r"needs its own package 'strategies' .*another package .*: /theirs/strategies"
    ):
        lazy.find_strategies()


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "localtensor", "--version"],
        ["-c", "import localtensor; localtensor.Settings(('add',)); print('localtensor')"],
    ],
)
def test_python_works_in_a_folder_that_has_another_package_of_that_name(words, theirs):
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=theirs, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("localtensor"), done.stderr
