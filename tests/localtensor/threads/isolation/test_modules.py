"""Each rank's own modules: what an import, pickle, a reload and a helper thread of a rank find."""

import importlib
import logging
import pickle
import sys
import threading
from importlib import _bootstrap
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.concurrency.schedule import round_robin
from localtensor.threads.isolation import modules
from localtensor.threads.isolation.sharing import SharedRoots
from localtensor.threads.run import run_in_threads

CACHES_ITS_RANK = """
import torch.distributed as dist
RANK = dist.get_rank()
COUNT = 0
class Config:
    value = 0
def rank():
    return RANK
"""


@pytest.fixture(autouse=True)
def forget_what_was_observed(monkeypatch):
    monkeypatch.setattr(modules, "SHARED", SharedRoots())


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes modules, which can then be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(**texts):
        for name, text in texts.items():
            file = tmp_path / (name.replace("__", "/").replace("/package", "/__init__") + ".py")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        importlib.invalidate_caches()

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def on_ranks(body, ranks=2, *, fresh=True):
    return run_in_threads(lambda rank: body(), ranks, round_robin(), 0, 60.0, fresh=fresh, roots=(body,)).values


@pytest.mark.parametrize("fresh", [True, False])
def test_each_rank_imports_its_own_copy(write, fresh):
    write(lt_caching=CACHES_ITS_RANK)

    def body():
        import lt_caching

        lt_caching.COUNT += dist.get_rank() + 1
        lt_caching.Config.value = dist.get_rank()
        dist.barrier()
        return lt_caching.rank(), lt_caching.COUNT, lt_caching.Config.value, sys.modules["lt_caching"] is lt_caching

    assert on_ranks(body, 3, fresh=fresh) == tuple((rank, rank + 1, rank, True) for rank in range(3))
    assert "lt_caching" not in sys.modules


def test_code_is_compiled_once_and_again_when_its_file_changes(write, tmp_path):
    write(lt_code=CACHES_ITS_RANK)

    def body():
        import lt_code

        first = lt_code.rank.__code__
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "lt_code.py").write_text("def rank():\n    return 'another'\n")
        dist.barrier()
        importlib.reload(lt_code)
        return first, lt_code.rank()

    (one, new), (two, new_too) = on_ranks(body)
    assert one is two
    assert (new, new_too) == ("another", "another")


def test_a_rank_may_wait_for_the_others_while_it_imports(write):
    write(lt_waits="import torch.distributed as dist\ndist.barrier()\nRANK = dist.get_rank()\n")

    def body():
        import lt_waits

        return lt_waits.RANK

    assert on_ranks(body) == (0, 1)


def test_pickle_reload_and_lazy_modules_find_the_ranks_own(write):
    lazy = "import sys\nfrom types import ModuleType\nclass Lazy(ModuleType):\n    def __getattr__(self, name):\n"
    lazy += "        return (name, sys.modules[__name__] is self)\nsys.modules[__name__] = Lazy(__name__)\n"
    write(lt_own=CACHES_ITS_RANK, lt_lazy=lazy)

    def body():
        import lt_own

        held = lt_own.Config
        dist.barrier()
        again = type(pickle.loads(pickle.dumps(held())))
        slow = pickle._loads(pickle._dumps(held()))  # pickle in Python
        dist.barrier()
        lt_own.COUNT = 7
        importlib.reload(lt_own)
        import lt_lazy

        dist.barrier()
        return again is held, type(slow) is held, lt_own.COUNT, lt_own.RANK, lt_lazy.size

    assert on_ranks(body) == tuple((True, True, 0, rank, ("size", True)) for rank in (0, 1))


