"""The function of torch that makes a fault, found by replacing it."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.base.progress import Progress
from strategies.model.rule import PUBLIC, Call, Leaf, Program, Rule, Sample
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.programs.public_api.drawing import draw_public_programs
from strategies.programs.public_api.table import public_steps
from strategies.programs.run.verdict import Confirmation
from strategies.sweep.causes import attribution as attribution_module
from strategies.sweep.causes import cause as cause_module
from strategies.sweep.causes.attribution import (
    BASE_REPLICATED,
    BEFORE_RULES,
    BY_PIECES,
    CALLED,
    DISPATCHER,
    FORMULA,
    IMPLICIT,
    NOT_SIMULATED,
    OF_COPY,
    OP_BY_OP,
    PLAIN_HANDLER,
    PLAIN_MOVES,
    PUBLIC_CALL,
    RAISES_IN,
    REDISTRIBUTION,
    REFUSED,
    REPLICAS,
    RULE,
    UNKNOWN,
    WHOLE_CUT,
    WHOLE_REPLICATED,
    Attribution,
    AttributionTask,
    Attributor,
    attribution,
    fault_class,
    fault_of,
    outcome,
    program_work,
)
from strategies.sweep.causes.cause import CaseTask, _cause, cause_key, ordinary_case, result_class
from strategies.torch_api import counterfactuals
from strategies.torch_api.code_places import CodePlace, registered_place
from strategies.torch_api.counterfactuals import DECOMPOSITION, HANDLER
from strategies.validation.finding import Candidate
from tests.strategies.sweep.causes.programs import CUMPROD, program
from tests.strategies.wrong_here import if_cumprod_has_a_rule

SHIFT = program(Call("aten.__lshift__.Scalar", (Leaf(0), 1)), torch.arange(1, 5), inputs=((Shard(0),),))
LOSS = program(
    Call("aten.mse_loss.default", (Leaf(0), Leaf(1))), torch.arange(1.0, 5.0), torch.zeros(4),
    inputs=((Shard(0),), (Shard(0),)), then="grad",
)  # fmt: skip
FLATTENED = Program(
    Sample(Call("aten.clone.default", (Leaf(0),)), (torch.arange(1.0, 6.0),), ""), (2, 2), ((Shard(0), Shard(0)),),
    flattened=True,
)  # fmt: skip
RIGHT = program(Call("aten.mul.Scalar", (Leaf(0), 2.0)), torch.arange(1.0, 5.0), inputs=((Shard(0),),))
LATER = program(
    Call("aten.add.Tensor", (Leaf(0), Leaf(1))), torch.ones(4), torch.ones(4), inputs=((Partial(),), (Partial(),)),
    then="squared",
)  # fmt: skip


UNBIND = program(Call("aten.unbind.int", (Leaf(0),)), torch.ones(3, 2), inputs=((Replicate(),),), then="grad of 0")
"""Its gradient is a stack of DTensors and plain zeros, which autograd makes in native code."""
COMPLEX = program(Call("aten.mul.Scalar", (Leaf(0), 2 - 3j)), torch.ones(4), inputs=((Shard(0),),))
"""DTensor's dispatch in C++ refuses a complex number: it makes no key of it."""
NORM = program(
    Call("aten._batch_norm_with_update.default", (*map(Leaf, range(5)), 0.5, 1e-5)), torch.arange(24.0).reshape(3, 2, 4),
    torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2), inputs=(*[(Replicate(),)] * 4, (Shard(0),)),
)  # fmt: skip
"""It writes to its fourth and fifth argument."""


ANY = program(Call("aten.any.dim", (Leaf(0), -1)), torch.ones(3, 2), inputs=((Shard(1),),), then="sum")
"""`any` gives its shards' answers as a pending sum of booleans."""


WHOLE_NUMBERS = program(
    Call("aten.add.Tensor", (Leaf(0), Leaf(1))), torch.arange(4), torch.arange(4), inputs=((Partial(),), (Replicate(),)),
)  # fmt: skip
"""Of the replica DTensor makes a pending sum: it divides by the number of ranks, which gives floats."""


