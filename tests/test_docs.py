"""The documentation's laws: every public name is documented, shown and has an example, and every code block runs.

The script that executes the notebooks stops a slow one, reports failures, and writes only with ``--write``.
The extensions translate formulas, and the table of other libraries has names that exist.
"""

import doctest
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbformat import v4

import muonfx
from muonfx import testing as kit
from muonfx._other_libraries import NAMES_HERE
from muonfx.testing.transforms import with_value
from tests.processes import Failed, Here, World

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "docs" / "_extensions")]
import api_pages  # noqa: E402
import notebook_pages  # noqa: E402
import public_api  # noqa: E402
import run_notebooks  # noqa: E402

SYMBOLS = public_api.symbols()


def _needs_example(symbol: public_api.Symbol) -> bool:
    """Functions and classes do; an exception, an enumeration or a plain record of fields is used by one that does."""
    found = symbol.object
    if inspect.isclass(found) and not symbol.is_data:
        record = issubclass(found, tuple | Enum | BaseException) or getattr(
            found, "_is_protocol", False
        )
        return not record
    return not symbol.is_data


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.path)
def test_a_public_name_is_documented(symbol: public_api.Symbol):
    where = f"{symbol.path} (of {symbol.module})"
    assert symbol.docstring, f"{where} has no docstring"
    first, *rest = symbol.docstring.splitlines()
    assert first.endswith("."), (
        f"{where}: the docstring's first line is not one sentence: {first!r}"
    )
    assert not rest or not rest[0].strip(), (
        f"{where}: the docstring's second line is not blank: {rest[0]!r}"
    )
    if _needs_example(symbol):
        assert ">>> " in symbol.docstring, f"{where} has no example (a line that starts with >>>)"


def test_every_public_name_is_on_one_api_page():
    folder = ROOT / "docs" / "api"
    shown: dict[str, list[str]] = {}
    for page in sorted(folder.glob("*.md")):
        for block in api_pages.BLOCK.finditer(page.read_text(encoding="utf-8")):
            for symbol in api_pages.members(block):
                shown.setdefault(symbol.path, []).append(page.name)
    wrong = {
        symbol.path: shown.get(symbol.path, [])
        for symbol in SYMBOLS
        if len(shown.get(symbol.path, [])) != 1
    }
    assert not wrong, (
        f"each of these belongs on exactly one page, by a module in an {{api}} block: {wrong}"
    )


@dataclass(frozen=True)
class Block:
    """A fenced block of Python: its text and the line that it starts on."""

    line: int
    text: str

    @property
    def is_session(self) -> bool:
        """Whether it is a session with prompts, whose output is compared."""
        return self.text.lstrip().startswith(">>>")


