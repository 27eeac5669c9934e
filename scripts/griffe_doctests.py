"""A griffe extension: a bare doctest becomes a code block of its page, wherever in the docstring it stands."""

import re
from typing import Any

import griffe

# Lines from a prompt up to the next blank line, all indented as the prompt is.
SESSION = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent) +\S.*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Put fences around every session that stands in none; neighbouring sessions share one block."""
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 2):
        parts[i] = SESSION.sub(lambda m: f"{m['indent']}```pycon\n{m[0]}\n{m['indent']}```", parts[i])
    return "".join(parts)


class Doctests(griffe.Extension):
    """Rewrite docstrings as they are read; those with an `Examples:` section are griffe's own business."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the sessions of one object's docstring."""
        if obj.docstring and not re.search(r"^ *Examples:", obj.docstring.value, re.MULTILINE):
            obj.docstring.value = fenced(obj.docstring.value)
