"""MkDocs hooks: the pages that are made and not written (API reference, notebooks, changelog)."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import public_api

_made: dict[str, str | bytes] = {}


def _notebook_pages() -> dict[str, str]:
    """Turn each committed notebook, outputs included, into a page and its images; give file name to title."""
    import nbformat
    from nbconvert import MarkdownExporter

    titles: dict[str, str] = {}
    for path in (
        *sorted(public_api.ROOT.glob("notebooks/*.ipynb")),
        *sorted(public_api.ROOT.glob("notebooks/*/*.ipynb")),
    ):
        notebook: Any = nbformat.read(path, as_version=4)
        text, resources = MarkdownExporter().from_notebook_node(
            notebook, resources={"output_files_dir": path.stem, "unique_key": path.stem}
        )
        where = path.relative_to(public_api.ROOT)
        name = where.with_suffix(".md").as_posix()
        _made[name] = f"{text.rstrip()}\n\n---\n\nThis page is the notebook `{where}`, executed by every CI run.\n"
        _made.update({f"{where.parent.as_posix()}/{file}": data for file, data in resources["outputs"].items()})
        heading = next((line for line in text.splitlines() if line.startswith("# ")), f"# {path.stem}")
        titles[name] = heading.removeprefix("# ")
    return titles


def _decisions(docs: Path) -> list[dict[str, str]]:
    """The records in order; the navigation shows what follows the number."""
    pages = sorted((docs / "decisions").glob("0*.md"))
    headings = [page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in pages]
    return [
        {heading.partition(": ")[2].replace("`", ""): f"decisions/{page.name}"}
        for heading, page in zip(headings, pages, strict=True)
    ]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and put them where the navigation names their section."""
    _made.clear()
    api = public_api.pages()
    _made.update({name: text for name, (_, text) in api.items()})
    sections: dict[str, list[Any]] = {
        "API reference": [{title: name} for name, (title, _) in api.items()],
        "Notebooks": [{title: name} for name, title in _notebook_pages().items()],
        "Design decisions": ["decisions/index.md", *_decisions(Path(config.docs_dir))],
    }
    for page, source in {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}.items():
        _made[page] = (public_api.ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
    nav: list[Any] = []
    for entry in config.nav or []:
        (title, target), *_ = entry.items() if isinstance(entry, dict) else [(None, None)]
        if title in sections and target == "generated":
            if sections[title]:
                nav.append({title: sections[title]})
        else:
            nav.append(entry)
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the made pages to those that lie in docs/."""
    for name, content in _made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show a blank line where a doctest of a page has to say that there is one."""
    return markdown.replace("\n<BLANKLINE>\n", "\n\n")
