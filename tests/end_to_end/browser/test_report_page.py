"""The page of a real little sweep in headless Chromium, offline: looked at, clicked through, and driven by keys."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.base.journal import load_journal
from strategies.cli.commands.report import run
from strategies.cli.options import ReportOptions
from strategies.model.cause import causes_line
from strategies.sweep import aggregate
from tests.strategies import journals
from tests.strategies.model.test_cause import SCAN

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
image = pytest.importorskip("PIL.Image", reason="pillow is not installed: it comes with matplotlib")

LITTLE = Path(__file__).parent / "little.jsonl"
SHOWN = ".finding:not([hidden])"
ROWS = ".map tbody:not([hidden]) tr.op:not([hidden])"
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert run(ReportOptions(LITTLE, out)) == 0
    return out


@pytest.fixture(scope="module")
def opened(browser):
    """Pages with what each asked for and said, by the options of their contexts: opening one takes longer than a test."""
    pages = {}
    yield pages
    for page, *_ in [one for same in pages.values() for one in same]:
        page.context.close()


@pytest.fixture
def look(browser, opened):
    """Opens a page offline; afterwards nothing but the page itself was asked for, and nothing complained."""
    used = []

    def look_at(file, fragment="", **more):
        same = opened.setdefault(repr(sorted(more.items())), [])
        free = next((one for one in same if one not in used), None)
        if free is None:
            context = browser.new_context(offline=True, **{"viewport": WIDE, **more})
            context.set_default_timeout(60_000)
            page, asked, said = free = context.new_page(), [], []
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            same.append(free)
        used.append(free)
        free[0].goto(f"{file.as_uri()}{fragment}")
        return free[0]

    yield look_at
    requests = [url for _, asked, _ in used for url in asked]
    words = [text for _, _, said in used for text in said]
    for page, asked, said in used:
        page.goto("about:blank")
        page.emulate_media(media="null")
        page.mouse.move(0, 0)
        asked.clear(), said.clear()
    assert words == []
    assert requests and all(url.startswith("file://") and url.partition("#")[0].endswith(".html") for url in requests)


def shown(page, what=SHOWN):
    return page.locator(what).count()


def picture(page):
    return image.open(io.BytesIO(page.screenshot())).convert("RGB")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
def test_it_is_there_to_be_seen(look, report, scheme, width):
    page = look(report, color_scheme=scheme, viewport={"width": width, "height": 900})
    shot = picture(page)
    assert shot.size == (width, 900)
    colours = shot.getcolors(1 << 20)
    assert len(colours) > 50
    commonest = max(colours)[1]
    assert (sum(commonest) > 600) is (scheme == "light")
    wrong = (191, 80, 0) if scheme == "light" else (213, 94, 0)
    assert wrong in {colour for _, colour in colours}, "no sign in the colour of what is wrong"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page itself scrolls sideways"


def test_the_theme_can_be_changed_by_hand(look, report):
    page = look(report, color_scheme="light")
    light = sum(max(picture(page).getcolors(1 << 20))[1])
    page.click("#theme")
    dark = sum(max(picture(page).getcolors(1 << 20))[1])
    assert light > 600 and dark < 200


def test_the_text_filters_findings_and_overloads(look, report):
    page = look(report)
    every, rows = shown(page), shown(page, ".map tr.op")
    page.fill("#text", "cumprod")
    some = shown(page)
    assert 0 < some < every
    assert all("cumprod" in text for text in page.locator(SHOWN).all_inner_texts())
    assert 0 < shown(page, ROWS) < rows
    assert page.inner_text("#found-count") == f"{some} of {every} findings"
    page.fill("#text", "no such thing")
    assert shown(page) == 0 and page.is_visible("#no-findings")
    page.click("#clear")
    assert shown(page) == every and not page.is_visible("#no-findings")


def test_a_tile_shows_one_verdict_alone_and_then_adds_others(look, report):
    page = look(report)
    every = shown(page)
    counts = {verdict: page.locator(f".finding[data-v={verdict}]").count() for verdict in ("unsound", "suspect")}
    assert min(counts.values()) > 0 and sum(counts.values()) == every
    page.click(".tile.suspect")
    assert shown(page) == counts["suspect"]
    assert page.get_attribute(".tile.unsound", "aria-pressed") == "false"
    page.click(".tile.unsound")
    assert shown(page) == every
    page.click(".tile.suspect")
    page.click(".tile.unsound")
    assert shown(page) == every and page.get_attribute(".tile.sound", "aria-pressed") == "true"


@pytest.mark.parametrize("name", ["how", "dtype", "mesh", "trial", "takes"])
def test_every_choice_of_every_filter_shows_just_those(look, report, name):
    page = look(report)
    every = shown(page)
    choices = page.locator(f"select[data-filter={name}] option").all_inner_texts()[1:]
    assert choices
    for choice in choices:
        page.select_option(f"select[data-filter={name}]", choice)
        held = page.locator(SHOWN).evaluate_all("(all, name) => all.map((one) => one.dataset[name])", name)
        assert held and all(choice in (one.split("|") if name == "mesh" else one.split(" ")) for one in held)
        assert len(held) < every or len(choices) == 1
    page.select_option(f"select[data-filter={name}]", "")
    assert shown(page) == every


def test_a_family_unfolds_and_all_do(look, report):
    page = look(report)
    folded = shown(page, ROWS)
    page.locator(".map .head button").first.click()
    assert shown(page, ROWS) > folded
    assert page.get_attribute(".map .head button", "aria-expanded") == "true"
    page.click("#fold")
    assert shown(page, ROWS) == shown(page, ".map tr.op")
    page.click("#fold")
    assert shown(page, ROWS) == folded


def test_families_are_sorted_as_asked(look, report):
    page = look(report)
    names = page.locator(".map tbody")
    page.select_option("#sort", "name")
    told = names.evaluate_all("(all) => all.map((one) => one.dataset.name)")
    assert told == sorted(told)
    page.select_option("#sort", "bad")
    bad = names.evaluate_all("(all) => all.map((one) => +one.dataset.bad)")
    assert bad == sorted(bad, reverse=True) and bad[0] > 0


def test_a_cell_leads_to_its_findings(look, report):
    page = look(report)
    page.click("#fold")
    cell = page.locator(".map td.unsound a[data-takes='S(0)']").first
    op = cell.get_attribute("data-op")
    cell.click()
    held = page.locator(SHOWN).evaluate_all("(all) => all.map((one) => [one.dataset.op, one.dataset.takes])")
    assert held and all(one == op and "S(0)" in takes.split() for one, takes in held)
    assert page.locator(f"{SHOWN}[open]").count() == 1


def test_a_finding_opens_with_its_picture_and_its_script(look, report):
    page = look(report)
    page.locator(SHOWN, has_text="aten.cumprod.default: S(0)").first.click()
    body = page.locator(".finding[open]")
    assert body.locator(".box").count() >= 6 and body.locator("mark").count() >= 2
    assert body.locator("pre").first.is_hidden()
    body.locator(".script summary").click()
    assert "distribute_tensor" in body.locator("pre").inner_text()


def test_the_script_and_the_deep_link_are_copied_and_the_link_leads_back(look, report):
    page = look(report, permissions=["clipboard-read", "clipboard-write"])
    finding = page.locator(SHOWN).nth(1)
    finding.locator("> summary").click()
    finding.locator(".anchor").click()
    playwright.expect(page.locator("#said")).to_have_text("Link copied")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == f"{report.as_uri()}#{finding.get_attribute('id')}" == page.url
    finding.locator(".script summary").click()
    finding.locator(".copy").click()
    playwright.expect(page.locator("#said")).to_have_text("Script copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith('"""aten.')
    again = look(report, f"#{finding.get_attribute('id')}")
    assert again.locator(".finding[open]").evaluate_all("(all) => all.map((one) => one.id)") == [
        finding.get_attribute("id")
    ]
    assert again.locator(".finding[open]").bounding_box()["y"] < 300


