"""docs/command_line.md and docs/reference.md are made of the commands and of the public names, and are up to date."""

import re

import pytest

from tests.tools import api_page, command_page
from tests.tools.docstrings import as_markdown

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:click.*")


def test_the_page_of_commands_is_up_to_date():
    assert command_page.PAGE.read_text() == command_page.page(), "run: python -m tests.tools.command_page --write"


def test_the_page_of_commands_has_every_option_of_every_command():
    page = command_page.page()
    contexts = list(command_page.commands())
    assert len(contexts) > 10
    for context in contexts:
        section = page.partition(f"\n## `{context.command_path}`\n")[2].partition("\n## ")[0]
        options = [option for parameter in context.command.params for option in parameter.opts if option[:1] == "-"]
        assert section and [option for option in options if option not in section] == []


def test_the_page_of_docstrings_is_up_to_date():
    written = api_page.REFERENCE.read_text()
    assert written == api_page.reference(api_page.PAGE.read_text()), "run: python -m tests.tools.api_page --write"


def test_the_page_of_docstrings_has_every_public_name_but_the_namespaces():
    listed = {
        f"{path}.{name}" for path, names in api_page.names_in(api_page.PAGE.read_text()).items() for name in names
    }
    shown = set(re.findall(r"^::: (\S+)$", api_page.REFERENCE.read_text(), re.MULTILINE))
    assert shown <= listed and len(shown) > 100
    assert {name for name in listed - shown if name.count(".") > 1} == {"localtensor.testing.draws"}


@pytest.mark.parametrize(
    "text", ["One line.", "Two\nlines.", "A sentence.  And more.", "A sentence  with two spaces.\nand more: x  y"]
)
def test_prose_stays_as_it_is(text):
    assert as_markdown(text) == text
