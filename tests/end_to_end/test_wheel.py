"""The wheel holds the two packages, with all that they read, and nothing else; and it works from where it was put."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path

import pytest

import localtensor
from tests.architecture.test_clean_tree import tracked

ROOT = Path(__file__).parents[2]
HOUSES = ("localtensor", "strategies")
NEEDED = {
    "localtensor/py.typed", "strategies/py.typed", "strategies/ops/most_used.txt", "strategies/schema/report.json",
    "localtensor/templates/page.css", "strategies/templates/report.html.j2", "strategies/templates/races_keys.txt",
}  # fmt: skip
ALSO_IN_SDIST = {
    "CHANGELOG.md", "Makefile", "constraints.txt", "conftest.py", "docs/gate.md", "tests/end_to_end/test_wheel.py",
}  # fmt: skip


def names() -> set[str]:
    """The files of the tree, as paths from its root."""
    return {file.relative_to(ROOT).as_posix() for file in tracked(ROOT)}


def of_packages(files: set[str]) -> set[str]:
    return {name for name in files if name.startswith(tuple(f"{house}/" for house in HOUSES))}


def build(kind: str, folder: Path) -> Path:
    """A wheel or an sdist of the tree's tracked files, built without a network, in a copy."""
    tree = folder / "tree"
    for name in names():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    command = [sys.executable, *f"-m build --{kind} --no-isolation --outdir".split(), str(folder / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="`build` comes with the extra `dev`")
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="`build` comes with the extra `dev`")
    return build("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as held:
        (name,) = [name for name in held.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(held.read(name).decode())


def test_the_wheel_holds_every_file_of_the_two_packages_and_nothing_else(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in held if ".dist-info/" not in name}
    assert own == of_packages(names())
    assert own >= NEEDED
    assert {Path(name).name for name in held - own} == {
        "LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt",
    }  # fmt: skip


@pytest.mark.slow
def test_the_sdist_holds_what_it_takes_to_test_and_to_build_it_again(sdist):
    with tarfile.open(sdist) as held:
        inside = {entry.name.partition("/")[2] for entry in held if entry.isfile()}
    tree = {name for name in names() if not name.startswith(".")}
    assert tree - inside == set()
    assert {
        name for name in inside - tree if not re.match(r"(localtensor\.egg-info/|PKG-INFO$|setup\.cfg$)", name)
    } == set()
    assert inside >= ALSO_IN_SDIST


def test_the_metadata_say_what_it_is(metadata):
    assert metadata["Name"] == "localtensor"
    assert metadata["Version"] == localtensor.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# localtensor\n")
    assert "Development Status :: 3 - Alpha" in metadata.get_all("Classifier")
    wanted = {re.split(r"[^\w.-]", need)[0] for need in metadata.get_all("Requires-Dist") if "extra ==" not in need}
    assert wanted == {"torch", "numpy", "expecttest", "setuptools", "rich", "typer", "hypothesis", "jinja2", "tomli"}


@pytest.mark.slow
def test_the_command_and_the_pytest_plugin_work_from_where_the_wheel_was_put(wheel, tmp_path):
    there = tmp_path / "there"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(there)]
    subprocess.run([*pip, str(wheel)], capture_output=True, check=True, timeout=120)
    # Looked at, not only used: what is installed where the tests run has the same, and would do in their place.
    (own,) = distributions(path=[str(there)])
    assert {(entry.group, entry.value) for entry in own.entry_points} == {
        ("console_scripts", "strategies.__main__:main"), ("pytest11", "localtensor.pytest_plugin"),
    }  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = str(there)
    (tmp_path / "test_one.py").write_text("def test_one(rank, world_size):\n    assert rank < world_size == 2\n")

    def typed(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert typed(str(there / "bin" / "localtensor"), "--version") == f"localtensor {localtensor.__version__}\n"
    where = "import localtensor, strategies; print(localtensor.__file__, strategies.__file__)"
    assert typed(sys.executable, "-c", where).split() == [str(there / house / "__init__.py") for house in HOUSES]
    assert "1 passed" in typed(sys.executable, "-m", "pytest", "-q", "--ranks", "2", "test_one.py")