SQUEEZED = program(Call("aten.squeeze_.dim", (Leaf(0), -1)), torch.ones(4, 1), inputs=((Shard(0),),))
"""Its rule is right: the dispatcher keeps the shape of what an op in place is given."""
OF_ONE = program(
    Call("aten.mean.out", (Leaf(0), [1], True), (("out", Leaf(1)),)), torch.ones(4, 4), torch.ones(()),
    inputs=((Replicate(),), (Replicate(),)),
)  # fmt: skip
"""Its result has another shape than the tensor given for it, which torch resizes."""
TWICE = program(
    Call("aten.linalg_householder_product.default", (Leaf(0), Leaf(1))), torch.ones(4, 3), torch.ones(2),
    inputs=((Replicate(),), (Replicate(),)), then="grad",
)  # fmt: skip


def caused_by(given):
    return Attributor(program_work(given), judged=False, program=given).cause()


@pytest.mark.parametrize(
    ("given", "kind", "function"),
    [
        (CUMPROD, RULE, "scan_strategy"),
        (LOSS, DECOMPOSITION, "DecompShardingStrategy._propagate_through_decomp"),
        (SHIFT, DISPATCHER, "OpDispatcher._dispatch_fast_path_python_tail"),
        (FLATTENED, REDISTRIBUTION, "Shard._to_replicate_tensor"),
        (WHOLE_NUMBERS, REDISTRIBUTION, "Partial._partition_value"),
        (SQUEEZED, DISPATCHER, "OpDispatcher._dispatch_fast_path_python_tail"),
    ],
)
def test_the_function_whose_replacement_cures_a_fault_is_its_cause(given, kind, function):
    if torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("other versions have other faults")
    found = caused_by(given)
    assert (found.kind, found.place.name) == (kind, function)
    assert found.place.file.startswith("torch/distributed/tensor/") and found.place.line > 1
    assert found.fix


@pytest.mark.parametrize(
    ("given", "function", "detail", "fix", "why"),
    [
        (
            UNBIND,
            "OpDispatcher._try_replicate_spec_for_scalar_tensor",
            "a plain tensor beside DTensors",
            IMPLICIT,
            FORMULA,
        ),
        (
            COMPLEX,
            "DTensor's dispatch of a call (C++)",
            "RuntimeError: unhashable type: 'complex'",
            WHOLE_REPLICATED,
            BEFORE_RULES,
        ),
    ],
    ids=["plain tensor", "complex number"],
)
def test_a_call_that_is_refused_before_any_rule_has_a_cause(given, function, detail, fix, why):
    if torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("other versions refuse other calls")
    found = caused_by(given)
    assert (found.kind, found.place.name, found.op) == (DISPATCHER, function, "")
    assert (found.detail, found.fix, found.why) == (detail, fix, why)


@pytest.mark.skipif(torch.__version__.split(".")[:2] != ["2", "13"], reason="other versions have other faults")
@pytest.mark.skipif(torch.__version__.split(".")[:2] != ["2", "13"], reason="other versions have other faults")
def test_a_tensor_given_as_out_whose_shape_stays_as_it_was_is_the_fault_of_the_dispatcher():
    found = caused_by(OF_ONE)
    assert (found.kind, found.op, found.fix) == (DISPATCHER, "aten.mean.out", WHOLE_CUT)
    assert fault_class(found.reason) == "shape"


@pytest.mark.skipif(torch.__version__.split(".")[:2] != ["2", "13"], reason="other versions refuse other calls")
@pytest.mark.slow
def test_of_two_parts_that_refuse_a_call_the_first_is_the_cause_and_the_second_is_named():
    """The gradient has a `cat` with plain zeros; without it, `tril_` has no rule."""
    found = caused_by(TWICE)
    assert (found.kind, found.detail, found.fix) == (DISPATCHER, "a plain tensor beside DTensors", "")
    assert "another follows: NotImplementedError: Operator aten.tril_.default" in found.why
    assert cause_key(found) == cause_key(caused_by(UNBIND))


def test_a_run_that_is_refused_earlier_is_not_past_the_first_error():
    def one(first, ops):
        made = Attributor(None, judged=False)
        made._first = counterfactuals.Trace([counterfactuals.OpStep(op, "rule", None) for op in ops]), first
        return made

    first = "DTensor refuses this call on every rank: RuntimeError: mixed"
    reached = counterfactuals.Trace([counterfactuals.OpStep(op, "rule", None) for op in ("a", "b")])
    other = first.replace("RuntimeError: mixed", "ValueError: no rule")
    assert one(first, ["a", "b", "cat"])._refused_later(reached, other)
    assert not one(first, ["a", "b", "c", "cat"])._refused_later(reached, other)
    assert not one(first, ["a", "b", "cat"])._refused_later(reached, first)
    assert not one(first, ["a", "b", "cat"])._refused_later(reached, "rank 1 raises ValueError: no rule")
    assert one(first, ["a", "b", "cat"])._refused_later(reached, "rank 0: result gathered from R differs at [0]: got 1")
    assert not one(first, ["a", "b", "cat"])._refused_later(reached, "")


