"""What a name in a module means, through imports."""

from strategies.gate.changes.name_resolution import NameResolver
from strategies.gate.changes.project import Version

FILES = {
    "user.py": b"from first import *\nfrom second import *\nfrom third import own as other\n",
    "first.py": b"X = 1\nY = 1\n",
    "second.py": b"X = 2\n_hidden = 3\n",
    "third.py": b"from second import X as own\n",
    "package/__init__.py": b"from . import part\nfrom lazy import here\n",
    "package/part.py": b"X = 3\n",
    "lazy/__init__.py": b"def __getattr__(name): ...\n\n\nhere = 1\n",
    "lazy/__init__.pyi": b"from second import X as far\nfrom second import X as here\nfrom lazy import inner as inner\n",
    "lazy/inner.py": b"import torch\nX = 4\n",
    "plain/__init__.py": b"from lazy.inner import *\n",
    "plain/__init__.pyi": b"from second import X as typed\n",
}


def meanings(path, *chain):
    version = Version(FILES, [""], {})
    return NameResolver(version).mean(version.module(path), chain)


def meant(*chain):
    (found,) = meanings("user.py", *chain)
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


def test_a_package_that_imports_on_first_use_offers_what_its_stub_says_and_what_it_binds_itself():
    (far,) = meanings("lazy/__init__.py", "far")
    assert [unit.path for unit in far.units] == ["second.py"]
    assert "lazy/__init__.py" in {unit.path for found in meanings("lazy/__init__.py", "here") for unit in found.units}
    (typed,) = meanings("plain/__init__.py", "typed")
    assert typed.unknown == "typed"


def test_a_module_that_its_own_package_imports_is_found():
    for path, *chain in (("package/__init__.py", "part", "X"), ("lazy/__init__.py", "inner", "X")):
        (found,) = meanings(path, *chain)
        assert [unit.path for unit in found.units] == [path.replace("__init__", chain[0])]


def test_what_is_asked_of_a_name_is_kept_if_it_comes_with_a_star_or_from_nowhere():
    (torch,) = meanings("plain/__init__.py", "torch", "add")
    (lost,) = meanings("user.py", "lost", "one")
    assert (torch.outside, torch.rest) == ("torch", ("add",)) and (lost.unknown, lost.rest) == ("lost", ("one",))
