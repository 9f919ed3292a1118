"""localtensor._util.lazy: names that a package's stub lists, imported on first use."""

import importlib
import sys

import pytest

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