def test_what_makes_a_sum_of_booleans_is_the_cause_and_not_what_reads_it():
    found = caused_by(ANY)
    assert (found.op, found.detail) == ("aten.any.dim", "S(1) -> P(sum)")
    floats = Attributor(program_work(RIGHT), judged=False)._traced()[0]
    assert floats.steps and not any(step.sums_bools for step in floats.steps)


@pytest.mark.parametrize(
    ("then", "op"),
    [
        ("v = x[-1], v.mul_(-2)", "aten.select.int"),
        ("v = x.chunk(2)[0], v.fill_(2)", "aten.split.Tensor"),
        ("v = x[::2], x.mul_(-2)", "aten.slice.Tensor"),
    ],
)
def test_of_a_write_to_a_view_of_a_copy_the_rule_of_the_view_is_the_cause(then, op):
    copied = program(Call("aten.clone.default", (Leaf(0),)), torch.arange(1.0, 5.0), inputs=((Shard(0),),), then=then)
    found = caused_by(copied)
    if found is None:
        pytest.skip("this torch refuses such a view, or has none of a copy")
    assert (found.kind, found.op, found.fix, found.why) == (RULE, op, BASE_REPLICATED, OF_COPY)
    assert found.detail.startswith("S(0) -> R")


def test_a_view_of_a_copy_is_not_the_cause_where_nothing_is_written():
    read = program(
        Call("aten.cumprod.default", (Leaf(0), -2)),
        torch.arange(1.0, 9.0).view(4, 2),
        inputs=((Shard(0),),),
        then="select",
    )
    found = caused_by(read)
    assert found is None or (found.op, found.why) == ("aten.cumprod.default", "")


def test_calls_that_are_refused_in_one_way_have_one_cause_whatever_their_op():
    found = replace(Attribution(DISPATCHER, None, "", "a plain tensor beside DTensors", IMPLICIT), program=UNBIND)
    refused = "DTensor refuses this call on every rank: RuntimeError: x"
    assert cause_key(replace(found, reason=refused)) == cause_key(replace(found, reason=refused, program=LOSS))
    assert cause_key(replace(found, reason=refused))[2:] == ("a plain tensor beside DTensors", "refused")


def test_the_cause_of_a_second_call_says_that_it_is_one():
    again = program(
        Call("aten.topk.default", (Leaf(0), 2)), torch.arange(4.0), inputs=((Shard(0),),), then="again(x0, 3)"
    )
    found = Attribution(DISPATCHER, None, "aten.topk.default", "", "", program=again, reason="its piece has shape (3,)")
    assert cause_key(found)[2] == "a call after one with another argument"
    assert cause_key(replace(found, program=replace(again, then="")))[2] == "the results of the ranks"


def test_a_second_run_of_an_op_in_place_begins_with_the_same_values():
    work = program_work(NORM)
    first, second = outcome(work), outcome(work)
    assert fault_of(first) == fault_of(second)
    whole = lambda: counterfactuals.op_replaced(torch.ops.aten._batch_norm_with_update.default)  # noqa: E731
    assert Attributor(work, judged=False).cures(whole) and Attributor(work, judged=False).cures(whole)


def task(given, reason):
    rule = Rule(given.sample.op, tuple(placed[0] for placed in given.inputs), ())
    instance = Instance(rule, given.ranks, given.sample, Verdict.UNSOUND, "", Evidence(reason))
    return AttributionTask("name", reason, (Candidate(instance, given),), judged=False, seed=0)


def test_a_finding_that_was_confirmed_with_another_class_of_fault_has_the_cause_of_its_candidates():
    alike = attribution(task(CUMPROD, "differs at [0]: got 1, expected 2"), lambda step: None)
    unlike = attribution(task(CUMPROD, "rank 1 holds shape (1,), S(0) of (1,) is (0,)"), lambda step: None)
    if alike.kind != RULE:
        pytest.skip("this torch is right")
    assert (unlike.kind, unlike.place, unlike.fix) == (alike.kind, alike.place, REPLICAS)


