"""Each public name is exported once, from the module that defines it; a package's `__init__` holds no more than that."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import FunctionType, GenericAlias

import pytest

ROOT = Path(__file__).parents[2]
STUBS = sorted(
    stub.relative_to(ROOT) for house in ("localtensor", "strategies") for stub in (ROOT / house).rglob("__init__.pyi")
)
HOOKS = {Path("localtensor/pytest_plugin/__init__.py"), Path("localtensor/torch_suites/__init__.py")}
"""Pytest plugins: their hooks stand in the package itself."""


def faults(stub: str, *, package: str) -> list[str]:
    """What is wrong with the names that a stub exports, each in a sentence."""
    found, seen = [], set()
    for node in ast.parse(stub).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if not alias.asname:
                found.append(f"{alias.name} is imported, not exported")
            if alias.asname in seen:
                found.append(f"{alias.asname} is exported twice")
            seen.add(alias.asname)
            home = importlib.import_module(node.module)
            if alias.name not in vars(home):
                try:
                    importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    found.append(f"{node.module} has no {alias.name}")
            elif defined_in(vars(home)[alias.name], node.module) not in (node.module, *REEXPORTED.get(alias.name, ())):
                found.append(f"{alias.name} is defined in {vars(home)[alias.name].__module__}, not in {node.module}")
            elif not node.module.startswith(f"{package}.") and package != "localtensor" and alias.name not in MOVED:
                found.append(f"{alias.name} is of another package")
    return found


def defined_in(value: object, module: str) -> str:
    """The module of a class or function; of any other value, the one that it was found in."""
    return (
        value.__module__ if isinstance(value, type | FunctionType) and not isinstance(value, GenericAlias) else module
    )


REEXPORTED = {
    "StridedShard": ("torch.distributed.tensor.placement_types",),  # under a public name
    "SingleFlightCache": ("localtensor.concurrency.single_flight",),
    "LocalTensor": ("localtensor.lockstep.values.local_tensor",),  # made outside a mode, it needs the mode's module
}
MOVED: set[str] = {
    "Leaf",
    "assert_rule",
    "assert_sharding",
    "assert_typecheck_hook",
    "WrongHook",
    "FunctionCall",
    "FunctionSource",
    "NamedLayout",
    "RefusedLayouts",
    "replicated",
    "sharded",
    "summed",
    "check_case",
    "rule_cases",
    "RuleCase",
    "WrongRule",
    "Network",
}
"""Names that a package offers though another one defines them."""


@pytest.mark.parametrize("stub", STUBS, ids=str)
def test_each_public_name_is_exported_once_from_the_module_that_defines_it(stub):
    package = stub.parent.as_posix().replace("/", ".")
    text = (ROOT / stub).read_text()
    assert faults(text, package=package) == []
    module = importlib.import_module(package)
    names = [alias.asname for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert module.__all__ == sorted(names) != []
    assert [name for name in names if not hasattr(module, name)] == []
    assert set(names) <= set(dir(module))


def test_a_package_holds_no_code_beside_its_exports():
    doors = {
        path.relative_to(ROOT): path.read_text()
        for house in ("localtensor", "strategies")
        for path in (ROOT / house).rglob("__init__.py")
    }
    long = [str(path) for path, text in doors.items() if path not in HOOKS and text.count("\n") > 60]
    defining = [
        str(path)
        for path, text in doors.items()
        if path not in HOOKS and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse(text).body)
    ]
    assert len(doors) > 40 and long == [] and defining == []


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    import localtensor

    with pytest.raises(AttributeError, match=r"has no attribute 'spilt'; it has .*split"):
        localtensor.spilt  # noqa: B018  # the access is the call under test


def test_meshes_and_the_public_names_are_there_without_torch():
    look = "import localtensor, sys; localtensor.Mesh.of(2); dir(localtensor); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False).returncode == 0


def test_planted_faults_are_caught(tmp_path, monkeypatch):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted/__init__.py").write_text("")
    (tmp_path / "planted/tools.py").write_text("from json import dumps\nclass Chair: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    stub = (
        "from planted.tools import Chair as Chair\nfrom planted.tools import Chair\nfrom planted.tools import Ghost as Ghost\n"
        "from planted.tools import Chair as Chair\nfrom planted.tools import dumps as dumps\nfrom json import loads as loads\n"
    )
    assert faults(stub, package="planted") == [
        "Chair is imported, not exported",
        "planted.tools has no Ghost",
        "Chair is exported twice",
        "dumps is defined in json, not in planted.tools",
        "loads is of another package",
    ]