def test_a_helper_thread_belongs_to_the_rank_that_started_it(write):
    write(lt_helper=CACHES_ITS_RANK, lt_late=CACHES_ITS_RANK.replace("dist.get_rank()", "None"))
    go = [threading.Event(), threading.Event()]

    def body():
        import lt_helper

        rank, found = dist.get_rank(), []

        def look():
            go[rank].wait(60)
            import lt_late

            again = pickle.loads(pickle.dumps(lt_helper.Config()))
            found.append((sys.modules["lt_helper"].RANK, type(again) is lt_helper.Config, lt_late))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        dist.barrier()
        go[rank].set()  # its helpers may run from now on, whichever rank runs
        dist.barrier()
        for thread in threads:
            thread.join()
        import lt_late

        return found == [(rank, True, lt_late)] * 4

    assert on_ranks(body) == (True, True)


def test_torch_numpy_the_standard_library_and_what_they_require_are_shared():
    def body():
        import colorsys

        import numpy as np
        import sympy

        assert np.__name__ == "numpy" and sympy.__name__ == "sympy"
        colorsys.lt_mark = getattr(colorsys, "lt_mark", 0)
        return [id(sys.modules[name]) for name in ("torch", "numpy", "sympy", "colorsys", "localtensor", "pytest")]

    sys.modules.pop("colorsys", None)
    first, second = on_ranks(body)
    assert first == second
    assert id(sys.modules["colorsys"]) == first[3]


def test_what_a_shared_module_imports_is_not_one_ranks(write):
    write(lt_dependency=CACHES_ITS_RANK.replace("dist.get_rank()", "None"), lt_shared="import lt_dependency\n")
    modules.SHARED.observed("lt_shared", "for this test")

    def body():
        import lt_dependency
        import lt_shared

        return lt_shared, lt_dependency, lt_shared.lt_dependency

    (one, own, held), (two, other, held_too) = on_ranks(body)
    assert one is two and held is held_too
    assert len({id(own), id(other), id(held)}) == 3


def test_a_package_that_registers_operators_is_shared(write):
    text = "import torch\nlib = torch.library.Library('lt_test_ops', 'DEF')\nlib.define('twice(Tensor x) -> Tensor')\n"
    text += "lib.impl('twice', lambda x: 2 * x, 'CompositeExplicitAutograd')\n"
    write(lt_ops__package="", lt_ops__kernels=text, lt_ops__state=CACHES_ITS_RANK)

    def body():
        import lt_ops.kernels
        import lt_ops.state

        return torch.ops.lt_test_ops.twice(torch.ones(1)).item(), lt_ops.kernels, lt_ops, lt_ops.state

    first, second = on_ranks(body)
    assert first == second
    assert "lt_ops.kernels registers operators of 'lt_test_ops'" in modules.SHARED.seen()["lt_ops"]


def test_a_package_that_defines_custom_ops_is_each_ranks_own(write):
    text = "import torch\n@torch.library.custom_op('lt_custom_ops::twice', mutates_args=())\n"
    text += "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n"
    text += "torch.library.register_fake('lt_custom_ops::twice', lambda x: torch.empty_like(x))\n"
    write(lt_custom=text + CACHES_ITS_RANK)

    def body():
        import lt_custom

        dist.barrier()
        x = torch.ones(1)
        return lt_custom.twice(x).item(), torch.ops.lt_custom_ops.twice(x).item(), lt_custom.RANK

    assert on_ranks(body) == ((2, 2, 0), (2, 2, 1))
    assert "lt_custom" not in modules.SHARED.seen()


def test_who_imports_a_package_that_registers_operators_is_not_shared(write):
    text = "import torch\nfor name in ('one', 'two', 'three'):\n"
    text += "    torch.library.Library('lt_' + name + '_test_ops', 'DEF').define('f(Tensor x) -> Tensor')\n"
    write(lt_several=text, lt_user=f"import lt_several\n{CACHES_ITS_RANK}")

    def body():
        import lt_user

        return lt_user.RANK

    assert on_ranks(body) == (0, 1)
    assert set(modules.SHARED.seen()) == {"lt_several"}