@pytest.mark.parametrize(("reason", "cause"), [
    ("rank 0: differs at [0]: got 1, expected 2", "aten._to_copy.default"), ("rank 1 raises ValueError: no", "aten.view.default"),
])  # fmt: skip
def test_of_ops_whose_replicas_cure_wrong_values_the_last_one_is_the_cause_and_of_errors_the_first(
    monkeypatch, reason, cause
):
    """Replicas in place of the results of any op before it make those of the op at fault right, too."""
    names = (
        "aten.alias.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.detach.default",
        "aten.sum.default",
    )
    monkeypatch.setattr(attribution_module, "_op_replaced", lambda op, keep: (op, keep))
    monkeypatch.setattr(Attributor, "cures", lambda self, *to: to[-1][0] in names[:4] and not to[-1][1])
    monkeypatch.setattr(Attributor, "_part", lambda self, step, around, keep: step.op)
    one = Attributor(None, judged=False)
    one._first = (None, reason)
    assert one._op([counterfactuals.OpStep(op, "strategy", None) for op in names]) == cause


@pytest.mark.parametrize(("how", "fix"), [(HANDLER, PLAIN_HANDLER), (DECOMPOSITION, OP_BY_OP)])
@pytest.mark.parametrize("seen", [4, 2])
def test_of_several_handlers_that_are_wrong_the_first_is_the_cause_and_not_an_op_before_them(
    monkeypatch, how, fix, seen
):
    """Replicas from `mul` hide all of them; where an error ends the run, the second one is seen once the first is replaced."""
    steps = [
        counterfactuals.OpStep("aten.mul.Tensor", "strategy", None),
        counterfactuals.OpStep("aten.convolution.default", how, CodePlace("forward", "torch/x.py", 1)),
        counterfactuals.OpStep("aten.argmax.default", how, CodePlace("right", "torch/x.py", 3)),
        counterfactuals.OpStep("aten.convolution_backward.default", how, CodePlace("backward", "torch/x.py", 5)),
    ]
    wrong = {steps[1].op, steps[3].op}
    for name in ("_op_replaced", "_decomposition_replaced"):
        monkeypatch.setattr(attribution_module, name, lambda op, keep=True: (op, keep))
    hidden = ("aten.mul.Tensor", False)
    monkeypatch.setattr(Attributor, "cures", lambda self, *to: hidden in to or wrong <= {op for op, _ in to})
    monkeypatch.setattr(Attributor, "_traced", lambda self, *to: (counterfactuals.Trace(steps), ""))
    one = Attributor(None, judged=False)
    one._first = (None, "on every rank: ValueError: x")
    found = one._op(steps[:seen])
    assert (found.kind, found.op, found.fix) == (how, "aten.convolution.default", fix)
    assert found.place.name == ("forward" if how == HANDLER else "DecompShardingStrategy._propagate_through_decomp")


