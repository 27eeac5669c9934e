"""Notebooks, which lie beside docs/ in the repository, become pages with a link to download them.

They are copied to docs/notebooks (which git ignores) before Sphinx looks for its sources. Links are written as the
repository needs them: `../docs/page.md` in a notebook, and `../notebooks/name.ipynb` in a page. They become links
between pages of the site.
"""

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]


def _copy(app: Sphinx, config: Any) -> None:
    """Bring docs/notebooks up to date; an equal copy keeps its time, so that Sphinx need not read it again."""
    target = Path(app.srcdir) / "notebooks"
    found = {
        path.relative_to(ROOT / "notebooks"): path.read_text(encoding="utf-8")
        .replace("](../../docs/", "](../../")
        .replace("](../docs/", "](../")
        for path in (ROOT / "notebooks").rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.parts
    }
    for old in target.rglob("*.ipynb") if target.exists() else ():
        if old.relative_to(target) not in found:
            old.unlink()
    for name, text in found.items():
        copy = target / name
        if not copy.exists() or copy.read_text(encoding="utf-8") != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")


def question(path: Path) -> tuple[str, str]:
    """Read a notebook's title and the question that it opens with, which stands in bold below the title."""
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    found = re.match(r"# (?P<title>[^\n]+)\n+(?:\*\*(?P<question>.+?)\*\*)?", first, re.DOTALL)
    if not found:
        raise ValueError(
            f"{path}: the first cell should begin with '# ' and a title; found {first[:80]!r}"
        )
    return found["title"].strip(), " ".join((found["question"] or "").split())


def table() -> str:
    """The list of all notebooks, as a table in Markdown for a page of docs/."""
    rows = ["| notebook | question |", "| --- | --- |"]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        title, asked = question(path)
        rows.append(f"| [{title}](../notebooks/{path.name}) | {asked} |")
    return "\n".join(rows)


def _on_source(app: Sphinx, docname: str, content: list[str]) -> None:
    """Let links to notebooks lead to their copies below docs/."""
    depth = docname.count("/")
    if not docname.startswith("notebooks/"):
        content[0] = content[0].replace(
            f"]({'../' * (depth + 1)}notebooks/", f"]({'../' * depth}notebooks/"
        )


class DownloadLink(SphinxTransform):
    """Put a link to the file below a notebook's title."""

    default_priority = 620

    def apply(self, **_: object) -> None:
        """Add the paragraph."""
        source = Path(self.env.doc2path(self.env.docname))
        title = next(iter(self.document.findall(nodes.title)), None)
        if source.suffix != ".ipynb" or title is None:
            return
        link = addnodes.download_reference(
            "", "", reftarget=f"/{source.relative_to(self.env.srcdir)}"
        )
        link += nodes.literal("", source.name, classes=["xref", "download"])
        note = nodes.paragraph(
            "", "Download ", link, nodes.Text(". "), classes=["notebook-download"]
        )
        note += nodes.Text(
            "The outputs below are those of the committed file, which is executed by every CI run."
        )
        title.parent.insert(title.parent.index(title) + 1, note)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("config-inited", _copy)
    app.connect("source-read", _on_source)
    app.add_transform(DownloadLink)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
