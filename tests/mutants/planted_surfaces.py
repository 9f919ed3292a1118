"""Bugs planted by hand: gate, caches, propagation, reports, the journal."""

from __future__ import annotations

from tests.mutants.values import Planted

GATE_ALONE = ("tests/strategies/test_gate.py",)
CHANGED = ("tests/strategies/test_changed.py", "tests/strategies/test_changed_digest.py")

CACHES = (
    Planted(
        "strategies/cache.py",
        "    if any(odd):",
        "    if not odd:",
        "a miss over two placements of a class of the user's own is explained by nothing at all",
    ),
    Planted(
        "strategies/keys.py",
        "        return _TRUE if value else _FALSE",
        "        return value",
        "x + True is answered as x + 1, in another dtype",
    ),
    Planted(
        "strategies/keys.py",
        "return (float, value) if value and not isnan(value) else (float, repr(value))",
        "return (float, value)",
        "-0.0 gets the answer of 0.0, and NaN is computed each time",
    ),
    Planted(
        "strategies/keys.py",
        'text += f" by {spec.shard_order}"',
        'text += ""',
        "a tensor whose axes take other turns is answered as one from left to right",
    ),
    Planted(
        "strategies/propagate.py",
        "known = (op, _default_dtype(), *map(id, [*specs, *args]))",
        "known = (op, *map(id, [*specs, *args]))",
        "after set_default_dtype the results still have the old dtype",
    ),
    Planted(
        "strategies/propagate.py",
        "same[known] = (found, *specs, *(",
        "same[known] = (found, *(",
        "specs that died leave their identity, and their answer, to others",
    ),
    Planted(
        "strategies/propagate.py",
        "if found.mesh is mesh or mesh is None or found.mesh == mesh:",
        "if found.mesh is mesh or mesh is None or found.mesh.sizes == mesh.sizes:",
        "an answer speaks of the axes of another mesh",
    ),
    Planted(
        "strategies/propagate.py",
        "if spec.mesh is not mesh and spec.mesh != mesh:",
        "if spec.mesh is not mesh and spec.mesh.sizes != mesh.sizes:",
        "two tensors on two meshes of the same sizes are taken for tensors on one",
    ),
    Planted(
        "strategies/overlay_plan.py",
        "held, tuple(mesh.shape), torch.get_default_dtype()",
        "held, tuple(mesh.shape)",
        "after set_default_dtype an op under an overlay claims the old dtype",
    ),
    Planted(
        "strategies/overlay_plan.py",
        "self._ready.get((key, Same(mesh)), ",
        "self._ready.get(key, ",
        "results of one mesh come back on another of the same sizes",
        ("tests/strategies/test_overlay_call.py", "tests/strategies/test_overlay.py"),
    ),
    Planted(
        "strategies/overlay_plan.py",
        "spec.tensor_meta, spec.shard_order)",
        "spec.tensor_meta)",
        "wrong rows in silence for a tensor whose axes take other turns",
    ),
    Planted(
        "strategies/verdict_cache.py",
        'told["name"] == name and told["sum"] == _hex(told["said"])',
        'told["name"] == name',
        "a verdict that somebody has edited is believed",
    ),
    Planted(
        "strategies/verdict_cache.py",
        "if not content or not self.tool:",
        "if not content:",
        "a torch that is being worked on is answered with verdicts from before the edit",
    ),
    Planted(
        "strategies/verdict_cache.py",
        "if op in whole and op not in tied",
        "if op in whole",
        "a verdict that was taken over from another overload is kept, and stays when that one changes",
    ),
)

PROPAGATION = (
    Planted(
        "strategies/expansion.py",
        "        return self.mixed(beginning, line)",
        '        return ""',
        "one tensor is P(sum) on one axis and P(max) on another, and nobody knows which goes first",
    ),
    Planted(
        "strategies/expansion.py",
        "        for piece in beginning.pieces:\n            same =",
        "        for piece in beginning.pieces[:1]:\n            same =",
        "what is right for full pieces only is chosen where the last rank has fewer rows",
    ),
    Planted(
        "strategies/expansion.py",
        "seconds += math.fsum(step.seconds for step in more)",
        "seconds = math.fsum(step.seconds for step in more)",
        "the dearer of two ways is taken: only the last tensor's moves count",
    ),
    Planted(
        "strategies/expansion.py",
        "if not problem.movable and line.inputs[leaf] !=",
        "if problem.movable and line.inputs[leaf] !=",
        "an op in place writes to a copy, and the tensor itself stays as it was",
    ),
    Planted(
        "strategies/local_arguments.py",
        "found |= {full, full + 1}",
        "found |= {full}",
        "empty pieces are never looked at: a maximum of no rows is chosen",
    ),
    Planted(
        "strategies/propagate_rules.py",
        "        for line in said:\n            check_line(entry, line, ask)\n",
        "",
        "a rule that names a dim which is not there ends in an IndexError somewhere else",
    ),
    Planted(
        "strategies/output_metadata.py",
        "torch.autocast(device, enabled=False)",
        "torch.autocast(device, enabled=True)",
        "what was asked under autocast is remembered for those who ask without it",
    ),
    Planted(
        "strategies/overlay_call.py",
        "    mine.copy_(moved(used, DTensorSpec(spec.mesh, now, tensor_meta=spec.tensor_meta), spec.placements))",
        "    mine.copy_(used)",
        "an in-place op leaves the whole value, or another rank's rows, in the tensor it wrote to",
    ),
)

