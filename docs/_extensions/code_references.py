r"""Names in code become links where they name something public.

In docstrings, `one backtick` may name something (found as Python would find it beside the entry, then in `muonfx`), and
else is code; formulas stand between dollar signs, as in the pages. In pages and notebooks, `mfx.name` and
`mfx.name(...)` in one backtick are links; one that names nothing is a warning, but in records of what has been.
"""

import functools
import re
from typing import Any

import muonfx
from docutils import nodes
from docutils.parsers.rst import states
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

log = logging.getLogger(__name__)

FORMULA = re.compile(r"(?<![\\$`])\$(?!\s)(?P<tex>[^$`]+?)(?<!\s)\$(?![\d$])")
DOUBLE = re.compile(r"(``.+?``)", re.DOTALL)
SINGLE = re.compile(r"((?::math:)?`[^`]+`)")
NAME = re.compile(r"(?:mfx|muonfx)(?P<path>(?:\.[A-Za-z]\w*)+)(?:\(.*\))?", re.DOTALL)


RECORDS = ("changelog", "contributing", "decisions/")
"""Beginnings of pages that may name what is no more, or is no name."""


def _exists(target: str) -> bool:
    """True if a dotted path leads to something that is imported with the package."""
    try:
        functools.reduce(getattr, target.split(".")[1:], muonfx)
    except AttributeError:
        return False
    return True


def _reference(target: str, literal: nodes.literal, **context: Any) -> addnodes.pending_xref:
    attributes = {
        "refdomain": "py",
        "reftype": "obj",
        "refexplicit": False,
        "refwarn": False,
        **context,
    }
    return addnodes.pending_xref("", literal, reftarget=target, **attributes)


def code_reference(
    role: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: states.Inliner,
    options: Any = None,
    content: Any = (),
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """The default role of docstrings: a reference if the text names something, code if not."""
    literal = nodes.literal(rawtext, text)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", text):
        return [literal], []
    known = inliner.document.settings.env.ref_context
    context = {
        "py:module": known.get("py:module"),
        "py:class": known.get("py:class"),
        "quiet": True,
    }
    return [
        _reference(
            text.replace("mfx.", "muonfx.", 1) if text.startswith("mfx.") else text,
            literal,
            **context,
        )
    ], []


class LinkNames(SphinxTransform):
    """Link `mfx.name` in pages."""

    default_priority = 610

    def apply(self, **_: object) -> None:
        """Walk the document."""
        for literal in list(self.document.findall(nodes.literal)):
            match = NAME.fullmatch(literal.astext())
            inside = isinstance(
                literal.parent, nodes.reference | addnodes.pending_xref | nodes.title
            )
            if match and not inside:
                target = f"muonfx{match['path']}"
                literal.replace_self(
                    _reference(target, literal.deepcopy(), quiet=True, in_page=True)
                )


def _plain_if_unknown(app: Sphinx, env: Any, node: addnodes.pending_xref, contnode: Any) -> Any:
    """Leave code where no name was found, and link what stands in `muonfx` itself."""
    target = node.get("reftarget", "")
    domain = env.get_domain("py")
    if node.get("quiet"):
        full = target if target.startswith("muonfx.") else f"muonfx.{target}"
        if full in domain.objects:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", full, node, contnode
            )
        if node.get("in_page") and not node["refdoc"].startswith(RECORDS) and not _exists(full):
            log.warning("%s names nothing in muonfx", contnode.astext(), location=node)
        return contnode
    # the types in signatures: ours are short names of what is public, the others have their pages elsewhere
    if node.get("refdomain") == "py" and node.get("reftype") in {"class", "exc", "obj", "data"}:
        return contnode
    return None


def _before_letters(pieces: list[str]) -> str:
    """Join text and code in turn, with an escaped space between code and a letter, as in ``leaf``s."""
    marked = [
        code + "\\ " if re.match(r"\w", after) else code
        for code, after in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
    return "".join(
        [pieces[0], *(text for pair in zip(marked, pieces[2::2], strict=True) for text in pair)]
    )


def _to_restructured(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn what a docstring writes as Markdown into reStructuredText; what stands in examples is left alone."""
    parts = re.split(r"(^ *>>> .*(?:\n *\S.*)*)", "\n".join(lines), flags=re.MULTILINE)
    for i in range(0, len(parts), 2):
        pieces = DOUBLE.split(parts[i])
        pieces[::2] = [
            FORMULA.sub(lambda m: f":math:`{' '.join(m['tex'].split())}`", piece)
            for piece in pieces[::2]
        ]
        pieces[::2] = [_before_letters(SINGLE.split(piece)) for piece in pieces[::2]]
        parts[i] = _before_letters(pieces)
    lines[:] = "".join(parts).split("\n")


class CheckMarkup(SphinxTransform):
    """Warn of backticks that were read as text: `reStructuredText` has its own idea of where code may end."""

    default_priority = 640

    def apply(self, **_: object) -> None:
        """Walk the document."""
        for text in self.document.findall(nodes.Text):
            if "`" in text and not isinstance(
                text.parent, nodes.literal | nodes.literal_block | nodes.raw
            ):
                self._warn(text)
        for literal in self.document.findall(nodes.literal):
            if "``" in literal.astext() or literal.astext().startswith("\\ "):
                self._warn(literal)

    def _warn(self, node: nodes.Node) -> None:
        log.warning("backticks were read as text: %r", node.astext()[:120], location=node.parent)


def _blank_lines(app: Sphinx, docname: str, content: list[str]) -> None:
    """Show a blank line where a doctest of a page has to say that there is one."""
    content[0] = content[0].replace("\n<BLANKLINE>\n", "\n\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_role("code_reference", code_reference)
    app.add_transform(LinkNames)
    app.add_transform(CheckMarkup)
    app.connect("missing-reference", _plain_if_unknown)
    # Before napoleon moves the lines.
    app.connect("autodoc-process-docstring", _to_restructured, priority=400)
    app.connect("source-read", _blank_lines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
