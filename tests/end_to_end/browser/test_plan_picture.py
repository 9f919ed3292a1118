"""The picture of a plan in headless Chromium, offline, on a light and on a dark background."""

import io

import pytest

from strategies.cli.commands.plan import picture
from strategies.planner.search.api import plan
from strategies.planner.text.parser import read

image = pytest.importorskip("PIL.Image", reason="pillow is not installed: it comes with matplotlib")

COLOURS = {"light": {(0, 114, 178), (213, 94, 0)}, "dark": {(86, 180, 233), (230, 159, 0)}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_it_is_there_to_be_seen(browser, tmp_path, scheme, suffix):
    file = tmp_path / f"plan{suffix}"
    made = plan(*read("f32[4096,4096] @ dp=4,tp=4: S(0),P(sum) -> R,S(1)"))
    file.write_text(picture(made, suffix), encoding="utf-8")
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 900, "height": 900})
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    shot = image.open(io.BytesIO(page.screenshot())).convert("RGB")
    words = page.evaluate("[...document.querySelectorAll('text')].map((text) => text.textContent).join('|')")
    inside = page.evaluate("""[...document.querySelectorAll('svg text, svg rect')].every((one) => {
        const box = one.getBoundingClientRect(), all = document.querySelector('svg').getBoundingClientRect();
        return one.closest('pattern') || (box.right <= all.right + 1 && box.bottom <= all.bottom + 1 && box.left >= all.left);
    })""")
    context.close()
    assert said == [] and inside, "something lies outside the picture"
    assert all(str(step) in words for step in made.steps)
    counts = {colour: count for count, colour in shot.getcolors(1 << 20)}
    commonest = max(counts, key=counts.get)
    assert (sum(commonest) > 600) is (scheme == "light")
    assert COLOURS[scheme] <= set(counts), "no sign in the colour of a value, or of a part of one"
