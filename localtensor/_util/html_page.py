"""An HTML page in one file: a template with its style and its script inside, which opens without a network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
STYLE = Path(__file__).parents[1] / "templates" / "page.css"
"""What all pages look like."""


def render_page(template: Path, styles: Sequence[Path] = (STYLE,), script: Path | None = None, **values: object) -> str:
    """The page that a template makes of values, all of which it escapes.

    The template gets `style` and `script` as text that is not escaped, and `sha`, by which the browser runs this script only.
    """
    import jinja2  # lazy: of all that this package does, pages alone need it
    from markupsafe import Markup

    code = "" if script is None else script.read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup("".join(one.read_text(encoding="utf-8") for one in styles))  # noqa: S704 - files of ours, no user's text
    sha = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    trusted = Markup(code)  # noqa: S704 - a file of ours, and no user's text
    text = environment.get_template(template.name).render(style=style, script=trusted, sha=sha, **values)
    return xml_safe(text)


def xml_safe(text: str) -> str:
    """The text with a mark for each character that XML cannot hold: control characters and lone surrogates.

    >>> xml_safe("a" + chr(0) + "b") == "a" + chr(0xFFFD) + "b"
    True
    """
    return _NOT_XML.sub("\ufffd", text)
