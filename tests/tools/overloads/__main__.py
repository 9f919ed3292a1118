"""`make overloads`: every aten overload that torch's OpInfos reach, put through lockstep and held against plain loops."""

import sys
import time
from collections import Counter

import torch

from localtensor.lockstep.dispatch.op_table import list_ops
from tests.tools.command_line import parser_of
from tests.tools.overloads.capture import captured
from tests.tools.overloads.judge import Record, sweep

MOST_TOLD = 3
EXAMPLES = """examples:
  python -m tests.tools.overloads            every overload: about 10 minutes
  python -m tests.tools.overloads cumsum     those with this in their name

Exit code 1 if a result is wrong on any rank.
"""


def report(records: dict[str, Record], seconds: float) -> str:
    """The table."""
    ways = dict(list_ops())
    by_way = Counter(way.value for way in ways.values())
    done = list(records.values())
    refused = [name for name, one in records.items() if one.calls == one.refused]
    near = [name for name, one in records.items() if one.near and not one.wrong]
    wrong = [name for name, one in records.items() if one.wrong]
    rows = [name for name, one in records.items() if one.ways["rows"] and not one.ways["stack"] + one.ways["vmap"]]
    lines = [
        f"overloads registered      {len(ways):6}   " + ", ".join(f"{way} {n}" for way, n in by_way.most_common()),
        f"exercised                 {len(records):6}   in {sum(one.calls for one in done)} calls",
        f"equal to the bit          {sum(one.equal == one.calls - one.refused for one in done):6}",
        f"within the envelope       {len(near):6}   in {sum(one.near for one in done)} calls; the others to the bit",
        f"wrong                     {len(wrong):6}",
        f"refused, always           {len(refused):6}   {' '.join(refused)}",
        f"rank by rank              {len(rows):6}   where ranks differ",
        f"in {seconds:.0f} s",
        "not always to the bit: " + " ".join(name.removeprefix("aten::") for name in near),
    ]
    for name in wrong:
        lines.append(f"{name}: {len(records[name].wrong)} of {records[name].calls} calls, {dict(records[name].ways)}")
        lines += [f"    {told[:600]}" for told in records[name].wrong[:MOST_TOLD]]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of("overloads", EXAMPLES, __doc__)
    parser.add_argument(
        "wanted", nargs="?", default="", metavar="NAME", help="part of the names of overloads; all if none is given"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.time()
    calls = {name: found for name, found in captured().items() if asked.wanted in name}
    records = {}
    for number, (name, found) in enumerate(calls.items()):
        records[name] = sweep(found, Record())
        if number % 100 == 0:
            print(f"{number} of {len(calls)} overloads, {time.time() - begun:.0f} s", file=sys.stderr, flush=True)
    print(report(records, time.time() - begun))
    return any(one.wrong for one in records.values())


if __name__ == "__main__":
    sys.exit(main())
