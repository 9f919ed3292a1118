"""`no_implicit_communication`: an op that would communicate by itself is refused, with the call that makes it explicit."""

import asyncio
import re
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import embedding, layer_norm

import localtensor as lt
from localtensor._util import ambient
from localtensor.errors import LocalTensorError
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.model.rule import overload
from strategies.ops.all_rules import OUR_RULES
from strategies.planner.search.api import plan
from strategies.propagation.explicit import context
from strategies.propagation.explicit.context import (
    ImplicitCommunication,
    ImplicitCommunicationWarning,
    allow_implicit_communication,
    communicates,
    no_implicit_communication,
)
from strategies.propagation.overlay.context import overlay_dtensor
from strategies.propagation.propagator import Propagator
from tests.tools.plans.explicit_programs import S0, S1, R, laid, said_by, step_that_is_refused

MUL, SIN = "aten.mul.Tensor", "aten.sin.default"


def ranks_say(fn, ranks=2):
    """What each rank of a program returns: the same, on each."""
    first, *others = lt.run(fn, ranks=ranks)
    assert all(other == first for other in others)
    return first


# -- what is refused: each program is given one tensor that the op would move, and returns a DTensor


def mlp(hidden):
    return torch.relu(hidden) @ laid(S0)


def pending():
    return laid(S1) @ laid(S0)


def table():
    return embedding(laid(R, shape=(4,)).long() - 1, laid(S0))


PROGRAMS = {
    "a partial sum into relu": (pending, mlp, "aten.relu.default", "self"),
    "two layouts": (lambda: laid(S1), lambda x: laid(S0) + x, "aten.add.Tensor", "other"),
    "a list": (lambda: laid(S0), lambda x: torch.cat([laid(S1), x]), "aten.cat.default", "tensors[1]"),
    "softmax over a cut dim": (lambda: laid(S1), lambda x: x.softmax(1), "aten._softmax.default", "self"),
    "layer norm over a cut dim": (lambda: laid(S1), lambda x: layer_norm(x, (4,)), "aten.native_layer_norm.default", "input"),
    "a row of a cut dim": (lambda: laid(S0), lambda x: x[1], "aten.select.int", "self"),
    "a masked embedding": (table, lambda x: x * 2, "aten.mul.Tensor", "self"),
    "argmax over a cut dim": (lambda: laid(S0), lambda x: x.argmax(0), "aten.argmax.default", "self"),
    "argmax of a partial": (pending, lambda x: x.argmax(0), "aten.argmax.default", "self"),
    "topk": (lambda: laid(S0), lambda x: x.topk(1, 0)[0], "aten.topk.default", "self"),
}  # fmt: skip


if overload("aten.mul.Tensor") not in DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs:
    del PROGRAMS["a masked embedding"]  # torch 2.11 doubles it as it is, and moves nothing


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_op_and_the_argument_are_named_and_the_remedy_helps(name):
    make, use, op, argument = PROGRAMS[name]

    def program():
        x = make()
        text = said_by(use, x)
        [code] = re.findall(r"\.(redistribute\(.*?\]\)) before", text)
        with no_implicit_communication():
            y = use(eval(f"x.{code}", {"x": x, "Replicate": Replicate, "Shard": Shard, "Partial": Partial}))
        return text, torch.equal(y.full_tensor(), use(make()).full_tensor())

    text, same = ranks_say(program)
    assert same
    assert text.startswith(f"{op} (test_context.py:")
    assert f"): {argument}: " in text


def test_the_sentence_is_whole():
    def program():
        x, y = laid(S0), laid(S1)
        return said_by(lambda: x + y)

    have, want = (Spec(Mesh.of(2), (placement,), (4, 4), torch.float32) for placement in (S1, S0))
    steps = ", ".join(str(step) for step in plan(have, want).steps if step.kind != "local")
    assert re.sub(r"py:\d+", "py:1", ranks_say(program)) == (
        "aten.add.Tensor (test_context.py:1 in <lambda>): other: f32[4,4] @ a:S(1): the op wants it as a:S(0), and would"
        f" communicate by itself: {steps}. Write other.redistribute(placements=[Shard(0)])"
        " before it, or put it in `with allow_implicit_communication():`."
    )