GATE = (
    Planted(
        "strategies/baseline.py",
        "if read(baseline.path).text != baseline.text:",
        "if read(baseline.path).text is None:",
        "two gates at once: what the other one accepted is lost",
    ),
    Planted(
        "strategies/baseline.py",
        "entries=tuple(sorted((*kept, *more), key=lambda e: e.key))",
        "entries=tuple((*kept, *more))",
        "entries lie in another order than in the file, so that nothing to do is a change",
    ),
    Planted(
        "strategies/gate.py",
        "entry.expires < today",
        "entry.expires <= today",
        "an exception that is good until today fails today",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate.py",
        "if key not in shown | suspected and tried.covers(key)]",
        "if key not in shown and tried.covers(key)]",
        "what is suspected again and only not confirmed this time is removed by --update",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate.py",
        "if key not in shown | suspected and tried.covers(key)]",
        "if key not in shown | suspected]",
        "--changed with --update empties the baseline of all that it did not try",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate.py",
        'alone = ALONE if "->" in key.rule else PAIRS',
        "alone = ALONE",
        "an accepted program is gone whenever its op alone was tried",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate.py",
        "lasting = {key: entry for key, entry in entries.items() if not _over(entry, today)}",
        "lasting = dict(entries)",
        "an exception never expires",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate.py",
        "    known = {entry.key for entry in less.entries} - expired",
        "    known = {entry.key for entry in less.entries}",
        "--accept says that it is done, and what has expired goes on failing",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate_values.py",
        "if self.new or self.gone:",
        "if self.new:",
        "a baseline never shrinks: stale entries pass",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate_run.py",
        "if not left[op] and op not in crashed and instances[op])",
        "if not left[op] and instances[op])",
        "an overload that crashed half way counts as tried: its accepted findings are called gone",
    ),
    Planted(
        "strategies/gate_run.py",
        "(u.op, u.dtypes, mesh_kind(u.mesh), u.trial)",
        "(u.op, u.dtypes, mesh_kind((1,)), u.trial)",
        "accepted findings on two axes are never tried, and never gone",
    ),
    Planted(
        "strategies/gate_work.py",
        "untried = (*done.untried, *_unreached(what, done))",
        "untried = done.untried",
        "an overload of which no call could be judged passes without a word",
        ("tests/strategies/test_gate_work.py::test_an_overload_that_refuses_every_call_is_named_with_the_reason",),
    ),
    Planted(
        "strategies/gate_work.py",
        "    return None if module and digest == OUTSIDE else digest",
        "    return digest",
        "a rule in a file that git does not know is edited, and the old verdict stays",
        ("tests/strategies/test_gate_work.py::test_rules_that_are_nowhere_in_the_project_are_not_remembered",),
    ),
    Planted(
        "strategies/gate_asked.py",
        "total = (hours * 60 + minutes) * 60 + seconds",
        "total = hours * 60 + minutes * 60 + seconds",
        "--budget 1h ends after a minute",
    ),
)

CHANGES = (
    Planted(
        "strategies/changed.py",
        "        if seen.slice.text != before.slice.text:",
        "        if len(seen.slice.parts) != len(before.slice.parts):",
        "an edited rule is not judged: only statements that come or go count",
        CHANGED,
    ),
    Planted(
        "strategies/changed_project.py",
        "if p in now.texts and blob_name(now.texts[p], blob) == blob}",
        "if p in now.texts}",
        "--changed compares today with today: nothing ever changed",
        CHANGED,
    ),
    Planted(
        "strategies/changed_form.py",
        "[*args.defaults, *args.kw_defaults]",
        "args.defaults",
        "another default of a keyword argument is no change",
        ("tests/strategies/test_changed_form.py",),
    ),
    Planted(
        "strategies/changed_names.py",
        "for star in reversed(module.stars):",
        "for star in module.stars:",
        "of two star imports the wrong one is followed",
        ("tests/strategies/test_changed_names.py",),
    ),
    Planted(
        "strategies/changed_digest.py",
        "if seen.reads or versions is None or not all(map(_follows, outside)):",
        "if versions is None or not all(map(_follows, outside)):",
        "the verdict on a rule that reads a file is remembered when the file has changed",
    ),
    Planted(
        "strategies/git_tree.py",
        '"ls-files", "--cached", "--others", "--exclude-standard", ',
        '"ls-files", "--cached", "--exclude-standard", ',
        "a new file that is not added yet is not seen",
    ),
)

