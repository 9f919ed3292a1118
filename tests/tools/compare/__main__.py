"""What `lt.compare` finds in labelled programs: is it detected, and are the module, the line and the cause right?"""

import sys

from tests.tools.command_line import parser_of
from tests.tools.compare.cases import cases
from tests.tools.compare.score import Answer, answers, table

EXAMPLES = """examples:
  python -m tests.tools.compare                        the whole corpus, one program after the other
  python -m tests.tools.compare scaled row_without_sum one class, one file, or programs by their names
  python -m tests.tools.compare -v right_tensor        with each whole explanation

Exit code 1 if a faulty program is not detected or a right one is accused."""


def main() -> int:
    parser = parser_of("compare", EXAMPLES, __doc__)
    parser.add_argument("only", nargs="*", help="classes, files or programs; all if none is given")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was said of each program")
    asked = parser.parse_args()
    wanted = set(asked.only)
    chosen = [case for case in cases() if not wanted or {case.kind, case.file.stem, case.name} & wanted]
    if not chosen:
        parser.error(f"no program, file or class named {', '.join(sorted(wanted))}")
    got = []
    for answer in answers(chosen):
        got.append(answer)
        show(answer, verbose=asked.verbose)
    print("\n".join(table(got)))
    print(f"{len(got)} programs, {len({one.case.kind for one in got} - {None})} classes of faults, "
          f"{sum(one.seconds for one in got):.0f} s")  # fmt: skip
    return 1 if any(one.error or one.alarm != bool(one.case.kind) for one in got) else 0


def show(answer: Answer, *, verbose: bool) -> None:
    case = answer.case
    if not answer.complaint and not verbose:
        print(f"ok      {case.name} ({answer.seconds:.1f} s)", flush=True)
        return
    print(f"{answer.complaint or 'ok'}: {case.file.stem}.{case.name} ({answer.seconds:.1f} s)")
    if case.kind:
        print(f"    label: {case.kind}; first wrong {case.module}; {case.word}; at {', '.join(case.places)}")
    print("    | " + answer.text[:3000].replace("\n", "\n    | "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