def test_nothing_has_moved_when_it_is_refused():
    def program():
        x, y = laid(S0), laid(S1)
        with CommDebugMode() as comms:
            said = said_by(lambda: x + y), said_by(lambda: x.argmax(0)), said_by(lambda: torch.equal(x, x))
        return all(said), comms.get_total_counts()

    assert ranks_say(program) == (True, 0)


def test_an_error_holds_what_it_says():
    def program():
        x = laid(S0)
        with pytest.raises(ImplicitCommunication) as caught, no_implicit_communication():
            torch.cat([x, x])
        return (
            caught.value.op,
            caught.value.arguments,
            caught.value.line.function,
            isinstance(caught.value, RuntimeError),
        )

    assert ranks_say(program)[2:] == ("program", True)


# -- what is allowed


def test_what_is_written_is_allowed_and_so_are_its_gradients():
    def program():
        with no_implicit_communication(strict=True):
            x = laid(S0).requires_grad_()
            y = (x * x).redistribute(placements=[R])
            y.sum().backward()
            return x.full_tensor().sum().item(), x.grad.to_local().sum().item() > 0, str(x)[:7]

    assert ranks_say(program)[0] == 136.0


def test_a_change_that_each_rank_makes_by_itself_is_allowed_unless_strict():
    def program():
        x, whole = laid(S0), laid(R)
        return said_by(lambda: x + whole), said_by(lambda: x + whole, strict=True)

    free, strict = ranks_say(program)
    assert free is None
    assert "other: f32[4,4] @ a:R: the op wants it as a:S(0), and each rank would change it by itself" in strict


def test_along_an_axis_of_one_rank_nothing_moves():
    def program():
        mesh = init_device_mesh("cpu", (1, 2))
        return said_by(lambda: laid(S0, R, mesh=mesh) + laid(S1, R, mesh=mesh)), said_by(
            laid(S0, R, mesh=mesh).argmax, 0
        )

    assert ranks_say(program) == (None, None)


def test_a_hole_and_what_is_nested_in_it():
    def program():
        x, y = laid(S0), laid(S1)
        with no_implicit_communication():
            with allow_implicit_communication():
                inner = [str((x + y).placements), x.argmax(0).shape, torch.equal(x, x)]
                inner.append(said_by(lambda: x + y) is not None)
            outer = said_by(lambda: x + y) is not None
            with pytest.raises(ImplicitCommunication):
                x + y
        return inner, outer, str((x + y).placements)

    assert ranks_say(program) == (["(Shard(dim=0),)", torch.Size([4]), True, True], True, "(Shard(dim=0),)")


def test_it_is_a_decorator_too():
    mode = no_implicit_communication()

    @mode
    def outer(x, y):
        return inner(x, y)

    @mode
    def inner(x, y):
        return x + y

    def program():
        with pytest.raises(ImplicitCommunication):
            outer(laid(S0), laid(S1))
        return str(allow_implicit_communication()(outer.__wrapped__)(laid(S0), laid(S0)).placements)

    assert ranks_say(program) == "(Shard(dim=0),)"


def test_a_coroutine_is_decorated_and_what_would_not_be_guarded_is_refused():
    mode = no_implicit_communication(strict=True)

    @mode
    async def guarded(argument):
        await asyncio.sleep(0)
        return ambient.guard().owner, argument

    def stepwise():
        yield

    async def stream():
        yield

    assert asyncio.run(guarded(3)) == (mode, 3)
    assert ambient.guard() is None
    for fn, what in ((stepwise, "generator"), (stream, "generator"), (nn.Linear, "class")):
        with pytest.raises(LocalTensorError, match=f"it is a {what}, whose body") as caught:
            mode(fn)
        remedy = "Write `with no_implicit_communication(strict=True, warn=False):` in its body."
        assert str(caught.value).endswith(remedy)