OUTPUTS = (
    Planted(
        "strategies/outputs_annotations.py",
        '.replace("%", "%25").replace("\\r", "%0D").replace("\\n", "%0A")',
        '.replace("\\r", "%0D").replace("\\n", "%0A").replace("%", "%25")',
        "GitHub shows %250A where a line ends",
    ),
    Planted(
        "strategies/outputs_junit.py",
        "    for entry in result.gone:\n        wrong[entry.key.op].append(stale(entry))\n",
        "",
        "the gate fails for a stale entry, and the CI server shows no failure",
    ),
    Planted(
        "strategies/outputs_junit.py",
        '    cases |= {op: ("skipped", why, "") for op, why in result.untried}\n',
        "",
        "what there was no time for is shown as passed",
    ),
    Planted(
        "strategies/outputs_sarif.py",
        '"results": results[:MOST],',
        '"results": results,',
        "GitHub refuses a file of five thousand results",
    ),
    Planted(
        "strategies/outputs_sarif.py",
        '"partialFingerprints": {"primaryLocationLineHash": f"{sign}:1"',
        '"partialFingerprints": {"primaryLocationLineHash": f"{sign}:{place.line}"',
        "every edit above a rule closes its alert and opens a new one",
    ),
    Planted(
        "strategies/outputs_summary.py",
        'map(ord, "&<>|`*_[]\\\\~$#!@")',
        'map(ord, "&<>`*_[]\\\\~$#!@")',
        "a | in a reason breaks the table",
    ),
    Planted(
        "strategies/outputs_json.py",
        '"new": [_key(key) for key in judged.new],',
        '"new": [_key(key) for key in judged.keys],',
        "what was accepted is told to programs as new",
    ),
    Planted(
        "strategies/report.py",
        'finding.script.replace("{name}", name)',
        "finding.script",
        "a repro script calls itself {name}",
    ),
    Planted(
        "strategies/report.py",
        "|^hangs: |",
        "|",
        "a hang is listed among what is silently wrong",
    ),
    Planted(
        "strategies/html_findings.py",
        '"alone" if not finding.title else "meshes" if len(mesh) > 1 else "pairs"',
        '"alone" if not finding.title else "pairs"',
        "the filter for meshes of several axes is never offered",
    ),
    Planted(
        "strategies/html_picture.py",
        "wrong=spot < len(want.values) and not same(",
        "wrong=spot < len(want.values) and same(",
        "the right numbers are red",
    ),
    Planted(
        "strategies/coverage.py",
        'return f"{int(share * 1000) / 10:.1f} %"',
        'return f"{share * 100:.1f} %"',
        "100.0 % where one overload of two thousand is missing",
    ),
)

JOURNALS = (
    Planted(
        "strategies/tally.py",
        "if known is None or _rank(s.finding) < _rank(known):",
        "if known is None or _rank(s.finding) > _rank(known):",
        "of two verdicts on one rule the milder one is told",
    ),
    Planted(
        "strategies/tally.py",
        "    clean -= named\n",
        "",
        "a rule is counted as sound and as unsound",
    ),
    Planted(
        "strategies/tally.py",
        "sum(unit not in done for unit in plan(begin))",
        "0",
        "a sweep that was cut short looks finished",
    ),
    Planted(
        "strategies/journal.py",
        "if line is None and number == len(rows) - 1 and found:",
        "if line is None and found:",
        "all that stands after a spoiled line is dropped without a word",
    ),
    Planted(
        "strategies/covered.py",
        'verdicts[op].add(Verdict.SOUND.value if line["verdict"] == "cleared" else line["verdict"])',
        'verdicts[op].add(line["verdict"])',
        "what a real run has cleared has no verdict in the table",
    ),
    Planted(
        "strategies/races_history.py",
        "now == call.answer and _explained(rest, kept, used)",
        "now is not None and _explained(rest, kept, used)",
        "a stale answer after a clear is explained away",
    ),
    Planted(
        "strategies/sealed.py",
        "            noted, since = size, time.monotonic()\n",
        "            noted = size\n",
        "a long task is killed though it goes on step by step",
    ),
)

PLANTED: tuple[Planted, ...] = (*CACHES, *PROPAGATION, *GATE, *CHANGES, *OUTPUTS, *JOURNALS)
