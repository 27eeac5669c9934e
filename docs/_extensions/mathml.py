"""Formulas become MathML when the site is built: a page needs no script, and the font is in `_static`."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

log = logging.getLogger(__name__)


def _write(translator: Any, node: nodes.Element, display: str) -> None:
    tex = node.astext().strip()
    try:
        translator.body.append(convert(tex, display=display))
    except Exception as error:
        log.warning("cannot read the formula %r: %s", tex, error, location=node)
    raise nodes.SkipNode


def _inline(translator: Any, node: nodes.Element) -> None:
    _write(translator, node, "inline")


def _block(translator: Any, node: nodes.Element) -> None:
    _write(translator, node, "block")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