def test_the_keyboard_is_enough(look, report):
    page = look(report)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.closest('.finding') === document.querySelectorAll('.finding')[0]")
    page.keyboard.press("Enter")
    assert page.locator(".finding").first.get_attribute("open") is not None
    page.keyboard.press("/")
    page.keyboard.type("cumprod/j")
    assert page.input_value("#text") == "cumprod/j" and shown(page) == 0
    page.keyboard.press("Escape")
    assert page.input_value("#text") == "" and shown(page) == page.locator(".finding").count()
    page.keyboard.press("Home")
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the findings"


def test_every_control_has_a_name_for_a_screen_reader(look, report):
    page = look(report)
    tree = page.locator("body").aria_snapshot()
    for line in ('heading "Findings"', 'button "Unfold all"', 'searchbox "Overload or text', 'columnheader "S(0)"'):
        assert line in tree
    assert 'button ""' not in tree and "combobox:" not in tree


def test_without_scripts_everything_can_still_be_read(look, report):
    page = look(report, java_script_enabled=False)
    assert page.locator(".finding").first.is_visible() and page.locator(".map tbody").first.is_visible()
    assert not page.is_visible("#filters") and not page.is_visible("#theme")
    page.locator(".finding summary").first.click()
    assert page.locator(".finding .picture").first.is_visible()


