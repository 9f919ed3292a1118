"""Bugs planted by hand: gate, reports, the journal."""

from __future__ import annotations

from tests.tools.mutants.values import Planted

GATE_ALONE = ("tests/strategies/gate/test_decision.py",)
CHANGED = ("tests/strategies/gate/changes/test_select.py", "tests/strategies/gate/changes/test_version_view.py")

GATE = (
    Planted(
        "strategies/gate/baseline.py::write",
        "if read(baseline.path).text != baseline.text:",
        "if read(baseline.path).text is None:",
        "two gates at once: what the other one accepted is lost",
    ),
    Planted(
        "strategies/gate/baseline.py::Baseline.also",
        "entries=tuple(sorted((*kept, *more), key=lambda e: e.key))",
        "entries=tuple((*kept, *more))",
        "entries lie in another order than in the file, so that nothing to do is a change",
    ),
    Planted(
        "strategies/gate/decision.py::decide",
        "e.expires >= today}",
        "e.expires > today}",
        "an exception that is good until today fails today",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate/decision.py::decide",
        "if key not in shown | suspected and tried.covers(key)]",
        "if key not in shown and tried.covers(key)]",
        "what is suspected again and only not confirmed this time is removed by --update",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate/decision.py::decide",
        "if key not in shown | suspected and tried.covers(key)]",
        "if key not in shown | suspected]",
        "--changed with --update empties the baseline of all that it did not try",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate/decision.py::RunCoverage.covers",
        'alone = ALONE if "->" in key.rule else PAIRS',
        "alone = ALONE",
        "an accepted program is gone whenever its op alone was tried",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate/decision.py::decide",
        "valid = {key: e for key, e in entries.items() if e.expires is None or e.expires >= today}",
        "valid = dict(entries)",
        "an exception never expires",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate/decision.py::amend_baseline",
        "    known = {entry.key for entry in less.entries} - expired",
        "    known = {entry.key for entry in less.entries}",
        "--accept says that it is done, and what has expired goes on failing",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate/baseline.py::GateResult.exit_code",
        "if self.new or self.gone:",
        "if self.new:",
        "a baseline never shrinks: stale entries pass",
        GATE_ALONE,
    ),
    Planted(
        "strategies/gate/plan.py::coverage_of",
        "if not left[op] and op not in crashed and instances[op])",
        "if not left[op] and instances[op])",
        "an overload that crashed half way counts as tried: its accepted findings are called gone",
    ),
    Planted(
        "strategies/gate/plan.py::coverage_of",
        "(u.op, u.dtypes, mesh_kind(u.mesh), u.trial)",
        "(u.op, u.dtypes, mesh_kind((1,)), u.trial)",
        "accepted findings on two axes are never tried, and never gone",
    ),
    Planted(
        "strategies/gate/plan.py::run_plan",
        "untried = (*done.untried, *_unreached(plan, done))",
        "untried = done.untried",
        "an overload of which no call could be judged passes without a word",
        ("tests/strategies/gate/test_plan.py::test_an_overload_that_refuses_every_call_is_named_with_the_reason",),
    ),
    Planted(
        "strategies/gate/plan.py::_cache.digest",
        "return None if module and found == OUTSIDE else found",
        "return found",
        "a rule in a file that git does not know is edited, and the old verdict stays",
        ("tests/strategies/gate/test_plan.py::test_rules_that_are_nowhere_in_the_project_are_not_remembered",),
    ),
    Planted(
        "strategies/gate/options.py::GateOptions.until",
        "total = (hours * 60 + minutes) * 60 + seconds",
        "total = hours * 60 + minutes * 60 + seconds",
        "--budget 1h ends after a minute",
    ),
)

CHANGES = (
    Planted(
        "strategies/gate/changes/select.py::_Comparison.reason",
        "        if seen.slice.text != before.slice.text:",
        "        if len(seen.slice.parts) != len(before.slice.parts):",
        "an edited rule is not judged: only statements that come or go count",
        CHANGED,
    ),
    Planted(
        "strategies/gate/changes/project.py::Project.at",
        "if p in now.texts and blob_name(now.texts[p], blob) == blob}",
        "if p in now.texts}",
        "--changed compares today with today: nothing ever changed",
        CHANGED,
    ),
    Planted(
        "strategies/gate/changes/normal_form.py",
        '"type_comment", "type_ignores", "kind"})',
        '"type_comment", "type_ignores", "kind", "kw_defaults"})',
        "another default of a keyword argument is no change",
        ("tests/strategies/gate/changes/test_normal_form.py",),
    ),
    Planted(
        "strategies/gate/changes/name_resolution.py::NameResolver._starred",
        "for star in reversed(module.stars):",
        "for star in module.stars:",
        "of two star imports the wrong one is followed",
        ("tests/strategies/gate/changes/test_name_resolution.py",),
    ),
    Planted(
        "strategies/gate/changes/version_view.py::_digest_of",
        "if seen.reads or versions is None or not all(map(_follows, outside)):",
        "if versions is None or not all(map(_follows, outside)):",
        "the verdict on a rule that reads a file is remembered when the file has changed",
    ),
    Planted(
        "strategies/base/git.py::Repository.files",
        '("--cached", "--others", "--exclude-standard", ',
        '("--cached", "--exclude-standard", ',
        "a new file that is not added yet is not seen",
    ),
)

