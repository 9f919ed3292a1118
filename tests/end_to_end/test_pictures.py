"""The pictures of the pages show what the commands print today, and are made by the tool that says so."""

import html
import re

import pytest

from tests.end_to_end.test_readme import README, shown
from tests.tools import pictures
from tests.tools.pictures import COMMANDS, JOURNAL, REPORT, TERMINAL, photograph, terminal
from tests.tools.run_pictures import PROGRAMS

pytest.importorskip("rich")
PAGES = "\n".join(page.read_text() for page in pictures.DOCS.rglob("*.md"))


def words(svg: str) -> str:
    """The text of a picture, without spaces: where a line is wrapped depends on the terminal."""
    return "".join(
        "".join(html.unescape(text).split()) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_the_terminal_shows_what_the_readme_shows(command):
    drawn = words(TERMINAL.read_text())
    assert "".join(f"$ {command}".split()) in drawn
    lines = [line for line in shown(README.read_text())[command].splitlines() if line.strip(" .")]
    assert len(lines) > 3
    assert [line for line in lines if "".join(line.split()) not in drawn] == []


def test_colours_are_drawn_and_nothing_comes_from_elsewhere():
    svg = terminal([("true <it>", "\x1b[31mred\x1b[0m & plain")])
    assert "true&#160;&lt;it&gt;" in svg and "red" in svg
    fills = set(re.findall(r"fill: (#[0-9a-f]{6})", svg))
    assert len(fills) >= 2
    for drawn in (svg, TERMINAL.read_text()):
        assert set(re.findall(r"https?://[^\"\s)]+", drawn)) == {"http://www.w3.org/2000/svg"}
        assert "font-face" not in drawn


RUNS = [pictures.DOCS / f"{name}.png" for name in PROGRAMS]


@pytest.mark.parametrize("picture", [TERMINAL, REPORT, *RUNS], ids=lambda file: file.name)
def test_a_page_has_the_picture(picture):
    assert picture.is_file() and re.search(rf"!\[[^\]]{{20,}}\]\((\.\./)?{re.escape(picture.name)}\)", PAGES)


@pytest.mark.slow
def test_the_report_is_photographed(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed: it comes with the extra `browser`")
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it comes with the extra `browser`")
    from tests.end_to_end.browser.conftest import CHROMIUM

    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    photograph(JOURNAL, tmp_path / "report.png")
    photo = image.open(tmp_path / "report.png").convert("RGB")
    wrong = (191, 80, 0)
    assert photo.size[0] == pictures.WIDTH and 600 < photo.size[1] < 2400
    assert wrong in {colour for _, colour in photo.getcolors(1 << 20)}, "no sign in the colour of what is wrong"
