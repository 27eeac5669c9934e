"""The pages of the API: blocks that name modules become a table and an entry for every public name that they define.

In docs/api/*.md, a block::

    ```{api} muonfx.recipes muonfx.contrib.scion
    ```

is replaced by all public names that these modules define; ``{api} muonfx.recipes | adamw lion`` for two of them.
``{api-overview}`` becomes the list of all pages with their names. A public name without an entry is a warning, and
so an error of the build.

GitHub shows such a block as it is. Above it, a line that begins with ``> On GitHub:`` links to the source; the site
leaves this line out.
"""

import re
from pathlib import Path
from typing import Any

import public_api
from sphinx.application import Sphinx
from sphinx.domains.python._object import PyObject
from sphinx.util import logging

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]

BLOCK = re.compile(
    r"^```\{api\} *(?P<modules>[\w. ]+?)(?: *\| *(?P<names>[\w ]+))?\n```$", re.MULTILINE
)
OVERVIEW = re.compile(r"^```\{api-overview\}\n```$", re.MULTILINE)
GITHUB_NOTE = re.compile(r"^> On GitHub: .*\n\n", re.MULTILINE)
WITH_BASE = {"muonfx.sharding.Layout"}
"""Classes that show the members of their base class, which has no entry of its own."""
PAGES = re.compile(r"```\{toctree\}\n(?P<body>.*?)```", re.DOTALL)


def _shown(symbol: public_api.Symbol) -> str:
    return symbol.path.replace("muonfx.", "mfx.", 1)


def _table(members: list[public_api.Symbol]) -> list[str]:
    rows = ["| name | |", "| --- | --- |"]
    for symbol in members:
        summary = symbol.summary.replace("|", "\\|")
        rows.append(f"| {{py:obj}}`{_shown(symbol)} <{symbol.path}>` | {summary} |")
    return [*rows, ""]


def _entry(symbol: public_api.Symbol) -> list[str]:
    """The reStructuredText of one name's entry."""
    if symbol.is_data:
        value = symbol.assigned if len(symbol.assigned) <= 160 else "..."
        head = [f".. py:data:: {symbol.name}", f"   :module: {symbol.face}", f"   :value: {value}"]
        head += (
            [f"   :canonical: {symbol.module}.{symbol.name}"]
            if symbol.module != symbol.face
            else []
        )
        return [*head, "", *(f"   {line}" for line in symbol.docstring.splitlines()), ""]
    if isinstance(symbol.object, type):
        kind = "autoexception" if issubclass(symbol.object, BaseException) else "autoclass"
    else:
        kind = "autofunction"
    return [
        f".. {kind}:: {symbol.path}",
        *(["   :inherited-members: object"] if symbol.path in WITH_BASE else []),
        "",
    ]


def members(block: re.Match[str]) -> list[public_api.Symbol]:
    """All public names of the modules of a block, or some of them."""
    found = public_api.symbols_of(*block["modules"].split())
    names = (block["names"] or "").split()
    return [symbol for symbol in found if not names or symbol.name in names]


def expand(block: re.Match[str]) -> str:
    """The Markdown that stands in the place of a block."""
    faces = {module.__name__ for module in public_api.public_modules()}
    modules, shown = block["modules"].split(), members(block)
    lines: list[str] = []
    for module in modules:
        no_index = [] if module in faces else ["   :no-index:"]
        lines += [
            "````{eval-rst}",
            f".. automodule:: {module}",
            "   :no-members:",
            *no_index,
            "````",
            "",
        ]
    lines += _table(shown)
    for symbol in shown:
        lines += ["````{eval-rst}", *_entry(symbol), "````", ""]
    return "\n".join(lines)


def github_note(block: re.Match[str]) -> str:
    """The line above a block for readers on GitHub, with a link to the file of each module."""
    links: list[str] = []
    for module in block["modules"].split():
        path = Path(*module.split("."))
        is_package = (ROOT / path).is_dir()
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        links.append(f"[{module}](../../{file.as_posix()})")
    return f"> On GitHub: these entries are docstrings of {', '.join(links)}; `make docs` builds the page.\n\n"


def overview(folder: Path) -> str:
    """The Markdown of the list of all pages, in the order of the index's own tables of contents."""
    lines: list[str] = []
    for body in PAGES.findall((folder / "index.md").read_text(encoding="utf-8")):
        for name in (line for line in body.splitlines() if line and not line.startswith(":")):
            text = (folder / f"{name}.md").read_text(encoding="utf-8")
            title = text.splitlines()[0].removeprefix("# ")
            shown = [symbol for block in BLOCK.finditer(text) for symbol in members(block)]
            links = [f"{{py:obj}}`{_shown(s)} <{s.path}>`" for s in shown]
            lines += [f"**[{title}]({name}.md)**", f": {', '.join(links)}", ""]
    return "\n".join(lines)


