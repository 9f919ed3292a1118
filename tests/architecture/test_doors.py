"""One front door: each public name is exported once, from the room that owns it, and nothing else lies about."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOORS = ("localtensor", "localtensor.errors", "localtensor.testing", "strategies")


def faults(door: ModuleType) -> list[str]:
    """What is wrong with one package's front, each in a sentence."""
    promised = list(getattr(door, "__all__", []))
    found = [f"{name} is promised {promised.count(name)} times" for name in set(promised) if promised.count(name) > 1]
    found += [f"{name} is promised but not there" for name in promised if not hasattr(door, name)]
    own = {name for name, value in vars(door).items() if not name.startswith("_") and not inspect.ismodule(value)}
    found += [f"{name} lies about: it is not in __all__" for name in sorted(own - set(promised))]
    return found + [fault for name in promised if hasattr(door, name) for fault in homeless(door, name)]


def homeless(door: ModuleType, name: str) -> list[str]:
    """Whether a public object says which of this package's rooms it comes from, and is there by that name."""
    thing = getattr(door, name)
    home = getattr(thing, "__module__", None)
    if home is None or not home.startswith(f"{door.__name__}."):
        return [f"{name} comes from {home}: a door exports what its own rooms define"]
    if getattr(importlib.import_module(home), name, None) is not thing:
        return [f"{name} says that it comes from {home}, which has no such thing"]
    return []


def written(source: str) -> dict[str, str]:
    """What the door's text exports to a type checker: public name to the room it is imported from."""
    exported: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname == alias.name:
                    assert alias.name not in exported, f"{alias.name} is exported twice"
                    exported[alias.name] = node.module or ""
    return exported


@pytest.mark.parametrize("name", DOORS)
def test_each_public_name_is_exported_once_from_its_own_room(name):
    assert faults(importlib.import_module(name)) == []


@pytest.mark.parametrize("name", DOORS)
def test_type_checkers_see_what_the_interpreter_sees(name):
    door = importlib.import_module(name)
    seen = {public: getattr(door, public).__module__ for public in getattr(door, "__all__", [])}
    assert written(Path(door.__file__).read_text()) == seen


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    import localtensor

    with pytest.raises(AttributeError, match=r"has no attribute 'spilt'; it has .*split"):
        localtensor.spilt  # noqa: B018  # the access is the call under test


def test_dir_lists_every_public_name():
    import localtensor

    assert set(localtensor.__all__) <= set(dir(localtensor))


def test_the_door_opens_without_torch():
    look = "import localtensor, sys; localtensor.Mesh.of(2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False).returncode == 0


def test_planted_faults_are_caught(tmp_path, monkeypatch):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted/__init__.py").write_text(
        "import json\nfrom json import dumps\nfrom planted.room import Chair, Lamp, stray\n"
        "__all__ = ['Chair', 'Chair', 'Lamp', 'Ghost', 'dumps']\n"
    )
    (tmp_path / "planted/room.py").write_text(
        "class Chair: ...\ndef stray(): ...\nclass Lamp: ...\nLamp.__module__ = 'planted.attic'\n"
    )
    (tmp_path / "planted/attic.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert sorted(set(faults(importlib.import_module("planted")))) == [
        "Chair is promised 2 times",
        "Ghost is promised but not there",
        "Lamp says that it comes from planted.attic, which has no such thing",
        "dumps comes from json: a door exports what its own rooms define",
        "stray lies about: it is not in __all__",
    ]


def test_a_planted_second_export_is_caught():
    with pytest.raises(AssertionError, match="x is exported twice"):
        written("from p.a import x as x\nfrom p.b import x as x\n")
    assert written("from p.a import x as x\nfrom p.a import y\nimport z\n") == {"x": "p.a"}