def test_warnings_tell_each_op_of_each_line_once():
    def program():
        x, y = laid(S0), laid(S1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with no_implicit_communication(warn=True):
                for _ in range(3):
                    z = x + y
                same = torch.equal(z, x)
                z.argmax(0)
        told = [w for w in told if w.category is ImplicitCommunicationWarning]
        assert all(w.filename == __file__ and w.lineno > 0 for w in told)
        return [str(w.message).split(" ")[0] for w in told], same, torch.equal(z.full_tensor(), x.full_tensor() * 2)

    assert ranks_say(program) == (["aten.add.Tensor", "aten.equal.default", "aten.argmax.default"], False, True)


# -- backward, gradients, optimizers


def test_a_backward_that_communicates_is_refused_with_its_node_and_the_hole_helps():
    def program():
        x, w = laid(S0), nn.Parameter(laid(R))
        hidden = x @ w
        hidden.register_hook(lambda grad: grad.redistribute(placements=[S1]))

        def backward():
            hidden.sum().backward(retain_graph=True)

        text = said_by(backward)
        with no_implicit_communication(), allow_implicit_communication():
            backward()
        return text, str(w.grad.placements)

    text, placements = ranks_say(program)
    assert re.match(r"aten\.mm\.default in the backward of MmBackward0 \(test_context\.py:\d+ in backward\): ", text)
    assert text.endswith(" us. Put it in `with allow_implicit_communication():`.")
    assert placements == "(Shard(dim=1),)"


def test_the_gradient_of_from_local_is_refused_where_it_comes_in_other_placements():
    def program():
        mine = torch.ones(4, 4, requires_grad=True)
        whole = DTensor.from_local(mine, init_device_mesh("cpu", (2,)), [R], run_check=False)
        loss = (whole * laid(S0)).sum().redistribute(placements=[R])
        text = said_by(lambda: loss.backward(retain_graph=True))
        with no_implicit_communication(), allow_implicit_communication():
            loss.backward()
        return text, mine.grad.sum().item()

    text, total = ranks_say(program)
    assert text.startswith("DTensor.from_local in the backward of _FromTorchTensorBackward (test_context.py:")
    assert "gradient: f32[4,4] @ a:S(0): the op wants it as a:R" in text
    assert total == 136.0


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_on_gradients_that_are_partial(foreach):
    def program():
        w = nn.Parameter(laid(R))
        optimizer = torch.optim.SGD([w], lr=1.0, foreach=foreach)

        def step():
            optimizer.zero_grad()
            (laid(S0) @ w).sum().redistribute(placements=[R]).backward()
            optimizer.step()

        text = said_by(step)
        w.grad = w.grad.redistribute(placements=[R])
        return text, said_by(optimizer.step)

    text, reduced = ranks_say(program)
    assert "@ a:P(sum): the op wants it as a:R, and would communicate by itself: a: all-reduce" in text
    assert text.startswith("aten._foreach_add_.List" if foreach else "aten.add_.Tensor")
    assert reduced is None


def test_clipping_gradients_by_their_norm():
    def program():
        w = nn.Parameter(laid(S0))
        w.grad = laid(S0)
        return said_by(nn.utils.clip_grad_norm_, [w], 1.0)

    assert "f32[1] @ a:P(norm): the op wants it as a:R, and would communicate by itself: a: P(norm) -> R." in ranks_say(
        program
    )


def test_a_backward_inside_stays_in_its_thread():
    assert torch.autograd.is_multithreading_enabled()
    with no_implicit_communication():
        assert not torch.autograd.is_multithreading_enabled()
        with allow_implicit_communication():
            assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()


# -- who sees it


def test_the_ranks_of_a_run_inside_see_it_and_one_rank_can_have_its_own():
    def program():
        return said_by_none(lambda: laid(S0) + laid(S1))

    def own():
        rank = torch.distributed.get_rank()
        x, y = laid(S0), laid(S0)
        return said_by(lambda: x + y) if rank else ambient.guard()

    with no_implicit_communication():
        texts = list(lt.run(program, ranks=2))
    assert texts[0] == texts[1] and texts[0].startswith("aten.add.Tensor")
    assert list(lt.run(own, ranks=2)) == [None, None]


def said_by_none(fn):
    """What a call raises as it stands."""
    with pytest.raises(ImplicitCommunication) as caught:
        fn()
    return str(caught.value)


def test_other_threads_and_other_tasks_do_not_see_it():
    seen = []

    async def inside(entered, asked):
        with no_implicit_communication():
            entered.set()
            await asked.wait()

    async def both():
        entered, asked = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, asked))
        await entered.wait()
        seen.append(ambient.guard())
        asked.set()
        await task

    asyncio.run(both())
    with no_implicit_communication():
        thread = threading.Thread(target=lambda: seen.append(ambient.guard()))
        thread.start()
        thread.join()
    assert seen == [None, None]


