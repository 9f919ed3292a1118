"""Docstrings as Markdown, for the API reference of the site: an extension of Griffe, named in mkdocs.yml.

Our docstrings are plain text: a table of arguments is lines of a name, two or more spaces, and words that may go on below,
indented; an example begins with `>>>` and ends at a blank line.
"""

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # comes with the extra `docs`
    Extension = object

_ROW = re.compile(r"^(\S[^\n]*?\S|\S) {2,}(\S.*)$")
_NAMES = re.compile(r"[\w.*\"'=, |-]{0,39}[^.:;?!]")


def as_markdown(text: str) -> str:
    """The text of a docstring, with its tables as lists and its examples as blocks of a session.

    >>> print(as_markdown("Adds.\\n\\nx    one number,\\n     or more\\ny    another\\n\\n>>> 1 + 1\\n2\\n"))
    Adds.
    <BLANKLINE>
    * `x`: one number,
      or more
    * `y`: another
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", text.strip("\n")))


def _block(block: str) -> str:
    if block.startswith(">>>"):
        return f"```pycon\n{block}\n```"
    before, rows = [], []
    for line in block.splitlines():
        if (row := _ROW.match(line)) and _NAMES.fullmatch(row[1]):
            rows.append(f"* `{row[1]}`: {row[2]}")
        elif rows and line.startswith(" "):
            rows.append(f"  {line.strip()}")
        elif rows:
            return block
        else:
            before.append(line)
    return "\n".join([*before, *([""] if before and rows else []), *rows])


class Docstrings(Extension):
    """Rewrites each docstring as it is found."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