CAST = program(
    Call("aten.alias.default", (Leaf(0),)), torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.complex64), inputs=((Partial(),),),
    then="cast int64",
)  # fmt: skip
CLOSE = program(
    Call("aten.alias.default", (Leaf(0),)), torch.ones(4, 4), inputs=((Shard(1),),),
    then="public torch.testing.assert_close(x, y), y is x but for element 0",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_the_op_that_a_program_begins_with_is_not_its_cause():
    """An `alias` in replicas makes any program right, and its result in new parts of a sum may do so by chance."""
    if torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("other versions have other faults")
    assert caused_by(CAST).op == "aten._to_copy.default"
    found = caused_by(CLOSE)
    assert (found.kind, found.place.name, found.op) == (PUBLIC_CALL, "assert_close", "")


MASKED = program(
    Call("aten.embedding.default", (Leaf(0), Leaf(1))), torch.arange(12.0).reshape(4, 3), torch.tensor([3, 0, 2]),
    inputs=((Shard(0),), (Replicate(),)), then="transpose",
)  # fmt: skip
"""Its result has a placement of DTensor's own, of which our plain gather knows nothing."""


def test_results_with_a_placement_of_dtensors_own_are_wrong_and_not_refused():
    if torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("other versions have other faults")
    found = caused_by(MASKED)
    assert (found.kind, found.op, fault_class(found.reason)) == (RULE, "aten.embedding.default", "values")
    with counterfactuals.op_replaced(
        torch.ops.aten.transpose.int, keep=False
    ):  # of the whole tensor, which DTensor gathers
        assert fault_of(outcome(program_work(MASKED))) == ""


DOUBLE = program(
    Call("aten.alias.default", (Leaf(0),)),
    torch.tensor(0.5),
    inputs=((Replicate(),),),
    then="R | absolute | grad twice",
)


def test_of_what_no_replacement_cures_and_all_ranks_refuse_the_function_that_raises_is_the_cause():
    if torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("other versions have other faults")
    found = caused_by(DOUBLE)
    assert (found.kind, found.place.file, found.why) == (
        DISPATCHER,
        "torch/distributed/tensor/_redistribute.py",
        RAISES_IN,
    )
    assert found.place.name == "_redistribute.forward"
    assert found.detail == "AttributeError: 'Tensor' object has no attribute '_local_tensor'"


def test_a_finding_that_no_simulated_run_shows_says_so():
    found = attribution(task(RIGHT, "differs at [0]: got 1, expected 2"), lambda step: None)
    assert (found.kind, found.why, found.reason) == (UNKNOWN, NOT_SIMULATED, "differs at [0]: got 1, expected 2")


@pytest.mark.parametrize(
    ("given", "fix"), [(CUMPROD, REPLICAS), (LOSS, OP_BY_OP), (SHIFT, WHOLE_CUT), (FLATTENED, PLAIN_MOVES)],
)  # fmt: skip
def test_the_fix_names_what_was_replaced(given, fix):
    if torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("other versions have other faults")
    assert caused_by(given).fix == fix


def test_a_right_program_has_no_cause():
    assert caused_by(RIGHT) is None and caused_by(LATER) is None


def test_replacing_another_function_does_not_cure_it():
    attributor = Attributor(program_work(CUMPROD), judged=False)
    other = CodePlace("none", "torch/none.py", 1)
    assert not attributor.cures(lambda: counterfactuals.rules_replaced(other))
    assert not attributor.cures(counterfactuals.redistribution_replaced)


@if_cumprod_has_a_rule
def test_faults_of_one_function_in_one_way_have_one_key():
    shorter = program(Call("aten.cumsum.default", (Leaf(0), -1)), torch.arange(1.0, 5.0), inputs=((Shard(0),),))
    one, other = caused_by(CUMPROD), caused_by(shorter)
    if one is None or other is None:
        pytest.skip("this torch is right")
    assert cause_key(one) == cause_key(other) != cause_key(caused_by(LOSS))


def test_the_class_of_a_fault_is_read_from_its_reason():
    assert fault_class("rank 1 raises IndexError: x; its peers go on and wait") == "raises"
    assert fault_class("DTensor refuses this call on every rank: RuntimeError: x") == "refused"
    assert fault_class("stops: Deadlock: ranks 0, 1 wait. Call the collectives in one order on every rank.") == "raises"
    assert fault_class("rank 1 holds shape (1,), S(0) of (1,) is (0,)") == "shape"
    assert fault_class("rank 0: result gathered from S(0) differs at [0]: got 1, expected 2") == "values"
    assert (result_class("S(0) -> P(sum)"), result_class("S(0) -> R, S(1)"), result_class("P(max) -> ()")) == (
        "P",
        "S",
        "P",
    )


@pytest.mark.skipif(torch.__version__.split(".")[:2] != ["2", "13"], reason="other versions have other faults")
def test_tensors_on_submeshes_that_cross_are_the_fault_of_the_decomposition_that_does_not_look_at_their_meshes():
    steps = public_steps("device_mesh.init_device_mesh, rows that cross", 2)
    step = next(s for s in steps if "mse_loss(a, t, reduction='none'" in s.call)
    x = torch.arange(1.0, 17.0).view(4, 4)
    sample = Sample(Call("aten.clone.default", (Leaf(0),)), (x,), "")
    given = Program(sample, (2, 2), ((Replicate(), Replicate()),), PUBLIC + step.call)
    found = caused_by(given)
    assert (found.kind, found.place.name, found.fix) == (
        DECOMPOSITION,
        "DecompShardingStrategy._propagate_through_decomp",
        "",
    )
    assert "every rank refuses the call: RuntimeError: Cannot run an op on inputs with different meshes" in found.why
    assert fault_class(found.reason) == "values" and cause_key(found)[4] == "refused op by op"


def test_a_decomposition_that_the_probe_found_wrong_is_not_said_to_be_refused_op_by_op():
    found = Attribution(DECOMPOSITION, None, "aten.mse_loss.default", "S(0) -> S(0)", why=BY_PIECES, reason="differs")
    assert cause_key(found)[4] == ""


SEEN: list[str] = []
"""The findings that this process has looked at."""


def forgetful(task, note):
    """Finds a cause only in a process that has looked at nothing else."""
    SEEN.append(task.name)
    found = len(SEEN) == 1 and task.name != "never"
    return Attribution(RULE if found else UNKNOWN, why="" if found else NOT_SIMULATED)


def test_a_finding_that_no_run_shows_is_looked_at_once_more_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(cause_module, "attribution", forgetful)
    tasks = [replace(task(CUMPROD, ""), name=name) for name in ("first", "second", "never")]
    found = cause_module.attributions(tasks, 1, Progress())
    assert [one.kind for one in found] == [RULE, RULE, UNKNOWN]


def test_a_shape_that_the_pieces_do_not_have_is_a_fault_of_the_shape_though_torch_raises_nothing():
    refused = "WrongPieceShape: its piece has shape (2, 3), S(0) of (4, 4) is (2, 4)"
    reason = fault_of(Confirmation("", f"DTensor cannot assemble the result on every rank: {refused}", refused=refused))
    assert fault_class(reason) != REFUSED and "its piece has shape (2, 3)" in reason


def test_what_no_replacement_cures_in_a_program_of_a_public_call_is_that_function():
    """torch 2.13: `rand` raises on a CPU mesh."""
    given = next(p for p in draw_public_programs((2,), seed=0) if p.public_call.startswith("rand("))
    found = Attributor(program_work(given), judged=False, program=given).cause()
    assert (found.kind, found.place.name, found.detail) == (PUBLIC_CALL, "rand", "tensor.rand")
    assert found.why == CALLED
    assert cause_key(found, str(given)) == (PUBLIC_CALL, "tensor.rand", REFUSED)
    assert Attributor(program_work(given), judged=False).cause().why == RAISES_IN


def test_a_fault_of_an_op_that_a_public_call_registers_is_that_of_the_call():
    drawn = [step for step in public_steps("experimental.register_sharding, arguments", 1) if "bool" in step.call]
    given = program(
        Call("aten.clone.default", (Leaf(0),)), torch.arange(1.0, 5.0).view(2, 2), inputs=((Shard(0),),),
        then=PUBLIC + drawn[0].call,
    )  # fmt: skip
    found = caused_by(given)
    if found is None:
        pytest.skip("this torch looks at all arguments")
    assert (found.kind, found.op) == (PUBLIC_CALL, "")
    assert found.detail == "experimental.register_sharding, arguments"


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("aten.add_.Tensor on (2,): S(0), then sum", "add"),
        ("DTensor.from_local(grad_placements=[Partial('sum')]) on (2,): R", "DTensor.from_local"),
        ("[Shard(0)] on (2,): R", "[Shard(0)]"),
        ("an exception within loss_parallel() on (2,): S(1)", "an exception within loss_parallel"),
    ],
)
def test_a_finding_without_a_function_is_named_by_its_op_or_its_public_call(name, subject):
    assert cause_key(Attribution(UNKNOWN, reason="every rank raises E: x"), name)[1] == subject


