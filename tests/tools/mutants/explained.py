"""Drawn mutants that no test can kill, because nothing that anybody sees changes; each with the reason."""

from __future__ import annotations

from tests.tools.mutants.values import Mutant

EXPLAINED: dict[str, dict[str, str]] = {
    "localtensor/layout/shard_order.py": {
        "if mine is theirs or type(mine) is not type(theirs):": "types are equal if they are one",
        "for order in (encoded, tuple(axis for axis, _ in cut)):": (
            "a shortcut: the loop over all orders comes to the same"
        ),
    },
    "localtensor/lockstep/values/partition.py": {
        "if cell.layout is not torch.strided or cell.is_contiguous():": (
            "a shortcut for contiguous stacks; sparse ones have no rows that could be picked"
        )
    },
    "localtensor/concurrency/sync.py": {
        "SETUP_THREAD = -1  # the number of the caller that makes the program and checks it": "any number below 0"
    },
    "localtensor/collectives/reference.py": {
        "checks.check_even(call, shard_dim, held[0].shape, len(held))": "all ranks bring one shape"
    },
    "localtensor/lockstep/values/stacks.py": {
        "return (tuple(cell.shape[1:]), cell.stride()[1:]) if rows > 1 else (tuple(cell.shape), cell.stride())": (
            "a cell has one row or more"
        )
    },
    "localtensor/concurrency/schedule.py": {
        "self._start(0)": "nothing is written down before `begin`, which starts anew",
        "@property": "in the Protocol, whose bodies never run",
    },
    "localtensor/threads/buffer_watch.py": {
        "return False": "torch would import its compiler, a second of time; nothing else changes"
    },
    "localtensor/errors/failure_report.py": {"break": "it saves the rest of the log; only the last lines are shown"},
    "strategies/programs/run/verdict.py": {
        "if placements is None or len(placements) != len(mesh):": (
            "lengths: Python has one object for each small number"
        )
    },
    "strategies/torch_api/handler_table.py": {
        "if known is not None and known[0] is table and (type(table) is HandlerTableView or known[1] == table):": (
            "where it does not hold the same view is made anew"
        )
    },
    "strategies/propagation/explicit/redistribution_text.py": {
        "written: bool = False": "only a gradient comes without it, and of what backward asks no call is named"
    },
    "strategies/inputs/gathering.py": {
        "if row.split('\"', 4)[3] in wanted:  # the op stands first: the others need not be parsed": (
            "any number from 4 on: the fourth piece is the same"
        )
    },
    "localtensor/torch_suites/rank_run.py": {
        "TIMEOUT = 300.0  # seconds for one test, as torch gives its processes": "any number that is not below torch's"
    },
    "localtensor/torch_suites/multi_threaded.py": {
        "if len(threads) == 1 and isinstance(threads[0], _UnjoinedRanks):": "the only one is the last one, too"
    },
    "localtensor/testing/hypothesis_strategies/search.py": {
        "orders: bool = False": "`specs` always says it, and nobody else makes one"
    },
    "localtensor/testing/hypothesis_strategies/values.py": {"seed: int = 0": "any seed"},
    "strategies/base/journal.py": {"if self._file is None or self.path is None:": "a journal has both or neither"},
    "strategies/inputs/variants/all_variants.py": {
        "break": "the budget stays spent: all that follows are passed over as well"
    },
    "strategies/model/call_signature.py": {"if dtype == torch.bool:": "torch has one object for each dtype"},
    "strategies/torch_api/user_modules.py": {
        'elsewhere = f"; it has one for {others[0].upper()}" if others else ""': (
            "of two devices there is at most one other"
        )
    },
    "strategies/planner/search/api.py": {
        "break": (
            "first steps come cheapest first, so none of those left can begin a cheaper plan: it saves their searches"
        )
    },
    "strategies/planner/search/plan_cache.py": {
        "MOST_PLANS, MOST_TABLES = 4096, 64": "any numbers: what is forgotten is made again"
    },
    "strategies/sweep/report/text_and_json.py": {
        "LONGEST = 150": "any length that leaves room for what follows it in the name of a file"
    },
    "strategies/sweep/report/html_pictures.py": {
        "return tuple(sorted(made, key=lambda family: (-family.head.bad, family.head.name)))": (
            "-n and ~n put counts in the same order"
        )
    },
    "localtensor/errors/collectives.py": {"if len(set(sizes)) == 1:": "there is a shape or more, and so a size"},
    "localtensor/collectives/rendezvous.py": {
        "return -1 if part.peer is None else part.peer": (
            "who names no peer comes by `recv_from_any`, which does not ask for it"
        )
    },
    "localtensor/lockstep/comms/stacked_collectives.py": {
        "return slice(int(ids[0]), int(ids[0]) + 1, 1)": "a slice of one row is the same in steps of any length",
        "_MOST_KEPT = 4096": "any number: what is forgotten is worked out again",
    },
    "localtensor/concurrency/explorer.py": {
        'detail = ", ".join(what if times == 1 else f"{what} {times} times" for what, times in words)': (
            "groupby has no group of fewer than one"
        )
    },
    "localtensor/threads/process_group.py": {
        "if len(devices) > 1:": "tensors that are on the device already stay as they are"
    },
    "localtensor/threads/simulation.py": {
        "MAX_POLLS = 10_000  # fruitless polls in a row, with only polling ranks runnable, that count as a deadlock": (
            "any large number: it only says when a loop without end is given up"
        )
    },
    "localtensor/pytest_plugin/item.py": {"draws: bool = field(default=False, init=False)": "nobody passes it"},
    "localtensor/threads/rank_world.py": {
        "self.implicit = False  # the default group was made by us, and the program has not requested it": (
            "`join` sets it before anybody asks"
        ),
        "self.epoch = 0  # the number of default groups so far: with each, torch numbers the groups from 0 again": (
            "any number: names of two epochs need only differ"
        ),
    },
}
"""path -> the changed line as it is now, stripped -> why a change of it may be unseen."""


def explained(mutant: Mutant) -> str | None:
    """Why this one may survive, or None."""
    lines = [line[1:].strip() for line in mutant.change.splitlines() if line.startswith("-")]
    reasons = EXPLAINED.get(mutant.path, {})
    return next((reasons[line] for line in lines if line in reasons), None)