def test_what_a_package_had_patched_before_it_became_shared_is_there_for_all(write):
    text = "import logging\nimport torch\nlogging.getLogger('lt.first')\ndef lt_shout(self):\n    return 'loud'\nlogging.Logger.lt_shout = lt_shout\n"
    text += "import torch.distributed as dist\ndist.barrier()\ntorch.library.Library('lt_shout_ops', 'DEF')\n"
    write(lt_patches=text)

    def body():
        if dist.get_rank():
            dist.barrier()  # the one in the module that the first rank imports
            dist.barrier()
        import lt_patches

        if not dist.get_rank():
            dist.barrier()
        return logging.getLogger("lt.patches").lt_shout(), lt_patches

    first, second = on_ranks(body)
    assert first == second and first[0] == "loud"
    del logging.Logger.lt_shout


def test_what_a_shared_package_requires_is_shared_unless_it_requires_torch(write, tmp_path):
    text = "import lt_pickles, lt_ranked\nimport torch\ntorch.library.Library('lt_requires_ops', 'DEF')\n"
    write(lt_registers=text, lt_pickles=CACHES_ITS_RANK.replace("dist.get_rank()", "None"), lt_ranked=CACHES_ITS_RANK)
    for name, required in (("registers", ("lt-pickles", "lt-ranked")), ("pickles", ()), ("ranked", ("torch>=2",))):
        folder = tmp_path / f"lt_{name}-1.0.dist-info"
        folder.mkdir()
        lines = [f"Name: lt-{name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in required)]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")

    def body():
        import lt_ranked
        import lt_registers

        return lt_ranked.RANK, pickle.loads(
            pickle.dumps(lt_registers.lt_pickles.Config)
        ) is lt_registers.lt_pickles.Config

    assert on_ranks(body) == ((0, True), (1, True))
    assert modules.SHARED.seen()["lt_pickles"] == "required by lt_registers, which is shared"


def test_a_registration_that_a_shared_module_has_caused_is_found(write):
    text = "import lt_registry\nif lt_registry.names:\n    raise KeyError('type lt is already defined')\nlt_registry.names.append(1)\n"
    write(lt_registry="names = []\n", lt_types=text, lt_shared="import lt_types\n")
    modules.SHARED.observed("lt_registry", "stands for a registry in C")
    modules.SHARED.observed("lt_shared", "for this test")

    def body():
        import lt_shared
        import lt_types

        return lt_types, lt_shared.lt_types

    first, second = on_ranks(body)
    assert first == second and first[0] is first[1]


def test_a_package_whose_second_import_says_already_registered_is_shared(write):
    text = "import lt_registry\nif lt_registry.names:\n    raise KeyError('type lt is already defined')\nlt_registry.names.append(1)\n"
    write(lt_registry="names = []\n", lt_types__package="from lt_types import inner\nDONE = 1\n", lt_types__inner=text)
    modules.SHARED.observed("lt_registry", "stands for a registry in C")

    def body():
        import lt_types

        return lt_types.inner, lt_types, sys.modules["lt_types"], lt_types.DONE

    first, second = on_ranks(body)
    assert first == second and first[1] is first[2]
    assert modules.SHARED.seen()["lt_types"] == "importing lt_types.inner twice raises KeyError"


def test_any_other_error_of_an_import_is_the_ranks_own(write):
    write(lt_fails="import torch.distributed as dist\nif dist.get_rank():\n    raise ValueError('not on this rank')\n")

    def body():
        try:
            import lt_fails
        except ValueError as error:
            return str(error), "lt_fails" in sys.modules
        return lt_fails.__name__, True

    assert on_ranks(body) == (("lt_fails", True), ("not on this rank", False))