def test_the_case_of_a_public_call_fails_by_the_error_of_its_finding():
    """torch 2.13: `randn` raises on a CPU mesh.  Of a tensor without a dim 1, its `Shard(1)` is no call at all."""
    drawn = (p for p in draw_public_programs((2,), seed=0) if p.public_call.startswith("randn("))
    given = next(p for p in drawn if "Shard(1)" in p.public_call and p.sample.tensors[0].ndim > 1)
    found = replace(Attributor(program_work(given), judged=False, program=given).cause(), program=given)
    case = ordinary_case(CaseTask(cause_key(found, str(given)), (found,)), lambda number: None)
    assert "AssertionError" in found.reason and "AssertionError" in case.reason
    assert case.program.sample.tensors[0].ndim > 1


@pytest.mark.parametrize(("reason", "words"), [
    ("rank 1 raises IndexError: x; its peers wait", "IndexError on some ranks, for add"),
    ("DTensor refuses this call on every rank: torch.x.OutOfMemoryError: x", "an error on all ranks, for add"),
    ("DTensor refuses this call on every rank: ValueError: x", "ValueError on all ranks, for add"),
    ("rank 1 holds shape (1,), S(0) of (1,) is (0,)", "shards of a wrong shape, for add"),
    ("no rank returns within 8 s of processor time from f (torch/x.py:7); the op takes them", "no rank returns, for add"),
])  # fmt: skip
def test_a_title_says_which_error_is_raised_and_where(reason, words):
    found = Attribution(
        RULE, CodePlace("made.strategy", "torch/x.py", 1), "aten.add.Tensor", "S(0) -> S(0)", reason=reason
    )
    assert _cause(cause_key(found), [("name", found)], None, "2.13.0").record.what == words


