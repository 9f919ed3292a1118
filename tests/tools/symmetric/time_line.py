"""A race on a time line, one lane for each rank, as an SVG: `python -m tests.tools.symmetric.time_line docs/race.svg`."""

import re
import sys
from html import escape
from pathlib import Path

import localtensor as lt
from tests.tools.symmetric.late_signal import late_signal

LEFT, TOP, STEP, LANE, WIDE, HIGH = 80, 64, 92, 96, 82, 40
"""In pixels: the margins, from one event to the next, from lane to lane, and the size of a box."""
STYLE = """text { font: 12px sans-serif; fill: #222 } .rank { font-weight: bold } .lane { stroke: #999 }
.call { fill: #e8eef7; stroke: #55759c } .access { fill: #fdeceb; stroke: #b3261e; stroke-width: 2 }
.edge { stroke: #55759c; fill: none } .race { stroke: #b3261e; stroke-width: 2; stroke-dasharray: 6 4; fill: none }
.note { fill: #b3261e } rect.page { fill: #fff }"""


def race_of(program, ranks: int) -> lt.errors.SymmetricRace:
    """The race with which a run of the program ends."""
    try:
        lt.run(program, ranks=ranks)
    except lt.errors.SymmetricRace as race:
        return race
    raise SystemExit("the program does not race")


def events_of(race: lt.errors.SymmetricRace):
    """What to draw, in the order in which it ran: the rank, what it does, its line, and whether it is one of the two accesses."""
    accesses = (race.first, race.second)
    for at, call in enumerate([*race.log, None]):
        for access in accesses:
            if access.after == at:
                verb = "writes" if access.writes else "reads"
                yield access.rank, f"{verb}: {access.op}", access.place.line, True, None
        if call is not None and call.kind.startswith("symm_mem.") and "rendezvous" not in call.kind:
            name = re.sub(r"\(channel=\d+\)", "", call.kind.removeprefix("symm_mem."))
            yield call.rank, name, call.place.line, False, call


def edges_of(events):
    """Pairs of events of which the first happens before the second: a signal and its wait, and the calls of a barrier."""
    for at, event in enumerate(events):
        call = event[-1]
        for other_at, another in enumerate(events):
            other = another[-1]
            if call is None or other is None or call.number != other.number:
                continue
            signals = "put_signal" in call.kind and "wait_signal" in other.kind
            if signals and (call.rank, call.peer) == (other.peer, other.rank):
                yield at, other_at
            if "barrier" in call.kind and call.kind == other.kind and call.rank + 1 == other.rank:
                yield at, other_at


def draw(race: lt.errors.SymmetricRace, ranks: int) -> str:
    """The SVG of a race."""
    events = list(events_of(race))
    width, height = LEFT + STEP * len(events) + 24, TOP + LANE * ranks + 24

    def middle(at: int) -> tuple[int, int]:
        return LEFT + STEP * at + WIDE // 2, TOP + LANE * events[at][0] + HIGH // 2

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    ]
    parts += [f"<style>{STYLE}</style>", f'<rect class="page" width="{width}" height="{height}"/>']
    for rank in range(ranks):
        y = TOP + LANE * rank + HIGH // 2
        parts.append(f'<line class="lane" x1="{LEFT - 12}" y1="{y}" x2="{width - 12}" y2="{y}"/>')
        parts.append(f'<text class="rank" x="12" y="{y + 4}">rank {rank}</text>')
    for first, second in edges_of(events):
        (x, y), (to_x, to_y) = middle(first), middle(second)
        parts.append(f'<line class="edge" x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}"/>')
    racing = [at for at, event in enumerate(events) if event[3]]
    (x, y), (to_x, to_y) = map(middle, racing)
    parts.append(f'<path class="race" d="M {x} {y} L {to_x} {to_y}"/>')
    for at, (rank, what, line, is_access, _) in enumerate(events):
        left, top = LEFT + STEP * at, TOP + LANE * rank
        kind = "access" if is_access else "call"
        parts.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{WIDE}" height="{HIGH}" rx="4"/>')
        parts.append(f'<text x="{left + 6}" y="{top + 17}">{escape(what)}</text>')
        parts.append(f'<text x="{left + 6}" y="{top + 32}">line {line}</text>')
    low, high = race.common
    note = f"no order between line {race.first.place.line} of rank {race.first.rank} and line {race.second.place.line} of rank {race.second.rank}: bytes {low} to {high - 1}"
    parts += [f'<text class="note" x="{LEFT}" y="28">{escape(note)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(race_of(late_signal, 2), 2))
