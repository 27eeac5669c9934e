"""Numbers of papers become links: "arXiv 2502.16982" anywhere in pages, docstrings and notebooks."""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

PAPER = re.compile(r"arXiv[: \n](?P<id>\d{4}\.\d{4,5})")
NOT_INSIDE = (
    nodes.literal,
    nodes.literal_block,
    nodes.reference,
    nodes.math,
    nodes.math_block,
    nodes.raw,
    nodes.comment,
)


def linked(text: str) -> list[nodes.Node]:
    """Split a text into what stays and the references that it becomes."""
    parts: list[nodes.Node] = []
    end = 0
    for match in PAPER.finditer(text):
        parts += [nodes.Text(text[end : match.start()])] if match.start() > end else []
        url = f"https://arxiv.org/abs/{match['id']}"
        parts.append(nodes.reference("", f"arXiv {match['id']}", refuri=url, internal=False))
        end = match.end()
    return [*parts, nodes.Text(text[end:])] if end < len(text) else parts


class ArxivLinks(SphinxTransform):
    """Replace the text by a reference, where it stands in plain text."""

    default_priority = 600

    def apply(self, **_: object) -> None:
        """Walk the document."""
        for text in list(self.document.findall(nodes.Text)):
            node = text.parent
            while node is not None and not isinstance(node, NOT_INSIDE):
                node = node.parent
            if node is None and PAPER.search(text):
                text.parent.replace(text, linked(text))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_transform(ArxivLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