def test_print_shows_what_is_wrong_and_no_controls(look, report):
    page = look(report)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert (
        not page.is_visible("#filters") and page.locator(".finding[open]").count() == page.locator(".finding").count()
    )
    assert not page.locator(".map tbody[data-bad='0']").first.is_visible()
    assert page.pdf()[:5] == b"%PDF-"


def test_hostile_text_runs_nothing(look, tmp_path):
    path = journals.write(tmp_path / "bad.jsonl", journals.begin(), [*journals.lines(), *journals.hostile()])
    assert run(ReportOptions(path, tmp_path / "bad.html")) == 0
    page = look(tmp_path / "bad.html")
    assert page.locator("script").count() == 1
    page.locator(SHOWN, has_text="my.bad.default").first.click()
    assert "<script>alert(1)</script>" in page.locator(".finding[open]").first.inner_text()


# Causes.


@pytest.fixture(scope="module")
def caused(tmp_path_factory):
    """The page of the little sweep with causes for all its findings but the last two."""
    folder = tmp_path_factory.mktemp("caused")
    read = load_journal(LITTLE)
    names = [f.name for f in aggregate.report(read.begin, read.lines).findings]
    cut = len(names) // 2
    first = replace(SCAN, findings=tuple(names[:cut]))
    second = replace(SCAN, id="other", key=("other",), words="an error on all ranks", families=(), rank=(1, 0, 0, 1),
                     severity="raises, everyday", findings=tuple(names[cut:-2]))  # fmt: skip
    path = folder / "caused.jsonl"
    path.write_text(LITTLE.read_text() + json.dumps(causes_line([first, second], "2.13.0", None)) + "\n")
    assert run(ReportOptions(path, folder / "caused.html")) == 0
    return folder / "caused.html"


def test_causes_stand_above_the_map_and_open_onto_their_findings(look, caused):
    page = look(caused)
    causes = page.locator(".cause")
    assert causes.count() == 2 and page.inner_text("#cause-count") == "2 causes"
    top = causes.first.bounding_box()["y"]
    assert top < page.locator(".map").bounding_box()["y"] < page.locator("#findings").bounding_box()["y"]
    assert not causes.first.locator(".finding").first.is_visible()
    causes.first.locator("> summary").click()
    fold = causes.first.locator(".fold").first
    assert fold.is_visible() and not fold.locator(".finding").first.is_visible()
    fold.locator("> summary").click()
    assert fold.locator(".finding").first.is_visible()
    assert causes.first.locator("pre.lines").inner_text() == "x = 1"
    assert "With replicas" in causes.first.locator(".tried").inner_text()
    assert page.locator("section:has(#findings) .finding").count() == 2


def test_a_cause_without_a_finding_that_passes_the_filters_is_hidden(look, caused):
    page = look(caused)
    every = shown(page)
    name = page.locator(".cause").first.locator(".finding b").first.text_content()
    page.fill("#text", name)
    left = shown(page, ".cause:not([hidden])")
    assert 0 < shown(page) < every and left == 1
    assert page.inner_text("#cause-count") == "1 of 2 causes"
    assert " of " in page.locator(".cause:not([hidden]) .many").inner_text()
    page.fill("#text", "an error on all ranks")  # the words of a cause are those of its findings, too
    assert shown(page, ".cause:not([hidden])") == 1
    assert shown(page) == page.locator(".cause").nth(1).locator(".finding").count()
    page.keyboard.press("Escape")
    assert shown(page) == every and page.inner_text("#cause-count") == "2 causes"


def test_a_fold_without_a_finding_that_passes_the_filters_is_hidden(look, caused):
    page = look(caused)
    assert shown(page, ".fold:not([hidden])") == page.locator(".fold").count() > 0
    page.fill("#text", "no finding has these words")
    assert shown(page, ".fold:not([hidden])") == 0
    page.keyboard.press("Escape")


def test_a_link_to_a_finding_opens_its_cause(look, caused):
    page = look(caused)
    anchor = page.locator(".cause .finding").first.get_attribute("id")
    again = look(caused, f"#{anchor}")
    assert again.locator(".cause[open]").count() == 1
    assert again.locator(f"[id='{anchor}'][open]").is_visible()
    assert again.locator(".finding[open]").bounding_box()["y"] < 400
    page.keyboard.press("j")
    assert page.locator(".cause[open]").count() == 1 and page.locator(".finding.at").is_visible()


@pytest.mark.parametrize("width", [420, 1280])
def test_an_open_cause_does_not_scroll_the_page_sideways(look, caused, width):
    page = look(caused, viewport={"width": width, "height": 900})
    page.locator(".cause > summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
