import json
import re
import sys
import threading
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import localtensor as lt
from localtensor._util.call_sites import in_debugger, place_of_error, place_of_frame, user_lines
from localtensor._util.events import Place
from localtensor.errors import KindMismatch


def first_line(fn):
    return fn.__code__.co_firstlineno


def here():
    return sys._getframe(0)


def test_the_innermost_line_that_is_neither_torchs_nor_the_standard_librarys_nor_ours():
    places = []

    def asks(_):
        places.append(place_of_frame(sys._getframe(0)))

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            places.append(place_of_frame(sys._getframe(0)))
            return func(*args, **(kwargs or {}))

    json.loads("{}", object_hook=asks)
    with Passes():
        torch.ones(1)
    assert (places[0].function, places[0].line) == ("asks", first_line(asks) + 1)
    assert places[1].function == "test_the_innermost_line_that_is_neither_torchs_nor_the_standard_librarys_nor_ours"
    assert place_of_frame(here()).function == "here" and place_of_frame(None) is None


def lines_of_calls(program, ranks=2, **kw):
    calls = lt.run(program, ranks=ranks, leftovers="ignore", **kw).calls
    return {(call.place.function, call.place.line - first_line(program)) for call in calls if call.rank == 0}


def test_calls_are_placed_at_the_users_line_however_they_are_made():
    def program():
        dist.all_reduce(torch.ones(1))
        dist.group.WORLD.allreduce([torch.ones(1)]).wait()
        fc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait()
        dist.all_gather_object([None, None], 1)
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))

    assert lines_of_calls(program) == {("program", offset) for offset in range(1, 6)}


def test_calls_within_dtensor_and_backward_are_placed_at_the_users_line():
    def program():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        x.requires_grad_()
        y = x.redistribute(mesh, [Replicate()])
        y.to_local().sum().backward()
        x.grad.full_tensor()

    assert {offset for name, offset in lines_of_calls(program) if name == "program"} >= {2, 4}


def test_a_users_dispatch_mode_is_on_the_way_and_not_at_the_start():
    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def program():
        with Passes():
            dist.all_reduce(torch.ones(1))

    assert lines_of_calls(program) == {("program", 2)}


def test_the_lines_of_a_traceback_that_are_the_users():
    def outer():
        return json.loads("{}", object_hook=inner)

    def inner(_):
        raise KeyError

    try:
        outer()
    except KeyError as error:
        lines = user_lines(traceback.walk_tb(error.__traceback__))
    assert [place.function for place in lines][-2:] == ["outer", "inner"]
    assert (lines[-1].line, lines[-1].file) == (first_line(inner) + 1, __file__)


def test_the_line_of_another_thread():
    shut, started = threading.Lock(), threading.Event()

    def waits():
        started.set()
        with shut:
            pass

    with shut:
        thread = threading.Thread(target=waits)
        thread.start()
        started.wait()
        frame = sys._current_frames()[thread.ident]
        assert place_of_frame(frame).function == "waits"
    thread.join()


def test_a_frame_in_a_debugger_is_known_by_its_module():
    space: dict = {"__name__": "pydevd_bundle.bdb_like", "sys": sys}
    exec("def frame():\n    return sys._getframe(0)", space)
    assert in_debugger(space["frame"]()) and not in_debugger(here()) and not in_debugger(None)


def cleans_up_with_a_barrier():
    try:
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(2))
    finally:
        dist.barrier()


def test_a_call_that_is_made_while_cleaning_up_says_after_what():
    with pytest.raises(KindMismatch) as told:
        lt.run(cleans_up_with_a_barrier, ranks=2)
    line = next(line for line in str(told.value).splitlines() if line.startswith("  rank 1: barrier"))
    assert re.search(r", while handling ValueError: boom at test_call_sites.py:\d+ in cleans_up_with_a_barrier$", line)
    assert "handling" not in next(line for line in str(told.value).splitlines() if line.startswith("  rank 0:"))


def fails():
    pytest.fail("by hand")


def test_the_line_is_the_test_s_own_and_not_one_of_pytest():
    with pytest.raises(pytest.fail.Exception) as caught:
        fails()
    assert place_of_error(caught.value) == Place(__file__, fails.__code__.co_firstlineno + 1, "fails")


def test_the_line_is_the_innermost_of_several():
    def outer():
        middle()

    def middle():
        inner()

    def inner():
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        outer()
    assert place_of_error(caught.value) == Place(__file__, inner.__code__.co_firstlineno + 1, "inner")


def test_an_exception_that_was_never_raised_came_from_nowhere():
    assert place_of_error(ValueError("made only")) is None
