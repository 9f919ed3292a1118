"""The pictures of the pages: a terminal with two commands of the README (docs/terminal.svg), a report (docs/report.png), and runs.

`make pictures` makes all.  The report is that of a journal, photographed by Chromium, if this machine has it and
playwright is installed; the terminal is drawn by rich.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich import _export_format
from rich.console import Console
from rich.text import Text

from tests.end_to_end.test_readme import README, run, write_examples
from tests.tools.command_line import parser_of

EXAMPLES = """examples:
  python -m tests.tools.pictures                               all, the report of a small journal
  python -m tests.tools.pictures sweep.jsonl --only report     the report of a sweep
"""
DOCS = README.parent / "docs"
TERMINAL, REPORT = DOCS / "terminal.svg", DOCS / "report.png"
JOURNAL = README.parent / "tests/end_to_end/browser/little.jsonl"
COMMANDS = ("pytest test_mean.py", "localtensor run -n 4 hangs.py")
COLUMNS, WIDTH, HEIGHT = 110, 1180, 900
"""Of the terminal in characters; of the window with the report in pixels."""
SHORT = """() => {
  const one = document.querySelector('.finding.unsound') || document.querySelector('.finding');
  one.open = true;
  [...document.querySelectorAll('.finding, .cause, details.list')].filter(e => e !== one).forEach(e => e.remove());
  [...document.querySelectorAll('.map tbody')].slice(8).forEach(e => e.remove());
}"""
"""Of a long page what a picture has place for: eight rows of the map, and the first finding."""


def printed(command: str, folder: Path) -> str:
    """What a command of the README prints in colours, without what differs from run to run."""
    words = f"{command} --color=yes -p no:randomly" if command.startswith("pytest") else command
    done = run(words, folder)
    text = "\n".join(line.rstrip() for line in f"{done.stdout}{done.stderr}".strip().splitlines())
    text = re.sub(r"^(rootdir|plugins|platform|configfile|cachedir).*\n", "", text, flags=re.MULTILINE)
    return re.sub(r" in [\d.]+s\b", "", text)


def terminal(screens: list[tuple[str, str]]) -> str:
    """An SVG of commands and what each printed, with ANSI colours."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for command, text in screens:
        console.print(Text(f"$ {command}", "bold"))
        console.print(Text.from_ansi(text))
    # The theme's font comes from another host: the reader's own fixed font does.
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", _export_format.CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = re.sub(r"\s*<!--.*?-->", "", plain, flags=re.DOTALL)
    svg = console.export_svg(title="localtensor", code_format=plain, unique_id="terminal")
    return re.sub(r" +$", "", svg, flags=re.MULTILINE)


def photograph(journal: Path, out: Path) -> None:
    """The upper part of the journal's page, and its first finding unfolded, as a PNG."""
    from playwright.sync_api import sync_playwright

    from strategies.cli.commands.report import run as write_report
    from strategies.cli.options import ReportOptions
    from tests.end_to_end.browser.conftest import CHROMIUM, FLAGS

    if CHROMIUM is None:
        raise SystemExit("there is no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page_file = Path(folder) / "report.html"
        if write_report(ReportOptions(journal, page_file)):
            raise SystemExit(f"{journal} gives no report")
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.evaluate(SHORT)
        page.screenshot(path=out, full_page=True)
        chromium.close()


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("pictures", EXAMPLES, __doc__)
    parser.add_argument("journal", nargs="?", type=Path, default=JOURNAL, help="of a sweep; a small one if left out")
    parser.add_argument("--only", choices=["terminal", "report", "runs"], help="one of the three")
    given = parser.parse_args(arguments)
    if given.only in (None, "terminal"):
        with tempfile.TemporaryDirectory() as folder:
            write_examples(README.read_text(), Path(folder))
            TERMINAL.write_text(terminal([(command, printed(command, Path(folder))) for command in COMMANDS]))
    if given.only in (None, "report"):
        photograph(given.journal, REPORT)
    if given.only in (None, "runs"):
        from tests.tools.run_pictures import photograph_runs  # lazy: it needs torch

        photograph_runs(DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
