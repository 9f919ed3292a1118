"""Each ambient setting is in the key, does change an answer, and costs next to nothing to read."""

import contextlib
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import _redistribute
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from localtensor.threads.state import propagation_settings
from localtensor.threads.state.propagation_settings import PRIVATE, SETTINGS, ambient_settings
from strategies.model.rule import Leaf
from strategies.propagation.cache import key_of


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def switch(name, value):
    before = getattr(_redistribute, name)
    setattr(_redistribute, name, value)
    try:
        yield
    finally:
        setattr(_redistribute, name, before)


CHANGES = [
    ("grad mode", torch.no_grad),
    ("inference mode", torch.inference_mode),
    ("default dtype", lambda: default_dtype(torch.float64)),
    ("dispatch modes", FakeTensorMode),
    ("autocast", lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    ("planner switches", lambda: switch("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", True)),
    ("planner switches", lambda: switch("_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION", True)),
]


def named():
    return dict(zip([setting.name for setting in SETTINGS], ambient_settings(), strict=True))


def key():
    return key_of("aten.mm.default", [], (Leaf(0), Leaf(1)), {})


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_each_setting_splits_the_key(name, change):
    before, key_before = named(), key()
    with change():
        inside, key_inside = named(), key()
    assert inside[name] != before[name] and key_inside != key_before
    assert named() == before and key() == key_before


def test_every_setting_is_tried_and_has_a_reason():
    assert {name for name, _ in CHANGES} == {setting.name for setting in SETTINGS}
    assert all(setting.why and setting.changes for setting in SETTINGS)
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) == len(ambient_settings())


def test_torchs_own_switches_for_the_planner_are_those_that_are_read():
    before = ambient_settings()
    with _redistribute.use_min_cost_redistribution_plan():
        assert ambient_settings() != before
    with _redistribute.disable_redistribute_transform_optimization():
        assert ambient_settings() != before


def test_autocast_tells_dtypes_apart():
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.append(ambient_settings())
    assert found[0] != found[1]


def test_autocast_and_a_fake_mode_do_change_an_answer():
    def product():
        x = torch.empty(2, 2)
        return torch.ops.aten.mm.default(x, x).dtype

    with FakeTensorMode():
        plain = product()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert product() != plain


def test_a_default_dtype_does_change_an_answer():
    ones = torch.ones(2, dtype=torch.int64, device="meta")
    with default_dtype(torch.float64):
        assert torch.ops.aten.div.Tensor(ones, ones).dtype == torch.float64
    assert torch.ops.aten.div.Tensor(ones, ones).dtype == torch.float32


def test_what_thread_local_settings_say_is_the_threads_own():
    found = []
    with torch.no_grad():
        thread = threading.Thread(target=lambda: found.append(named()))
        thread.start()
        thread.join()
        assert found[0]["grad mode"] is True and named()["grad mode"] is False


def test_a_fake_mode_whose_sizes_may_be_symbols_is_another_setting():
    with FakeTensorMode():
        plain = named()["dispatch modes"]
    with FakeTensorMode(shape_env=ShapeEnv()):
        assert named()["dispatch modes"] != plain


def test_values_can_be_hashed_whatever_is_on():
    with contextlib.ExitStack() as stack:
        for _, change in CHANGES:
            stack.enter_context(change())
        assert hash(ambient_settings()) == hash(ambient_settings())


def test_every_private_part_is_there():
    for name in PRIVATE:
        module, _, attribute = name.rpartition(".")
        found = torch._C if module == "torch._C" else __import__(module, fromlist=["_"])
        assert hasattr(found, attribute), name
    assert propagation_settings._any_autocast() is False
