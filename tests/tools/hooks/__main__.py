"""`python -m tests.tools.hooks`: the corpus of hooks, scored by `assert_typecheck_hook` and by spmd_types' own `rulecheck`."""

import argparse
import contextlib
import sys
import time
import warnings
from collections import Counter

from spmd_types.rulecheck import RuleCheckError, rulecheck

from localtensor.lockstep import in_place_of_torch
from localtensor.testing import assert_typecheck_hook
from strategies.validation.assertions.rule import NothingTested
from strategies.validation.assertions.typecheck_hook import WrongHook
from strategies.validation.sources.spmd_types.typed import quiet_checker
from tests.tools.hooks import corpus, late, unseen_right, unseen_wrong

RIGHT, WRONG, NOTHING = "right", "wrong", "nothing tested"


def ours(hook: corpus.Hook) -> tuple[str, str]:
    """The verdict of `assert_typecheck_hook`, and its first line."""
    try:
        assert_typecheck_hook(hook.function, hook.args)
    except WrongHook as error:
        return WRONG, str(error).splitlines()[0]
    except NothingTested as error:
        return NOTHING, str(error)
    return RIGHT, ""


def theirs(hook: corpus.Hook) -> tuple[str, str]:
    """The verdict of `rulecheck`; a call that it cannot run is none.

    In torch 2.13 it fails for every hook on the CPU: torch has its random numbers without state there for CUDA alone.  It
    takes others where torch has none, so the module is hidden from it.
    """
    sys.modules["torch.func._random"] = None  # type: ignore[assignment]
    mesh = {"tp": 2}
    try:
        with quiet_checker():
            rulecheck(hook.function, hook.args, mesh=mesh, local_tensor_mode="tp" in map(str, hook.args[-1:]))
    except RuleCheckError as error:
        text = str(error).splitlines()[0]
        return (NOTHING if "nothing was checked" in text else WRONG), text
    except Exception as error:  # why: what it raises otherwise is no verdict on the hook
        return NOTHING, f"{type(error).__name__}: {error}"
    return RIGHT, ""


def theirs_in_lockstep(hook: corpus.Hook) -> tuple[str, str]:
    """The verdict of `rulecheck`, to be called with our mode in place of torch's."""
    return theirs(hook)


def score(judge, hooks, shown: bool) -> None:
    start = time.process_time()
    found: Counter[str] = Counter()
    for hook in hooks:
        verdict, why = judge(hook)
        found[hook.mistake or "right", verdict] += 1
        wanted = WRONG if hook.mistake else RIGHT
        if shown and verdict != wanted:
            print(f"  {judge.__name__}: {hook.name} ({hook.mistake or 'right'}): {verdict} {why[:200]}")
    seconds = time.process_time() - start
    for kind in dict.fromkeys(hook.mistake or "right" for hook in hooks):
        row = {verdict: found[kind, verdict] for verdict in (RIGHT, WRONG, NOTHING)}
        print(f"{judge.__name__:20}{kind:14}" + "  ".join(f"{verdict} {n}" for verdict, n in row.items()))
    planted = [hook for hook in hooks if hook.mistake]
    caught = sum(n for (kind, verdict), n in found.items() if kind != "right" and verdict == WRONG)
    alarms = found["right", WRONG]
    print(
        f"{judge.__name__}: found {caught} of {len(planted)}, false alarms {alarms} of {len(hooks) - len(planted)}, {seconds:.1f} s"
    )


def unseen() -> list[corpus.Hook]:
    return [*unseen_right.every(), *unseen_wrong.every()]


JUDGES = (ours, theirs, theirs_in_lockstep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[judge.__name__ for judge in JUDGES])
    parser.add_argument("--names", nargs="*")
    last = parser.add_mutually_exclusive_group()
    last.add_argument("--late", action="store_true", help="the hooks that were written last, in other styles")
    last.add_argument("--unseen", action="store_true", help="those of an author who had read the documentation alone")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = late.every() if given.late else unseen() if given.unseen else corpus.every()
    hooks = [hook for hook in chosen if not given.names or hook.name in given.names]
    for judge in JUDGES:
        if given.only in (None, judge.__name__):
            with in_place_of_torch() if judge is theirs_in_lockstep else contextlib.nullcontext():
                score(judge, hooks, shown=True)


if __name__ == "__main__":
    main()
