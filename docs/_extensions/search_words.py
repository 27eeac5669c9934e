"""Pages are found by the words that readers type, also where their titles say something else.

`search_words` in conf.py gives a page's words; each becomes an entry of the index, which Sphinx's search puts first.

The texts of all pages are also written to one file. A browser that reads the site from disk cannot fetch pages, and
docs/_static/scorer.js takes the excerpts of search results from this file.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

log = logging.getLogger(__name__)


class SearchWords(SphinxTransform):
    """Add the entries at the top of a page."""

    default_priority = 630

    def apply(self, **_: object) -> None:
        """Insert one node with all words of the page."""
        words = self.config.search_words.get(self.env.docname, ())
        section = next(iter(self.document.findall(nodes.section)), None)
        if words and section is not None:
            entries = [("single", word, section["ids"][0], "main", None) for word in words]
            self.document.insert(0, addnodes.index(entries=entries, inline=False))


def _check(app: Sphinx, env: object) -> None:
    for missing in set(app.config.search_words) - set(app.env.all_docs):
        log.warning("search_words in conf.py names a page that is not there: %s", missing)


def text_of(page: nodes.document) -> str:
    """The text of a page in one line, without HTML that is written into it."""
    for raw in list(page.findall(nodes.raw)):
        raw.parent.remove(raw)
    return " ".join(page.astext().split())


def _write_texts(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    texts = {name: text_of(app.env.get_doctree(name)) for name in sorted(app.env.found_docs)}
    script = f"window.pageTexts = {json.dumps(texts, ensure_ascii=False)};\n"
    (Path(app.outdir) / "_static" / "page_texts.js").write_text(script, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_config_value("search_words", {}, "env", dict)
    app.add_transform(SearchWords)
    app.connect("env-check-consistency", _check)
    app.connect("build-finished", _write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
