"""`make rankbugs`: how many planted faults `lt.run` finds, names, and explains at the right line."""

import sys

from tests.tools.command_line import parser_of
from tests.tools.rankbugs.corpus import cases
from tests.tools.rankbugs.score import Score, score

EXAMPLES = """examples:
  python -m tests.tools.rankbugs                     the whole corpus, under a minute
  python -m tests.tools.rankbugs Deadlock works      one class, one file, or one program by its name
  python -m tests.tools.rankbugs -v Deadlock         with each whole explanation

Exit code 1 if recall is below 0.95, helpfulness below 0.9, a right program is accused, a hang takes more than a
second to explain, or all takes more than a minute."""


def main() -> int:
    parser = parser_of("rankbugs", EXAMPLES, __doc__)
    parser.add_argument("only", nargs="*", help="labels, files or programs; all if none is given")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was said of each program")
    asked = parser.parse_args()
    every = cases()
    chosen = [case for case in every if not asked.only or {case.label, case.file.stem, case.name} & set(asked.only)]
    if not any(case.label for case in chosen):
        parser.error(f"no faulty program among the {len(chosen)} chosen: there is nothing to find")
    show(got := score(chosen), asked.verbose)
    return 0 if got.passed else 1


def show(got: Score, verbose: bool) -> None:
    for answer in got.answers:
        if answer.complaint or verbose:
            case = answer.case
            print(f"{case.file.stem}.{case.name} ({case.ranks} ranks): {answer.complaint or answer.said or 'right'}")
            if answer.message:
                print("    " + answer.message.replace("\n", "\n    "))
    slowest = got.slowest
    print(
        f"{len(got.answers)} programs, {len(got.faulty)} with a fault\n"
        f"recall       {got.recall:.3f}\n"
        f"precision    {got.precision:.3f}   ({len(got.false_alarms)} false alarms)\n"
        f"helpfulness  {got.helpfulness:.3f}   (class and line)\n"
        f"seconds      {got.seconds:.1f}   (slowest: {slowest.case.name}, {slowest.seconds:.2f})"
    )


if __name__ == "__main__":
    sys.exit(main())