FENCE = re.compile(
    r"^(?P<skip><!-- not run: \S.*-->\n\s*)?(?P<indent> *)```(?:python|pycon)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page in order, but those under a comment `<!-- not run: the reason -->`."""
    found: list[Block] = []
    for match in FENCE.finditer(text):
        if not match["skip"]:
            indent = match["indent"]
            lines = [line.removeprefix(indent) for line in match["text"].splitlines()]
            found.append(
                Block(text[: match.start("text")].count("\n") + 1, "\n".join(lines) + "\n")
            )
    return found


def run_page(path: Path, *, alone: bool = False) -> int:
    """Run a page's blocks in order in one namespace, or each alone, and return their number."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    found = blocks(path.read_text(encoding="utf-8"))
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for block in found:
        if alone:
            namespace = {"__name__": "__page__"}
        if block.is_session:
            example = doctest.DocTestParser().get_doctest(
                block.text, namespace, path.name, str(path), block.line - 1
            )
            runner = doctest.DebugRunner(optionflags=flags)
            runner.run(example, clear_globs=False)
            namespace.update(example.globs)
        else:
            # So that a traceback names the page's own line.
            padded = "\n" * (block.line - 1) + block.text
            exec(compile(padded, str(path), "exec"), namespace)
    return len(found)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_page(path, alone=path.name == "README.md")  # a visitor copies one block of the front page


NOTEBOOKS = sorted(
    path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_with_its_outputs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), (
        f"{path.name}: not run from top to bottom: make notebooks ARGS=--write"
    )
    assert not [
        output for cell in cells for output in cell.outputs if output.output_type == "error"
    ]


GUIDED = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", GUIDED, ids=lambda path: path.stem)
def test_a_notebook_opens_in_colab_and_installs_there_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    title, install = nbformat.read(path, as_version=4).cells[:2]
    assert (
        f"(https://colab.research.google.com/github/muonfx/muonfx/blob/main/notebooks/{path.name})"
        in title.source
    )
    commands: list[list[str]] = []
    folders: list[str] = []
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    monkeypatch.setattr("os.chdir", folders.append)
    exec(install.source, {})
    assert commands == folders == []
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    exec(install.source, {})
    assert [command[0] for command in commands] == ["git", sys.executable]
    assert folders == ["muonfx/notebooks"]


def test_the_page_of_examples_lists_every_notebook_with_its_question():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert notebook_pages.table() in page
    for path in (ROOT / "notebooks" / "experiments").glob("*.ipynb"):
        assert f"(../notebooks/experiments/{path.name})" in page


IS_IT_HERE = [
    [re.findall(r"`([a-z_A-Z.0-9]+)[`(]", cell) for cell in row.split("|")[1:3]]
    for row in (ROOT / "docs" / "beside-others.md").read_text().splitlines()
    if row.startswith("|") and row.count("|") == 4
]


def test_what_is_said_to_be_here_is_here():
    named = [name for _, here in IS_IT_HERE for name in here]
    assert len(named) > 75
    for name in named:
        functools.reduce(getattr, name.split("."), muonfx)


def test_an_error_translates_a_name_as_the_page_does():
    tried = [(name.split(".")[-1], here) for names, here in IS_IT_HERE if here for name in names]
    foreign = [(name, here) for name, here in tried if name in NAMES_HERE]
    assert len(foreign) > 30
    for name, here in foreign:
        with pytest.raises(AttributeError, match="; here it is ") as caught:
            getattr(muonfx, name)
        assert any(one in str(caught.value) for one in here), name


STEP = [
    [re.findall(r"`([a-z_A-Z./]+)`", cell)[0] for cell in row.split("|")[2:4]]
    for row in (ROOT / "docs" / "how-a-step-is-carried-out.md").read_text().splitlines()
    if re.match(r"\| \d? ?\|", row)
]


@pytest.mark.parametrize(("file", "name"), STEP, ids=[name for _, name in STEP])
def test_the_functions_of_a_step_are_where_the_page_finds_them(file: str, name: str):
    module = importlib.import_module("muonfx." + file.removesuffix(".py").replace("/", "."))
    found = functools.reduce(getattr, name.split("."), module)
    assert inspect.getsourcefile(inspect.unwrap(found)) == str(ROOT / "muonfx" / file)


def test_the_page_of_a_step_names_functions_for_every_arrow():
    assert len(STEP) > 12


TAUGHT = {
    "docs/editor.md": {"sign_of_average"},
    "docs/index.md": {"sign_descent"},
    "docs/concepts/transforms.md": {
        "running_sign",
        "debiased_average",
        "centralize",
        "scale_by_loss",
        "divide_by_hessian",
        "divide_by_average_norm",
        "divide_by_largest_norm",
        "divide_columns",
        "lookahead",
    },
    "docs/concepts/locality.md": {"normalize"},
    "docs/check-your-own.md": {"normalized_momentum", "center_rows"},
}
DECORATED = re.compile(
    r"^( *)@mfx\.(?:transform|leafwise|matrixwise)\b.*?(?=^\1[^ \n@d)]|\Z)",
    re.MULTILINE | re.DOTALL,
)


def taught(page: str) -> dict[str, Any]:
    """The factories that the code of a page defines, by name; of several with one name the last."""
    found: dict[str, Any] = {"mfx": muonfx, "torch": torch}
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        for definition in DECORATED.finditer(block.text):
            lines = [line.removeprefix(definition[1]) for line in definition[0].splitlines()]
            exec("\n".join(lines), found)
    return {name: value for name, value in found.items() if hasattr(value, "definition")}


def test_every_transform_that_a_page_defines_is_checked():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {
        str(page.relative_to(ROOT)): set(taught(str(page.relative_to(ROOT)))) for page in pages
    }
    assert {page: found for page, found in names.items() if found} == TAUGHT


HIDES_NAN = ["a_nonfinite_gradient_stays_visible"]
NOT_OBEYED = {
    # torch's ``sign`` is 0 for NaN; `scale_by_sign` keeps NaN.
    **dict.fromkeys(("sign_of_average", "sign_descent"), HIDES_NAN),
}
"""The laws that a short example on a page does not obey, by its name."""


def made(name: str, factory: Any) -> muonfx.Transform:
    """The transform of a page, with values for its arguments that have no default."""
    if name == "lookahead":
        return factory(muonfx.momentum(), 2)
    if name == "divide_by_hessian":
        return with_hessian(
            muonfx.masked(factory(), lambda params: dict.fromkeys(muonfx.tree.names(params), True))
        )
    return with_value(factory()) if name == "scale_by_loss" else factory()


@muonfx.transform(
    locality=lambda inner: inner.locality,
    combinator=muonfx.core.Combinator(muonfx.Locality.ELEMENT),
)
def with_hessian(inner: muonfx.Transform):
    """Pass a Hessian of ones to a transform."""

    def update(updates: Any, state: Any, params: Any = None):
        hessian = dict.fromkeys(muonfx.tree.names(updates), 1.0)
        return inner.run(updates, state, params, hessian=hessian)

    return inner.functions.init, update


@pytest.mark.parametrize("page", TAUGHT)
def test_a_taught_transform_obeys_the_laws(page: str):
    for name, factory in taught(page).items():
        tx = made(name, factory)
        report = kit.check_transform(tx, max_examples=6, skip=NOT_OBEYED.get(name, []))
        assert len(report.held) >= 20


@pytest.mark.parametrize("page", TAUGHT)
def test_a_taught_transform_shows_an_infinity(page: str):
    for name, factory in taught(page).items():
        if name in NOT_OBEYED:
            continue
        tx = made(name, factory)
        kit.laws.a_nonfinite_gradient_stays_visible(tx, *kit.Example.of({"w": (1, 1)}))


# -------------------------------------------------------------------------------------------------------- notebooks


def notebook(path: Path, *sources: str) -> Path:
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources]), path)
    return path


@pytest.mark.slow
def test_outputs_are_written_without_times_and_a_rerun_changes_none(tmp_path: Path):
    path = notebook(tmp_path / "one.ipynb", "x = 1", "print(x)\nx + 1")
    before = path.read_bytes()
    result = run_notebooks.execute(path)
    assert result.error is None
    assert result.changed == [1]
    assert path.read_bytes() == before
    run_notebooks.execute(path, write=True)
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, 2]
    assert "execution" not in cells[1].metadata
    assert run_notebooks.text_of(cells[1]) == "1\n2"
    assert run_notebooks.execute(path).changed == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "limit", "message"),
    [
        (
            ("print(3)", "raise ValueError('in the second')", "print(4)"),
            None,
            "ValueError: in the second",
        ),
        (("import time", "time.sleep(600)"), 6, "stopped after 6 s"),
    ],
)
def test_a_failing_or_slow_cell_is_named_and_nothing_written(
    tmp_path: Path, sources, limit, message: str
):
    path = notebook(tmp_path / "one.ipynb", *sources)
    before = path.read_bytes()
    error = run_notebooks.execute(
        path, write=True, **({} if limit is None else {"limit": limit})
    ).error
    assert error is not None
    assert message in error
    assert sources[1] in error
    assert path.read_bytes() == before


def test_all_notebooks_are_found_experiments_last():
    found = [path.relative_to(ROOT / "notebooks").as_posix() for path in run_notebooks.find([])]
    assert found[0].startswith("01_")
    assert found[-1].startswith("experiments/")
    assert set(run_notebooks.find([])) == set(NOTEBOOKS)


code_references = importlib.import_module("code_references")


def restructured(text: str) -> str:
    lines = text.split("\n")
    code_references._to_restructured(None, "function", "f", None, None, lines)  # type: ignore[arg-type]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("the step $a_t$ and $b$", "the step :math:`a_t` and :math:`b`"),
        (r"over two $x +" + "\n" + r"    \beta$ lines", r"over two :math:`x + \beta` lines"),
        ("all ``leaf``s of the $n$th", "all ``leaf``\\ s of the :math:`n`\\ th"),
        (">>> '$a$'\n'$a$'\n\n$b$", ">>> '$a$'\n'$a$'\n\n:math:`b`"),
        ("`momentum`, ``x`` and `y`.", "`momentum`, ``x`` and `y`."),
    ],
)
def test_formulas_and_words_behind_code_are_translated_and_examples_are_not(
    markdown: str, expected: str
):
    assert restructured(markdown) == expected


API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))


@pytest.mark.parametrize("page", API_PAGES, ids=lambda page: page.stem)
def test_an_api_page_leads_readers_on_github_to_the_docstrings(page: Path):
    text = page.read_text(encoding="utf-8")
    for block in api_pages.BLOCK.finditer(text):
        note = api_pages.github_note(block)
        assert text[: block.start()].endswith(note), f"expected above the block: {note}"
        for file in re.findall(r"\]\((.*?)\)", note):
            assert (page.parent / file).exists()
    assert "> On GitHub:" not in api_pages.GITHUB_NOTE.sub("", text)


def test_a_block_gives_every_name_a_row_and_an_entry():
    def text(block: str) -> str:
        return api_pages.BLOCK.sub(api_pages.expand, block)

    whole = text("```{api} muonfx.recipes\n```")
    assert "{py:obj}`mfx.muon <muonfx.muon>`" in whole
    assert ".. autofunction:: muonfx.muon\n" in whole
    assert whole.count(".. autofunction::") == len(public_api.symbols_of("muonfx.recipes"))
    assert text("```{api} muonfx.recipes | lion adamw\n```").count(".. autofunction::") == 2


PAGE = (ROOT / "docs" / "beside-others.md").read_text(encoding="utf-8")
PACKAGES = ("muonfx", "optax", "torchopt", "equinox", "torch.optim")
COLUMNS = dict(
    zip(("muonfx", "Optax", "TorchOpt", "Equinox", "torch.optim"), PACKAGES, strict=True)
)
HERE = {"muonfx", "torch.optim"}
"""Columns of packages that are always installed."""

ELSEWHERE = ("torch", "jax")
"""Packages whose names are written in full in any column."""

OF_OBJECTS = {"fused", "foreach", "mu_dtype", "keller", "param_groups", "init", "update"}
"""Arguments, attributes of instances and values: no names of a package."""


def cells(column: str) -> list[str]:
    """The cells of a column, over all tables of features."""
    lines = PAGE[: PAGE.index("\n## Is it here?")].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    head = rows[0]
    assert all(len(row) == len(head) for row in rows)
    return [row[head.index(column)] for row in rows if row != head and "---" not in row]


def names(column: str) -> list[str]:
    """The names that stand as code in a column: no arguments, no expressions."""
    return [
        name
        for cell in cells(column)
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", cell)
        if name != "py.typed"
    ]


def look_up(package: str, name: str) -> Any:
    """The object of a dotted name within a package; its submodules are imported as needed."""
    first = name.partition(".")[0]
    parts = name.split(".") if first in ELSEWHERE else [*package.split("."), *name.split(".")]
    found: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[:place]))
        else:
            found = getattr(found, part)
    return found


# torch.distributed.optim uses what is deprecated
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "column",
    [
        pytest.param(column, marks=[] if column in HERE else pytest.mark.engines)
        for column in COLUMNS
    ],
)
def test_what_the_table_names_is_there(column: str):
    package = COLUMNS[column]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    own = names(column)
    if column == "muonfx":
        assert len(own) > 30
    for name in set(own) - OF_OBJECTS:
        look_up(package, name)


PAGES_OVER_RANKS = [
    "checkpoints.md",
    "ensembles.md",
    "local-steps.md",
    "muonclip.md",
    "sharding.md",
]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """Processes whose default group has as many ranks as there are of them."""
    if request.param == 2:
        yield request.getfixturevalue("pair")
    else:
        made = World(request.param)
        yield made
        made.close()


def read_out(here: Here, page: str, folder: Path) -> int:
    """Run a page as torchrun would: every rank types it in, in one folder."""
    torch.manual_seed(0)
    os.chdir(folder)
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return run_page(ROOT / "docs" / page)


@pytest.mark.dist
@pytest.mark.parametrize("page", PAGES_OVER_RANKS)
def test_the_code_of_a_page_runs_on_ranks(ranks: World, tmp_path: Path, page: str):
    if page == "muonclip.md" and ranks.size == 3:
        pytest.skip("its tensor parallelism shares out two key heads")
    found = ranks.run(ranks.size, read_out, page=page, folder=tmp_path)
    traces = [result.trace for result in found if isinstance(result, Failed)]
    assert not traces, "\n".join(traces)
    assert min(found) > 1
