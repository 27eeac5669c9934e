"""MkDocs hook: formulas become MathML when the site is built, so that a page needs no script.

`pymdownx.arithmatex` marks what stands between dollar signs, in pages, docstrings and notebooks alike; this turns the
marked TeX into MathML, which browsers draw by themselves. TeX that cannot be read is an error of the build.
"""

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
log = logging.getLogger("mkdocs.plugins.mathml")


def on_page_content(html_text: str, /, *, page: Any, **_: Any) -> str:
    """Replace the formulas of a rendered page."""

    def mathml(match: re.Match[str]) -> str:
        tex = html.unescape(match[2]).strip()
        try:
            return convert(tex, display="inline" if match[1] == "span" else "block")
        except Exception as error:
            log.warning("%s: cannot read the formula %r: %s", page.file.src_path, tex, error)
            return match[0]

    return MARKED.sub(mathml, html_text)
