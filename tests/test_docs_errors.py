"""Each message on `docs/errors.md` is one of the package: its constant parts are in the source."""

import ast
import re
from pathlib import Path

import pytest

import bnet_transformer

PACKAGE = Path(bnet_transformer.__file__).parent
PAGE = PACKAGE.parent / "docs" / "errors.md"


def split_message(message):
    """Return the constant parts of a message."""
    subject, _, expected = message.partition(": expected ")
    return [part.strip(" :()") for part in re.split(r"…|=", f"{subject}…{expected}")]


@pytest.mark.slow
def test_messages_of_the_page_are_those_of_the_package():
    """The text between the gaps (`…`) of a message is part of some string of the package."""
    strings = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
    source = "\0".join(strings)
    rows = [line.split(" | ")[0] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    messages = [message.strip("|` ").replace("\\|", "|") for row in rows for message in row.split("<br>")]
    assert len(messages) > 80
    stale = [message for message in messages if not all(part in source for part in split_message(message))]
    assert not stale, "\n".join(["no message of the package is like these of docs/errors.md:", *stale])