def test_an_error_of_one_function_and_op_is_one_cause_whatever_it_would_give():
    found = Attribution(RULE, CodePlace("made.strategy", "torch/x.py", 1), "aten.add.Tensor", "S(0) -> S(0)", reason="")
    other = replace(found, detail="R -> R")
    for reason, alike in (("rank 1 raises IndexError: x", True), ("got 1, expected 2", False)):
        assert (cause_key(replace(found, reason=reason)) == cause_key(replace(other, reason=reason))) is alike


def test_a_cause_in_a_public_call_has_its_public_name_and_its_use_in_words():
    found = Attribution(
        PUBLIC_CALL,
        CodePlace("C.__init__", "torch/x.py", 1),
        detail="parallel.C, modules trained, tied",
        reason="got 1, expected 2",
    )
    made = _cause(cause_key(found), [("name", found)], None, "2.13.0").record
    assert made.name == "parallel.C: wrong values (a training step, shared parameters)"


WRITTEN = program(
    Call("aten.clone.default", (Leaf(0),)), torch.arange(1.0, 5.0), inputs=((Shard(0),),), then=PUBLIC + "x[0] = y"
)


def test_of_a_public_call_that_writes_to_a_view_of_a_copy_the_rule_of_the_view_is_the_cause():
    found = caused_by(WRITTEN)
    if found is None:
        pytest.skip("this torch refuses such a view, or has none of a copy")
    assert (found.kind, found.op, found.fix, found.why) == (RULE, "aten.select.int", BASE_REPLICATED, OF_COPY)


PINV, SUM = "aten.linalg_pinv.atol_rtol_tensor", "aten.nansum.default"
GIVEN = Call(PINV, (Leaf(0),), (("rtol", Leaf(1)),))
GIVEN_OUT = Call(f"{PINV}_out", (Leaf(0),), (("rtol", Leaf(1)), ("out", Leaf(2))))
OTHER = Call("aten.neg.default", (Leaf(0),))


@pytest.mark.parametrize(
    ("call", "op", "wrong", "trait", "behind"),
    [
        (GIVEN, PINV, "got 1, expected 2", "arguments given by keyword", "redistribute_local_args"),
        (OTHER, PINV, "rank 1 holds shape (1,), S(0) of (1,) is (0,)", "arguments given by keyword", "redistribute_local_args"),
        (GIVEN_OUT, GIVEN_OUT.op, "got 1, expected 2", "arguments given by keyword", "redistribute_local_args"),
        (GIVEN_OUT, GIVEN_OUT.op, "DTensor refuses this call on every rank: ValueError: x", "tensors given as out=", ""),
        (OTHER, SUM, "got 1, expected 2", "the results of the ranks", ""),
        (OTHER, "aten.__rshift__.Scalar", "got 1, expected 2", "DTensor takes this op for one in place, by its name", "is_inplace_op"),
    ],
)  # fmt: skip
def test_a_fault_of_the_dispatcher_is_told_apart_by_the_call_and_its_page_names_the_function_behind(
    call, op, wrong, trait, behind
):
    sample = Sample(call, (torch.ones(2, 2), torch.ones(()), torch.ones(2, 2)), "")
    given = Program(sample, (2,), ((Replicate(),),) * 3)
    found = Attribution(DISPATCHER, CodePlace("tail", "torch/x.py", 1), op, reason=wrong, program=given)
    assert cause_key(found)[2] == trait
    why = _cause(cause_key(found), [("name", found)], None, "2.13.0").record.why
    assert behind in why if behind else not why


def test_a_lambda_in_a_table_is_named_by_its_entry():
    assert registered_place(torch.ops.aten.permute.default).name == "dim_maps[permute]"
