"""Attention under context parallelism: torch's own is right on every number of ranks, and planted faults are found."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as cp

from localtensor.processes import Pool
from strategies.model.verdict import ALONE, WorkUnit
from strategies.programs.mesh_validation import ATTENTION, NOT_TESTED, ring_programs, validate_context_parallel
from strategies.programs.run.real_run import ProgramRealRuns, run_simulated_programs
from strategies.programs.run.step_functions import RINGS
from strategies.programs.script import program_script
from strategies.validation.finding import OverloadTask, TaskResult
from tests.strategies import script_runner

CAUSAL = {name for name in RINGS if "causal" in name}
BALANCED = {name for name in RINGS if "balanced" in name}


def validated(mesh=(2,)):
    results = [TaskResult(WorkUnit(ATTENTION, ALONE, "real", mesh))]
    validate_context_parallel(OverloadTask(ATTENTION, (), (mesh,), 0, ALONE), results, lambda step: None)
    (result,) = results
    assert result.tried == len(RINGS) == 6 and result.skipped == {NOT_TESTED: 1}
    return {candidate[0].program.then for candidate in result.suspects.values()}


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_of_torch_is_right_and_runs(ranks):
    found = run_simulated_programs(ring_programs((ranks,), 0))
    assert [one.note for one in found] == ["DTensor's own run is right"] * 6
    assert validated((ranks,)) == set()


def test_it_leaves_dtensor_as_it_was():
    before = DTensor._op_dispatcher._custom_op_handlers, vars(cp._cp_options).copy()
    validated()
    assert (DTensor._op_dispatcher._custom_op_handlers, vars(cp._cp_options)) == before
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_dot_product_flash_attention", "CPU")


def test_later_keys_that_are_not_masked_are_found(monkeypatch):
    real = cp._is_causal_behavior

    def unmasked(rank, world_size, i, is_causal):
        found = real(rank, world_size, i, is_causal)
        return cp._CausalBehavior.NOT_IS_CAUSAL if found is cp._CausalBehavior.SKIP else found

    monkeypatch.setattr(cp, "_is_causal_behavior", unmasked)
    assert validated() == CAUSAL - BALANCED


def test_a_wrong_merge_of_partial_results_is_found(monkeypatch):
    def last(self, block_out, block_lse, partial):
        self._lse, self._out, self._should_lse_squeeze = block_lse.unsqueeze(-1), block_out, True

    monkeypatch.setattr(cp._SDPAMerger, "_merge_one", last)
    assert validated() >= set(RINGS) - CAUSAL


def test_gradients_that_stay_on_the_wrong_rank_are_found(monkeypatch):
    monkeypatch.setattr(cp._AllToAllRotater, "exchange_buffers", lambda self, buffer: setattr(self, "_buffer", buffer))
    assert validated() == set(RINGS)


def test_real_processes_agree_and_the_script_runs_without_us():
    programs = ring_programs((2,), 0)
    with ProgramRealRuns("gloo") as real_runs:
        assert [real_runs.confirm_program(one).note for one in programs] == ["DTensor's own run is right"] * 6
    text = program_script(programs[-1], "a test", "name")
    assert "import strategies" not in text and "from strategies" not in text
    with Pool(2, backend="gloo", timeout=60) as pool:
        assert [outcome.value[0] for outcome in pool.call(script_runner.run_script, [(text,)] * 2)] == [0, 0]
