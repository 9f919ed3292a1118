"""Bugs planted by hand: schedules, watches, stores, real processes, the pytest plugin."""

from __future__ import annotations

from tests.tools.mutants.values import Planted

RULES = ("tests/strategies/validation/assertions/test_api.py",)
DRAWS = ("tests/localtensor/testing/hypothesis_strategies/test_draws_layouts.py",)

SCHEDULES = (
    Planted(
        "localtensor/threads/run_token.py::RunToken.step_aside",
        "others = [other for other in self._runnable if other not in self._polled]",
        "others = [other for other in self._runnable if other != rank]",
        "two ranks that poll go on for ever, and a third that could help never runs",
    ),
    Planted(
        "localtensor/threads/run_token.py::RunToken.block",
        "            self._diagnose()\n            self.aborting = True\n            raise Abort",
        "            self.aborting = True\n            raise Abort",
        "a deadlock ends the run without a word",
    ),
    Planted(
        "localtensor/threads/run_token.py::RunToken._leave",
        "self.idents.pop(rank, None)",
        "self.idents.get(rank, None)",
        "a thread that the user starts later is taken for the rank that has gone",
    ),
    Planted(
        "localtensor/threads/run_token.py::RunToken.interrupt",
        "            self._unfinished.discard(stuck)\n",
        "",
        "a rank that does not obey gets the run token again, and the others are never ended",
    ),
    Planted(
        "localtensor/concurrency/schedule.py::RoundRobinSchedule.next",
        "place = bisect_left(runnable, current)",
        "place = bisect_left(runnable, current + 1)",
        "round_robin takes the turn from a rank that could go on",
    ),
    Planted(
        "localtensor/concurrency/schedule.py::RecordedSchedule._start",
        'crc32(b"%d:" % ranks)',
        'crc32(b"0:")',
        "a digest fits a run of another number of ranks",
    ),
    Planted(
        "localtensor/concurrency/schedule.py::_ListedAnswers.begin",
        "        self._policy.begin(ranks)\n        self._left",
        "        self._left",
        "a replay goes on otherwise than the run did, once its list is over",
    ),
    Planted(
        "localtensor/concurrency/schedule.py::_ListedAnswers.number",
        'answer[0] != "n" or int(answer[1:]) >= below',
        'answer[0] != "n" or int(answer[1:]) > below',
        "a replay of another program answers with a sender that there is not",
    ),
)
MEETINGS = (
    Planted(
        "localtensor/collectives/rendezvous.py::match_key",
        "        op,\n        root,\n        dtypes[:1]",
        "        op,\n        None,\n        dtypes[:1]",
        "ranks that broadcast from different roots are not told, and get somebody's tensor",
    ),
    Planted(
        "localtensor/collectives/rendezvous.py::Group.close",
        "parts = [rendezvous.parts[rank] for rank in self.ranks]",
        "parts = list(rendezvous.parts.values())",
        "all_gather gives the tensors in the order in which ranks came",
    ),
    Planted(
        "localtensor/collectives/rendezvous.py::Mailbox.recv",
        "key = (_peer(ticket.part), ticket.part.rank, _tag(ticket.part))",
        "key = (_peer(ticket.part), ticket.part.rank, 0)",
        "a receive with a tag never meets its send",
    ),
    Planted(
        "localtensor/threads/simulation.py::Simulation.wait",
        "        self._handed_out.pop(ticket, None)\n",
        "",
        "work that was waited for is called work that nobody waited for",
        ("tests/localtensor/threads/test_process_group_work.py",),
    ),
    Planted(
        "localtensor/threads/simulation.py::Simulation._deliver_message",
        "if send.part.tensors != recv.part.tensors:",
        "if len(send.part.tensors) != len(recv.part.tensors):",
        "a receive of another dtype than what is sent is no error, and its buffer is never right",
        ("tests/localtensor/collectives/test_rendezvous_mailbox.py",),
    ),
    Planted(
        "localtensor/threads/dist_patches.py::_declare_group",
        'key = f"{world.epoch}/{name}"',
        "key = name",
        "who destroys the default group and makes it again with other subgroups is told that ranks disagree",
    ),
    Planted(
        "localtensor/threads/store.py::RankStore.set",
        "if all(one in self._values for one in keys):\n                self._waiting",
        "if any(one in self._values for one in keys):\n                self._waiting",
        "store.wait of two keys returns when one is there",
    ),
    Planted(
        "localtensor/threads/process_group.py::RankWork.is_completed",
        "        if done:\n            self.wait()\n        return done",
        "        return done",
        "is_completed() is true, and the output is not there",
    ),
    Planted(
        "localtensor/collectives/argument_checks.py::check_message",
        "    for x in tensors:\n        if not x.is_contiguous():",
        "    for x in tensors[1:]:\n        if not x.is_contiguous():",
        "a column of a tensor is sent, which gloo refuses",
    ),
)
VERDICTS = (
    Planted(
        "localtensor/threads/buffer_watch.py::BufferWatch._check_op",
        "for ticket, held in self._inputs.items() if written else ():",
        "for ticket, held in self._inputs.items():",
        "who reads the input of a collective in flight, as one may, is told of a race",
    ),
    Planted(
        "localtensor/threads/buffer_watch.py::_is_view_op",
        "all(r.alias_info is not None and not r.alias_info.is_write for r in returns)",
        "all(r.alias_info is not None for r in returns)",
        "x.add_(1) before the wait is no race any more",
    ),
    Planted(
        "localtensor/threads/diagnosis.py::stuck_error",
        "if broken is not None and (broke_first or not raised):",
        "if broken is not None:",
        "a rank raises, its peers go on to what does not fit, and the error speaks of that alone",
    ),
    Planted(
        "localtensor/threads/diagnosis.py::_rank_raised",
        "verdict.errors[raised[0].rank]",
        "verdict.errors[raised[-1].rank]",
        "the cause of the error is the exception of a rank that came later",
    ),
    Planted(
        "localtensor/collectives/compare.py::differences",
        "elif type(a) is not type(b) or not _equal(a, b):",
        "elif not _equal(a, b):",
        "1 on one rank and True on the other are the same",
    ),
    Planted(
        "localtensor/processes/pool.py::error_of_outcomes",
        "(_reports_lost_peer(one), one.at or",
        "(one.at or",
        "the rank that only says that its peer has gone is called the first cause",
    ),
    Planted(
        "localtensor/_util/pickling.py::_tensor_fields",
        'strides = x.stride() if dense else torch.empty(x.shape, device="meta").stride()',
        'strides = torch.empty(x.shape, device="meta").stride()',
        "a transposed sample comes out of a worker contiguous, and another kernel is judged",
    ),
)
PLUGIN = (
    Planted(
        "localtensor/pytest_plugin/marks.py::_setting",
        "return general if name in settings.typed else keywords.get(name, general)",
        "return keywords.get(name, general)",
        "the schedule that a failure printed to repeat it is not heard where the mark names one",
    ),
    Planted(
        "localtensor/pytest_plugin/marks.py::collect_marks",
        "keywords = {**mark.kwargs, **keywords}",
        "keywords = {**keywords, **mark.kwargs}",
        "the mark of the class goes before that of the method",
    ),
    Planted(
        "localtensor/pytest_plugin/fixtures.py::RankFixtures.finish",
        "self._finalizers.pop()()",
        "self._finalizers.pop(0)()",
        "a fixture is torn down before those that use it",
    ),
    Planted(
        "localtensor/pytest_plugin/assertions.py::_priority",
        "return 2 if isinstance(error, pytest.xfail.Exception) else 1",
        "return 1 if isinstance(error, pytest.xfail.Exception) else 2",
        "one rank fails, another xfails, and the test is green",
    ),
    Planted(
        "localtensor/pytest_plugin/item.py::schedule_texts",
        "for number in range(plan.flaky - 1)]",
        "for number in range(plan.flaky)]",
        "--rank-flaky 10 runs each test eleven times",
    ),
    Planted(
        "localtensor/pytest_plugin/item.py::EnvironmentSnapshots.restore",
        "            if first is None:\n",
        "            if first is not None:\n",
        "RANK of a rank thread stays in the environment of the tests that follow",
    ),
    Planted(
        "localtensor/errors/failure_report.py::_of_ranks",
        "for one in fault.raised[1:] if _fact(one, places) == _fact(first, places)",
        "for one in fault.raised if _fact(one, places) == _fact(first, places)",
        "the rank that is the first cause agrees with itself",
    ),
    Planted(
        "localtensor/threads/state/swap.py::switch",
        "old.flags, old.plain, old.owned, old.specials = flags, plain, owned, specials",
        "old.flags, old.plain, old.specials = flags, plain, specials",
        "what one rank has put there in place of sys.argv is gone when it runs again",
    ),
)
TESTING = (
    Planted(
        "localtensor/testing/hypothesis_strategies/values.py::exact_unit",
        "{torch.bfloat16: 0.5, torch.float16: 0.25}",
        "{torch.float16: 0.25}",
        "sums of drawn bfloat16 numbers are rounded, and right properties fail",
        ("tests/localtensor/testing/hypothesis_strategies/test_draws_values.py",),
    ),
    Planted(
        "localtensor/testing/hypothesis_strategies/layouts.py::_addends",
        "torch.where(alone, x, 0).to(x.dtype)",
        "x",
        "every rank holds the infinity of a sum, and the parts do not make the whole",
        ("tests/localtensor/testing/hypothesis_strategies/test_draws_values.py",),
    ),
    Planted(
        "localtensor/testing/hypothesis_strategies/layouts.py::placement_options",
        "if (dtype is None or is_unambiguous(kind, dtype)) and",
        "if",
        "averages of integers are drawn, which mean nothing",
        DRAWS,
    ),
    Planted(
        "localtensor/testing/hypothesis_strategies/layouts.py::_order",
        "sorted(given) != list(range(len(taken)))",
        "len(given) != len(taken)",
        "a text whose turns leave one out is read as a spec that nobody wrote",
        ("tests/localtensor/testing/hypothesis_strategies/test_draws_sharded.py",),
    ),
    Planted(
        "strategies/validation/difference.py::shape_difference",
        "tuple(piece.shape) != shape:",
        "piece.ndim != len(shape):",
        "a rank with too many rows ends the test with a crash, and not with the rule that is wrong",
        RULES,
    ),
    Planted(
        "strategies/validation/probe.py::Probe._expected",
        "*(claim.rule.inputs[leaf] for leaf in self.written))",
        "*(Replicate() for leaf in self.written))",
        "a right rule of an op that writes to its argument is called wrong",
        RULES,
    ),
    Planted(
        "strategies/validation/assertions/ops.py::shards_one_dim",
        'return len(cut) <= 1 and "1" not in cut',
        "return len(cut) <= 1",
        "a right rule of add is called wrong, because the dim that it cuts is broadcast",
        ("tests/strategies/validation/assertions/test_ops.py",),
    ),
    Planted(
        "localtensor/layout/tolerance.py::measured_slack",
        "moved <= max(JUMP_SHARE, 8 * eps) * scale",
        "moved <= JUMP_SHARE * scale",
        "one unit in the last place of bfloat16 is a jump, and nothing in it is ever judged",
    ),
    Planted(
        "localtensor/layout/tolerance.py::within_slack",
        "same = (got == want) | slack.isinf()",
        "same = got == want",
        "an integer that depends on how a tie is broken makes a right rule wrong",
    ),
    Planted(
        "localtensor/testing/programs/model.py::Step.gets",
        '        if self.kind in ("reduce", "gather", "gather_object"):',
        '        if self.kind in ("reduce", "gather"):',
        "what only the root of gather_object gets is looked at on all ranks",
    ),
    Planted(
        "localtensor/testing/programs/model.py::Step.brought",
        "            return (rows, many * columns) if self.dim else (many * rows, columns)",
        "            return (many * rows, columns)",
        "reduce_scatter along the last dim is drawn with a shape that it cannot take",
    ),
    Planted(
        "localtensor/testing/programs/program.py::RankProgram.__call__",
        "if dist.get_world_size() != self.ranks:",
        "if dist.get_world_size() < self.ranks:",
        "a program on more ranks than it is for ends in an IndexError of our own",
    ),
    Planted(
        "localtensor/testing/programs/program.py::RankProgram.rendered",
        "lines[len(text)] = rank, index",
        "lines[len(text) + 1] = rank, index",
        "an error is taken for that of the event before",
    ),
)
PROCESSES = (
    Planted(
        "localtensor/processes/worker.py::calls_for_fence",
        "reply.steps[0] != reply.steps[1]",
        "reply.steps[0] == reply.steps[1]",
        "what a job has left under way meets the collectives of the next one",
    ),
    Planted(
        "localtensor/_util/pickling.py::_Pickler.reducer_override",
        "(self.views or value.requires_grad) and _is_view(value)",
        "value.requires_grad and _is_view(value)",
        "a conjugate or a slice comes back from a process as another tensor",
    ),
    Planted(
        "localtensor/_util/pickling.py::rebuild_tensor",
        "    return made.to(device).requires_grad_(wants_grad)",
        "    return made.to(device)",
        "a tensor that wants a gradient comes back from a process as one that does not",
    ),
    Planted(
        "localtensor/processes/worker.py::_frames_of_job",
        "        if inner.f_code is _serve_jobs.__code__:\n            return\n",
        "",
        "a rank that hangs is said to be in our own lines, or in those that started it",
    ),
    Planted(
        "localtensor/runner/torchrun.py::_exit_code",
        "        return (code or 0) & 0xFF",
        "        return code or 0",
        "sys.exit(256) is a failure here, and none under python",
    ),
    Planted(
        "localtensor/runner/torchrun.py::_on_threads.body",
        "        sys.argv = list(argv)",
        "        sys.argv = argv",
        "a rank that takes its arguments off sys.argv takes them from all others",
    ),
    Planted(
        "localtensor/runner/torchrun.py::_first_on_path",
        "        sys.path[:] = before",
        "        pass",
        "a script's folder stays on the path of whoever called, and hides modules of the same name",
    ),
    Planted(
        "localtensor/runner/torchrun.py::_on_threads",
        "            if not any(codes.values()) or isinstance(fault, errors.RankRaised):",
        "            if not any(codes.values()):",
        "a rank's exception is lost where another rank had left with an error",
    ),
)
PLANTED: tuple[Planted, ...] = (*SCHEDULES, *MEETINGS, *VERDICTS, *PLUGIN, *TESTING, *PROCESSES)