@pytest.fixture
def extension(write, monkeypatch):
    """A package with a C extension: loads are counted, and `during()` is called as it loads."""
    loads, during = [], []

    def create(loader, spec):
        loads.append(spec.name)
        for call in during:
            call()
        module = ModuleType(spec.name)
        module.value = object()
        return module

    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == "lt_ext._native":
                return ModuleSpec(name, ExtensionFileLoader(name, "/nowhere/_native.so"), origin="/nowhere/_native.so")
            return None

    monkeypatch.setattr(ExtensionFileLoader, "create_module", create)
    monkeypatch.setattr(ExtensionFileLoader, "exec_module", lambda loader, module: None)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    write(lt_ext__package="from lt_ext import _native, base\n", lt_ext__base="class Base:\n    pass\n")
    yield loads, during
    for name in [name for name in sys.modules if name.startswith("lt_ext")]:
        del sys.modules[name]


def import_lt_ext():
    import lt_ext._native

    return lt_ext, lt_ext._native.value


def test_an_extension_is_loaded_once_and_its_package_is_each_ranks_own(extension):
    loads, _ = extension
    (one, value), (two, same) = on_ranks(import_lt_ext)
    assert loads == ["lt_ext._native"]
    assert one is not two and value is same


def test_an_extension_that_a_shared_module_has_imported_is_not_loaded_again(extension, write):
    loads, during = extension
    during.append(lambda: sys.modules.__setitem__("lt_ext._native.part", ModuleType("lt_ext._native.part")))
    write(lt_shared="import lt_ext._native\n")
    modules.SHARED.observed("lt_shared", "for this test")

    def body():
        import lt_shared

        own, value = import_lt_ext()
        return value is lt_shared.lt_ext._native.value, own is lt_shared.lt_ext, "lt_ext._native.part" in sys.modules

    assert on_ranks(body) == ((True, False, True),) * 2
    assert loads == ["lt_ext._native"]


def test_a_package_whose_extension_takes_its_python_objects_is_shared(extension):
    loads, during = extension
    during.append(lambda: importlib.import_module("lt_ext.base"))
    (one, value), (two, same) = on_ranks(import_lt_ext)
    assert loads == ["lt_ext._native"]
    assert one is two and value is same
    assert "takes objects of lt_ext" in modules.SHARED.seen()["lt_ext"]


def test_sys_modules_is_a_dict_of_the_ranks_modules(write):
    write(lt_dict=CACHES_ITS_RANK)

    def body():
        import lt_dict

        table = sys.modules
        assert table.copy() == dict(table) == dict(table.items()) and len(table) == len(list(table))
        assert set(table) == set(table.keys()) and lt_dict in table.values() and "lt_dict" in repr(table)
        del table["lt_dict"]
        assert "lt_dict" not in table and table.get("lt_dict") is None and table.pop("lt_dict", 5) == 5
        with pytest.raises(KeyError, match="lt_dict"):
            table["lt_dict"]
        table.setdefault("lt_dict", lt_dict)
        table["json"] = "mine"
        dist.barrier()
        mine = table.pop("json") if dist.get_rank() == 0 else None
        dist.barrier()
        return mine, "json" in table, table["lt_dict"] is lt_dict, isinstance(table, dict)

    import json

    assert on_ranks(body) == (("mine", False, True, True), (None, True, True, True))
    assert sys.modules["json"] is json


def test_the_process_is_as_before_after_a_run(write):
    write(lt_gone=CACHES_ITS_RANK)

    def state():
        return dict(sys.modules), type(sys.modules), type(_bootstrap._module_locks), threading.Thread.start

    def body():
        import lt_gone

        if dist.get_rank():
            raise ValueError(lt_gone.RANK)

    before = state()
    assert before[1:3] == (dict, dict)
    for _ in range(2):
        with pytest.raises(lt.errors.RankRaised, match="ValueError: 1"):
            on_ranks(body)
    assert state() == before


def test_a_second_run_imports_anew(write):
    write(lt_twice=CACHES_ITS_RANK)

    def body():
        import lt_twice

        lt_twice.COUNT += 1
        return lt_twice.COUNT

    assert (*on_ranks(body), *on_ranks(body, fresh=False), *on_ranks(body)) == (1,) * 6
