"""The site: it builds without a warning, its menu has every page, and each page opens in headless Chromium without an error."""

import contextlib
import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.browser.conftest import browser  # noqa: F401  a fixture
from tests.end_to_end.test_docs import DOCS, ROOT

CONFIG = ROOT / "mkdocs.yml"


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build` as `make docs` calls it, from the root of the repository."""
    pytest.importorskip("mkdocs", reason="mkdocs comes with the extra `docs`: make docs")
    pytest.importorskip(
        "mkdocstrings_handlers.python", reason="mkdocstrings-python comes with the extra `docs`: make docs"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "built"
    done = build(CONFIG, out)
    assert done.returncode == 0, done.stderr
    return out


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder over HTTP, by a thread of this process; the value is its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def address(site):
    with served(site) as where:
        yield where


def faults(folder: Path, address: str, browser) -> tuple[int, list[str]]:  # noqa: F811
    """The number of links between the pages of a folder, and what is wrong: errors, files that are not there, loose links."""
    found, anchors, linked = [], {}, set()
    page = browser.new_page()
    page.set_default_navigation_timeout(120_000)
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("response", lambda response: found.append(response.url) if response.status >= 400 else None)
    for name in sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*.html") if file.name != "404.html"
    ):
        page.goto(f"{address}/{name}", wait_until="load")
        if page.locator("h1").count() != 1:
            found.append(f"{name}: no heading, or several")
        anchors[f"{address}/{name}"] = set(page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)"))
        linked |= {
            (name, url) for url in page.evaluate("[...document.links].map(a => a.href)") if url.startswith(address)
        }
    page.close()
    for name, url in sorted(linked):
        target, _, anchor = url.partition("#")
        target = f"{target}index.html" if target.endswith("/") else target
        there = target in anchors and (not anchor or anchor in anchors[target])
        if not there and (anchor or not (folder / target.removeprefix(f"{address}/")).is_file()):
            found.append(f"{name}: {url.removeprefix(address)}")
    return len(linked), found


def menu() -> list[str]:
    """The pages that `nav` of mkdocs.yml lists."""
    nav = re.search(r"^nav:\n((?:[ -].*\n)+)", CONFIG.read_text(), re.MULTILINE)
    return re.findall(r"- (?:.*: )?(\S+\.md)$", nav[1], re.MULTILINE)


def test_the_menu_has_every_page_once():
    assert sorted(menu()) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)


def test_a_planted_link_that_leads_nowhere_stops_the_build(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# A page\n\n[gone](gone.md), [no heading](index.md#nowhere)\n")
    text = re.sub(r"^nav:\n(?:[ -].*\n)+", "", CONFIG.read_text(), flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(text.replace("docs_dir: docs", f"docs_dir: {docs}"))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "out")
    assert done.returncode == 1
    assert "2 warnings" in done.stdout + done.stderr


def test_the_site_has_what_its_tools_make(site):
    reference = (site / "reference.html").read_text()
    assert (
        'id="localtensor.run"' in reference
        and "isolate" in reference
        and 'id="localtensor.errors.Deadlock"' in reference
    )
    assert ":::" not in reference
    commands = (site / "command_line.html").read_text()
    assert 'id="localtensor-gate"' in commands and "--expires" in commands


def test_nothing_comes_from_elsewhere(site):
    """No page loads a script, a style, a font or a picture from another host."""
    loaded = [
        f"{page.name}: {url}"
        for page in site.rglob("*.html")
        for url in re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="?(https?:[^">\s]+)', page.read_text())
    ]
    assert loaded == []


def test_every_page_opens_without_an_error_and_every_link_leads_somewhere(site, address, browser):  # noqa: F811
    links, found = faults(site, address, browser)
    assert links > 100 and found == []
    assert len([file for file in site.rglob("*.html") if file.name != "404.html"]) == len(DOCS)


def test_a_planted_error_and_planted_loose_links_are_caught(tmp_path, browser):  # noqa: F811
    (tmp_path / "favicon.ico").write_bytes(b"")
    links = '<a href="b.html#there">1</a><a href="b.html#nowhere">2</a><a href="gone.html">3</a><a href="b.html">4</a>'
    (tmp_path / "a.html").write_text(f"<h1>A</h1>{links}<script>console.error('planted')</script>")
    (tmp_path / "b.html").write_text("<h2 id=there>B</h2><script>nothing.there</script>")
    with served(tmp_path) as where:
        count, found = faults(tmp_path, where, browser)
    assert count == 4
    assert found == [
        "planted", "nothing is not defined", "b.html: no heading, or several", "a.html: /b.html#nowhere", "a.html: /gone.html",
    ]  # fmt: skip


def test_the_search_finds_a_function_and_a_page(address, browser):  # noqa: F811
    page = browser.new_page()
    page.goto(f"{address}/index.html", wait_until="load", timeout=120_000)
    page.keyboard.press("/")
    page.keyboard.type("no_implicit_communication")
    page.wait_for_selector(".md-search-result__item a", timeout=30_000)
    found = page.evaluate("[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)")
    page.close()
    assert any("reference.html" in url or "api.html" in url for url in found)