OUTPUTS = (
    Planted(
        "strategies/gate/formats/github.py::command_escaped",
        '.replace("%", "%25").replace("\\r", "%0D").replace("\\n", "%0A")',
        '.replace("\\r", "%0D").replace("\\n", "%0A").replace("%", "%25")',
        "GitHub shows %250A where a line ends",
    ),
    Planted(
        "strategies/gate/formats/junit.py::_wrong",
        "    for entry in result.gone:\n        wrong[entry.key.op].append(stale_remedy(entry))\n",
        "",
        "the gate fails for a stale entry, and the CI server shows no failure",
    ),
    Planted(
        "strategies/gate/formats/junit.py::_cases",
        '    cases |= {op: ("skipped", why, "") for op, why in result.untried}\n',
        "",
        "what there was no time for is shown as passed",
    ),
    Planted(
        "strategies/gate/formats/sarif.py::sarif",
        '"results": results[:MOST],',
        '"results": results,',
        "GitHub refuses a file of five thousand results",
    ),
    Planted(
        "strategies/gate/formats/sarif.py::_result",
        '"partialFingerprints": {"primaryLocationLineHash": f"{sign}:1"',
        '"partialFingerprints": {"primaryLocationLineHash": f"{sign}:{place.line}"',
        "every edit above a rule closes its alert and opens a new one",
    ),
    Planted(
        "strategies/gate/formats/github.py",
        'map(ord, "&<>|`*_[]\\\\~$#!@")',
        'map(ord, "&<>`*_[]\\\\~$#!@")',
        "a | in a reason breaks the table",
    ),
    Planted(
        "strategies/gate/formats/json_output.py::_finding",
        '"new": [asdict(key) for key in reviewed.new],',
        '"new": [asdict(key) for key in reviewed.keys],',
        "what was accepted is told to programs as new",
    ),
    Planted(
        "strategies/sweep/report/text_and_json.py::write_scripts",
        'finding.script.replace("{name}", name)',
        "finding.script",
        "a repro script calls itself {name}",
    ),
    Planted(
        "strategies/sweep/report/text_and_json.py::is_silent",
        "|^hangs: |",
        "|",
        "a hang is listed among what is silently wrong",
    ),
    Planted(
        "strategies/sweep/report/html_page.py::show_finding",
        '"alone" if not finding.title else "meshes" if len(mesh) > 1 else "pairs"',
        '"alone" if not finding.title else "pairs"',
        "the filter for meshes of several axes is never offered",
    ),
    Planted(
        "strategies/sweep/report/html_pictures.py::_mark_values",
        "wrong=spot < len(want.values) and not same_number(",
        "wrong=spot < len(want.values) and same_number(",
        "the right numbers are red",
    ),
    Planted(
        "strategies/sweep/coverage.py::_percent",
        'return f"{int(share * 1000) / 10:.1f} %"',
        'return f"{share * 100:.1f} %"',
        "100.0 % where one overload of two thousand is missing",
    ),
)

JOURNALS = (
    Planted(
        "strategies/sweep/aggregate.py::_worst",
        "if known is None or _rank(s.finding) < _rank(known):",
        "if known is None or _rank(s.finding) > _rank(known):",
        "of two verdicts on one rule the milder one is told",
    ),
    Planted(
        "strategies/sweep/aggregate.py::report",
        "    clean -= named\n",
        "",
        "a rule is counted as sound and as unsound",
    ),
    Planted(
        "strategies/sweep/aggregate.py::report",
        "sum(unit not in done for unit in planned_units(begin))",
        "0",
        "a sweep that was cut short looks finished",
    ),
    Planted(
        "strategies/base/journal.py::load_journal",
        "if line is None and number == len(rows) - 1 and found:",
        "if line is None and found:",
        "all that stands after a spoiled line is dropped without a word",
    ),
    Planted(
        "strategies/cli/commands/coverage.py::coverage_of_lines",
        'verdicts[op].add(Verdict.SOUND.value if line["verdict"] == "cleared" else line["verdict"])',
        'verdicts[op].add(line["verdict"])',
        "what a real run has cleared has no verdict in the table",
    ),
    Planted(
        "strategies/propagation/races/linearizability.py::_explained",
        "now == call.answer and _explained(rest, kept, used)",
        "now is not None and _explained(rest, kept, used)",
        "a stale answer after a clear is explained away",
    ),
    Planted(
        "strategies/base/worker_pool.py::_Worker.past",
        "            self.since, self.seen = now, self.noted.value\n",
        "            self.seen = self.noted.value\n",
        "a long task is killed though it goes on step by step",
    ),
)

PLANTED: tuple[Planted, ...] = (*GATE, *CHANGES, *OUTPUTS, *JOURNALS)