@pytest.mark.parametrize("mode", [no_implicit_communication, overlay_dtensor])
def test_a_backward_is_as_it_was_after_tasks_that_end_in_any_order(mode):
    async def inside(entered, ends):
        with mode():
            entered.set()
            await ends.wait()

    async def both():
        (first, end_first), (second, end_second) = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
        one = asyncio.create_task(inside(first, end_first))
        await first.wait()
        other = asyncio.create_task(inside(second, end_second))
        await second.wait()
        end_first.set()
        await one
        seen.append(torch.autograd.is_multithreading_enabled())
        end_second.set()
        await other

    seen = []
    asyncio.run(both())
    assert [*seen, torch.autograd.is_multithreading_enabled()] == [False, True]


def test_contexts_may_end_in_any_order():
    first, second = no_implicit_communication(), allow_implicit_communication()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ambient.guard().owner is second
    assert not torch.autograd.is_multithreading_enabled()
    second.__exit__(None, None, None)
    assert ambient.guard() is None
    assert torch.autograd.is_multithreading_enabled()


def test_in_lockstep():
    with lt.LocalTensorMode(4):
        x, y = laid(S0), laid(S1)
        assert said_by(lambda: x + y).startswith("aten.add.Tensor (test_context.py:")
        assert "calls _c10d_functional.all_gather_into_tensor" in said_by(lambda: x.argmax(0))
        assert "all-reduces one integer of all 4 ranks" in said_by(lambda: torch.equal(x, x))
        assert said_by(lambda: x + y.redistribute(placements=[S0])) is None


def test_on_real_processes_as_on_rank_threads():
    real = list(lt.run(step_that_is_refused, ranks=2, on="gloo"))
    assert real == list(lt.run(step_that_is_refused, ranks=2))
    assert all(real[0][0])


# -- under our own rules, and before anything runs


def test_under_an_overlay_the_same_is_refused_with_the_same_sentence():
    def program():
        x, y = laid(S0), laid(S1)
        with overlay_dtensor():
            texts = (
                said_by(lambda: x * y),
                said_by(lambda: x.cumsum(0)),
                said_by(lambda: x * x),
                said_by(torch.equal, x, x),
            )
            with no_implicit_communication():
                (x * y.redistribute(placements=[S0])).full_tensor()
        return texts

    mul, cumsum, fits, equal = ranks_say(program)
    assert (
        "aten.mul.Tensor (test_context.py:" in mul and "): other: f32[4,4] @ a:S(1): the op wants it as a:S(0)" in mul
    )
    assert cumsum.startswith("aten.cumsum.default (test_context.py:")
    assert fits is None
    assert "all-reduces one integer" in equal


def test_under_an_overlay_that_is_entered_inside_and_with_keywords():
    def program():
        x, y = laid(S0), laid(S1)
        with no_implicit_communication(), overlay_dtensor(), pytest.raises(ImplicitCommunication) as caught:
            torch.mul(x, other=y)
        return caught.value.op, caught.value.arguments

    assert ranks_say(program) == (MUL, ("other",))


@pytest.mark.parametrize(
    ("placed", "moved"), [("S(0) S(0)", ()), ("S(0) S(1)", (1,)), ("S(0) R", ()), ("P(sum) P(sum)", (1,))]
)
def test_what_a_propagated_call_would_communicate(placed, moved):
    specs = [Spec(Mesh.of(tp=4), (parse(p),), (8, 8), torch.float32) for p in placed.split()]
    assert communicates(Propagator(OUR_RULES).propagate(MUL, specs)) == moved


def test_along_one_rank_a_propagated_call_communicates_nothing():
    specs = [Spec(Mesh.of(tp=1), (parse(p),), (8, 8), torch.float32) for p in ("S(0)", "S(1)")]
    assert communicates(Propagator(OUR_RULES).propagate(MUL, specs)) == ()


def test_what_is_exported_is_there():
    assert all(hasattr(context, name) for name in context.__all__)
    assert repr(no_implicit_communication(strict=True)) == "no_implicit_communication(strict=True, warn=False)"
    assert repr(allow_implicit_communication()) == "allow_implicit_communication()"
