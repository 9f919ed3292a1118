"""The page of a run in headless Chromium, offline: every rank has a lane, zoom and clocks work, nothing is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt
from localtensor.collectives.trace.clock import set_clock
from localtensor.layout.links import Links
from localtensor.runner.trace.page import page_of


def step():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    recording = lt.run(step, ranks=3, trace=True).recording
    file = tmp_path_factory.mktemp("page") / "run.html"
    file.write_text(page_of(recording, set_clock(recording, Links())), encoding="utf-8")
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_time_line_can_be_looked_at(browser, file, scheme):
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 1200, "height": 900})
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    shown = "[...document.querySelectorAll('.line:not([hidden])')]"
    names = page.evaluate(
        f"{shown}.flatMap((line) => [...line.querySelectorAll('.names span')].map((one) => one.textContent))"
    )
    assert names == [f"rank {rank}{lane}" for rank in range(3) for lane in ("", " network")]
    middle = f"{shown}.flatMap((line) => [...line.querySelectorAll('g')]).filter((g) => +g.dataset.b > 0.3 && +g.dataset.e < 0.7)"
    width = f"Math.max(...{middle}.map((g) => g.firstElementChild.getBoundingClientRect().width))"
    labels = f"{shown}.flatMap((line) => [...line.querySelectorAll('svg text')].map((one) => one.textContent))"
    before = page.evaluate(width)
    found = page.evaluate(labels)
    assert before > 1 and any(label.startswith("Seq") for label in found) and "wait for all_reduce ranks 0,1,2" in found
    ticks = page.evaluate(f"{shown}[0].querySelector('.ticks').textContent")
    page.click("button[data-zoom=in]")
    assert page.evaluate(width) == pytest.approx(2 * before, rel=0.05)
    assert page.evaluate(f"{shown}[0].querySelector('.ticks').textContent") != ticks
    page.click("button[data-zoom=all]")
    assert page.evaluate(width) == pytest.approx(before, rel=0.01)
    page.click("button[data-clock=real]")
    clocks = page.evaluate(f"{shown}.map((line) => line.dataset.clock)")
    wide = page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1")
    context.close()
    assert clocks == ["real"] and wide and said == []


def test_bars_lie_within_the_drawing(browser, file):
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.goto(file.as_uri())
    inside = page.evaluate("""[...document.querySelectorAll('.line:not([hidden]) rect')].map((one) => {
        const box = one.getBoundingClientRect(), all = one.closest('svg').getBoundingClientRect();
        return box.left >= all.left - 2 && box.right <= all.right + 2 && box.top >= all.top && box.bottom <= all.bottom + 1;
    })""")
    page.close()
    assert len(inside) > 50 and all(inside)


def test_the_hint_below_a_long_time_line_is_as_wide_as_the_line(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("localtensor.runner.trace.page.MOST_BARS", 5)
    recording = lt.run(step, ranks=2, trace=True).recording
    long = tmp_path / "long.html"
    long.write_text(page_of(recording, set_clock(recording, Links())), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(long.as_uri())
    line = ".line:not([hidden])"
    hint, svg = (page.locator(f"{line} {what}").bounding_box() for what in (".hint", "svg"))
    page.close()
    assert hint["x"] == pytest.approx(svg["x"], abs=2) and hint["width"] > 0.5 * svg["width"] and hint["y"] > svg["y"]
