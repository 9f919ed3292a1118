"""What a name in a module means, through imports."""

from strategies.gate.changes.name_resolution import Names
from strategies.gate.changes.project import Version

FILES = {
    "user.py": b"from first import *\nfrom second import *\nfrom third import own as other\n",
    "first.py": b"X = 1\nY = 1\n",
    "second.py": b"X = 2\n_hidden = 3\n",
    "third.py": b"from second import X as own\n",
}


def meant(*chain):
    version = Version(FILES, [""], {})
    (found,) = Names(version).mean(version.module("user.py"), chain)
    return found


def test_of_two_star_imports_that_bring_a_name_the_last_one_is_in_force():
    assert [unit.path for unit in meant("X").units] == ["second.py"]
    assert [unit.path for unit in meant("Y").units] == ["first.py"]


def test_a_star_import_brings_no_private_name():
    assert meant("_hidden").unknown == "_hidden"


def test_a_name_is_followed_through_files_and_keeps_what_is_asked_of_it():
    found = meant("other", "shape")
    assert [unit.path for unit in found.units] == ["second.py"] and found.rest == ("shape",)
    assert meant("len").outside == "builtins.len"
