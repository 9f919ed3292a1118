"""Programs of other libraries on rank threads beside torchrun: `python -m tests.tools.ecosystem [NAME ...]`.

It makes one environment with the libraries once (`--folder`, 5 GB), runs each program by torchrun and by `localtensor run` on 2
and 4 ranks, compares what every rank saves (losses, metrics, parameters) to the last bit, and prints a line for each.
Programs in `named/` are those that the project promises; those in `others/` are of libraries that it does not name.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.tools.ecosystem.comparison import LIMIT, Done, Program, differences, run
from tests.tools.ecosystem.environment import python_of

NAMED = (
    Program("accelerate.test_utils.scripts.test_script"),
    Program("accelerate.test_utils.scripts.test_sync"),
    Program("accelerate.test_utils.scripts.test_ops"),
    Program("named/accelerate_loop.py"),
    Program("named/trainer.py"),
    Program("named/trainer_tp.py"),
    Program("named/megatron_layers.py"),
    *(Program("named/zero.py", (str(stage),)) for stage in range(4)),
    Program("named/lightning_ddp.py"),
    Program("named/metrics.py"),
    *(Program("named/torchao_fsdp.py", (name,)) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    Program("../titan/train.py", ("--shard", "0", "--backend", "partial_dtensor")),
)
OTHERS = tuple(Program(f"others/{file.name}") for file in sorted((Path(__file__).parent / "others").glob("*.py")))


def line_of(program: Program, ranks: int, real: Done, threads: Done) -> tuple[bool, str]:
    """Whether both runs are the same, and the line of the table."""
    codes = f"{_code(real)} {_code(threads)}"
    found = differences(threads.saved, real.saved)
    same = real.code == threads.code == 0 and not found.differ
    if real.code != 0:
        verdict = "torchrun fails"
    elif threads.code != 0:
        verdict = "fails"
    elif found.differ:
        verdict = f"{found.differ} differ, by {found.largest:.2g} at most: {', '.join(found.where[:3])}"
    else:
        verdict = "equal" if found.values else "same exit code"
    text = (
        f"| `{program}` | {ranks} | {codes} | {found.values} | {verdict} | {real.seconds:.0f} | {threads.seconds:.0f} |"
    )
    return same, text


def _code(done: Done) -> str:
    return "stopped" if done.code is None else str(done.code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of programs; by default all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "localtensor-ecosystem")
    parser.add_argument("--python", type=Path, help="a Python that has the libraries; else an environment is made")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--output", action="store_true", help="print the end of the output of a program that fails")
    given = parser.parse_args()
    chosen = [one for one in (*NAMED, *OTHERS) if not given.names or any(name in str(one) for name in given.names)]
    if not chosen:
        parser.error(f"{given.names[0]!r} is in no name; names: {', '.join(map(str, (*NAMED, *OTHERS)))}")
    python = given.python or python_of(given.folder)
    print("| program | ranks | exit codes | values | beside torchrun | torchrun, s | threads, s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    equal = total = 0
    for program in chosen:
        for ranks in given.ranks:
            real = run(python, program, ranks, threads=False)
            threads = run(python, program, ranks, threads=True)
            same, text = line_of(program, ranks, real, threads)
            equal, total = equal + same, total + (real.code == 0)
            print(text, flush=True)
            for name, done in (("torchrun", real), ("localtensor run", threads)):
                if done.code != 0 and given.output:
                    print(f"--- {name}\n" + "\n".join(done.output.splitlines()[-40:]), file=sys.stderr, flush=True)
    print(f"\n{equal} of {total} runs that torchrun ends are equal on rank threads (limit of a run: {LIMIT} s)")
    sys.exit(equal != total)


if __name__ == "__main__":
    main()