def subject_of(page: str) -> str | None:
    r"""The module of a page of one module that has a first line of its own, else None.

    There the first paragraph of the module's docstring would repeat the subject of the page.

    >>> subject_of("# Recipes\n\nWhole optimizers.\n\n```{api} muonfx.recipes\n```\n")
    'muonfx.recipes'
    >>> subject_of("# Recipes\n\n```{api} muonfx.recipes\n```\n")
    """
    modules = [module for block in BLOCK.finditer(page) for module in block["modules"].split()]
    text = GITHUB_NOTE.sub("", page).partition("```{")[0]
    has_first_line = any(line and not line.startswith("#") for line in text.splitlines())
    return modules[0] if len(modules) == 1 and has_first_line else None


def _leave_out_the_subject(
    app: Sphinx, what: str, name: str, object_: Any, options: Any, lines: list[str]
) -> None:
    """Remove the first paragraph of a module's docstring on the page of this module alone."""
    page = Path(app.srcdir) / f"{app.env.docname}.md"
    if what == "module" and page.exists() and subject_of(page.read_text(encoding="utf-8")) == name:
        end = lines.index("") if "" in lines else len(lines)
        lines[:end] = []


def _on_source(app: Sphinx, docname: str, content: list[str]) -> None:
    if not docname.startswith("api/"):
        return
    text = BLOCK.sub(expand, GITHUB_NOTE.sub("", content[0]))
    content[0] = OVERVIEW.sub(lambda _: overview(Path(app.srcdir) / "api"), text)


def _check_coverage(app: Sphinx, env: Any) -> None:
    shown = {name for name, *_ in env.get_domain("py").get_objects()}
    for symbol in public_api.symbols():
        if symbol.path not in shown:
            log.warning(
                "%s is public and no page shows it: name its module, %s, in an {api} block of docs/api/",
                symbol.path,
                symbol.module,
            )


def _mend_backlinks(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Lead from a source page to each entry by the entry's own path.

    `viewcode` takes one public module for all names of a source file; ours are on two, such as `muonfx.spec` and
    `muonfx.checkpoint.StateSpec`.
    """
    if not page.startswith("_modules/") or "body" not in context:
        return
    module = page.removeprefix("_modules/").replace("/", ".")
    paths = {symbol.name: symbol.path for symbol in public_api.symbols() if symbol.module == module}

    def own(match: re.Match[str]) -> str:
        name, dot, rest = match["target"].removeprefix(match["face"] + ".").partition(".")
        return f"{match['start']}{paths.get(name, match['face'] + '.' + name)}{dot}{rest}"

    faces = sorted({found.__name__ for found in public_api.public_modules()}, key=len, reverse=True)
    either = "|".join(map(re.escape, faces))
    backlink = re.compile(
        rf'(?P<start><a class="viewcode-back" href="[^"#]*#)(?P<target>(?P<face>{either})\.[\w.]+)'
    )
    context["body"] = backlink.sub(own, context["body"])


def short_entry(entry: str) -> str:
    """An entry of the index in one line: where a name is, without the package and without its kind.

    >>> short_entry("adam_beta1 (muonfx.engines.huggingface.TrainingArguments attribute)")
    'adam_beta1 (TrainingArguments)'
    >>> short_entry("chains() (in module muonfx.testing)")
    'chains() (testing)'
    >>> short_entry("(muonfx.Muon method)")
    '(Muon)'
    """
    member = re.sub(
        r"\((?:[a-z_]\w*\.)*(\w+) (?:attribute|method|class method|static method|property)\)",
        r"(\1)",
        entry,
    )
    return re.sub(r" ?\((?:in module|class in) muonfx\.?([\w.]*)\)", r" (\1)", member).removesuffix(
        " ()"
    )


def _shorten_index(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Write each entry of the general index in one line."""
    if page != "genindex":
        return
    for _, entries in context["genindexentries"]:
        for place, (name, (links, subentries, *key)) in enumerate(entries):
            shorter = [(short_entry(inner), *rest) for inner, *rest in subentries]
            entries[place] = (short_entry(name), (links, shorter, *key))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    for field in PyObject.doc_field_types:  # what the `Attributes:` of a docstring become
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("source-read", _on_source)
    app.connect("html-page-context", _mend_backlinks)
    app.connect("html-page-context", _shorten_index)
    app.connect("autodoc-process-docstring", _leave_out_the_subject, priority=900)
    app.connect("env-check-consistency", _check_coverage)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
