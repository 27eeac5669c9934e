"""Imports between folders: each may import only the folders that `MAY_IMPORT` lists for it; and who reads a clock.

CONTRIBUTING.md shows the table. Imports for types only (under `TYPE_CHECKING`) count too. No folder imports
`muonfx/__init__.py`. No number depends on a clock.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "muonfx"

TABLE = re.compile(r"^\| `(\w+)` \| (.*?) \|", flags=re.M)


def may_import() -> dict[str, set[str]]:
    """The folders that each folder may import, read from CONTRIBUTING.md."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## The folders")[2].partition("\n## ")[0]
    return {
        folder: set(re.findall(r"`(\w+)`", others)) for folder, others in TABLE.findall(section)
    }


MAY_IMPORT = may_import()


def imported_files(package: Path) -> Iterator[tuple[str, str, str]]:
    """The imports of each file of a package, as dotted names: who, whom, and "top", "hidden" or "types"."""
    names = {
        file: ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for file in package.rglob("*.py")
    }
    names = {file: name.removesuffix(".__init__") for file, name in names.items()}
    known = set(names.values())
    for file, name in names.items():
        module = ast.parse(file.read_text(encoding="utf-8"))
        top = set(module.body)
        for_types = {
            child
            for node in module.body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        }
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom):
                inside = file.name == "__init__.py"
                base = (
                    name.split(".")[: len(name.split(".")) - node.level + inside]
                    if node.level
                    else []
                )
                start = ".".join([*base, *(node.module.split(".") if node.module else [])])
                targets = [
                    f"{start}.{alias.name}" if f"{start}.{alias.name}" in known else start
                    for alias in node.names
                ]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            how = "types" if node in for_types else "top" if node in top else "hidden"
            yield from (
                (name, target, how) for target in targets if target in known and target != name
            )


def folder_of(module: str) -> str:
    """The folder or file directly in the package that a module belongs to; of the package itself, its own name."""
    package, *rest = module.split(".")
    return rest[0] if rest else package


def complaints(package: Path, may_import: dict[str, set[str]]) -> list[str]:
    """The imports that the table does not allow, one sentence each."""
    folders = {
        path.relative_to(package).parts[0].removesuffix(".py") for path in package.rglob("*.py")
    } - {"__init__"}
    found = [
        f"the table in CONTRIBUTING.md has no row for {folder!r}: add one"
        for folder in folders - may_import.keys()
    ]
    for who, whom, _ in imported_files(package):
        folder, other = folder_of(who), folder_of(whom)
        if folder == package.name or folder not in may_import:
            continue
        if other == package.name:
            found.append(
                f"{who} imports {other} itself: import from the folder that defines the name"
            )
        elif other != folder and other not in may_import[folder]:
            found.append(f"{who} imports {whom}: the row of {folder} does not list {other}")
    return found


def hidden_imports(package: Path) -> list[str]:
    """Imports inside functions, one sentence each."""
    return [
        f"{who} imports {whom} inside a function: import it at the top"
        for who, whom, how in imported_files(package)
        if how == "hidden"
    ]


def require_no_circle(package: Path) -> None:
    """Raise `CycleError`, with the files, if files import each other, directly or not, counting imports for types."""
    order: TopologicalSorter[str] = TopologicalSorter()
    for who, whom, _ in imported_files(package):
        if who != package.name:
            order.add(who, whom)
    order.prepare()


def test_no_file_imports_in_a_circle_or_inside_a_function():
    found = hidden_imports(PACKAGE)
    assert not found, "\n".join(found)
    require_no_circle(PACKAGE)


COMMUNICATION = "muonfx.sharding.communication"
"""The folder of `muonfx.sharding` that communicates. Its other folders are values, which need no process group."""


def test_values_of_sharding_do_not_import_what_communicates():
    found = [
        f"{who} imports {whom}: a layout, a cut and a plan need no process group"
        for who, whom, _ in imported_files(PACKAGE)
        if who.startswith(("muonfx.sharding.shards", "muonfx.sharding.plan"))
        and whom.startswith(COMMUNICATION)
    ]
    assert not found, "\n".join(found)


def test_collectives_of_sharding_are_in_one_folder():
    called = re.compile(
        r"\bdist\.(all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|send|recv|barrier|new_group)\("
    )
    folder = PACKAGE / "sharding" / "communication"
    found = [
        f"{file.relative_to(PACKAGE)} calls dist.{name}: call it in {COMMUNICATION}"
        for file in (PACKAGE / "sharding").rglob("*.py")
        if folder not in file.parents
        for name in called.findall(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
    assert called.search((folder / "messages.py").read_text(encoding="utf-8"))


def toy(folder: Path, texts: dict[str, str]) -> Path:
    """A package of files by name."""
    for name, text in {"__init__": "", **texts}.items():
        file = folder / "toy" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "toy"


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.{} import x"


@pytest.mark.parametrize(
    "text", ["import toy.b", "from toy.b import x", "from . import b", FOR_TYPES.format("b")]
)
def test_a_circle_of_files_is_found(tmp_path: Path, text: str):
    texts = {
        "__init__": "import toy.a",
        "a": text,
        "b": "import toy.c",
        "c": FOR_TYPES.format("a"),
        "d": text,
    }
    with pytest.raises(CycleError, match=r"toy\.a.*toy\.b"):
        require_no_circle(toy(tmp_path, texts))


def test_a_hidden_import_is_found(tmp_path: Path):
    package = toy(tmp_path, {"a": "def f():\n    from toy.b import x", "b": ""})
    assert hidden_imports(package) == [
        "toy.a imports toy.b inside a function: import it at the top"
    ]


def test_tests_mirror_the_package_the_benchmarks_and_the_documentation():
    tests = Path(__file__).resolve().parent
    tested = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    # other projects' own work, and recorded runs of the whole package
    tested -= {Path("engines", "references"), Path("peers"), Path("trajectories")}
    roots = {"benchmarks": tests.parent, "docs": tests.parent}  # all others lie in the package
    subjects = {
        folder: roots.get(folder.parts[0] if folder.parts else "", PACKAGE) / folder
        for folder in tested
    }
    missing = sorted(str(folder) for folder, subject in subjects.items() if not subject.is_dir())
    assert not missing, (
        f"neither muonfx/ nor benchmarks/ nor docs/ has {missing}; a test lies where its subject lies"
    )


def test_folders_import_only_what_the_table_allows():
    found = complaints(PACKAGE, MAY_IMPORT)
    assert not found, "\n".join(found)


def test_the_table_has_a_row_for_each_folder_and_no_cycle():
    folders = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")
    }
    assert MAY_IMPORT.keys() == folders - {"__init__"}
    TopologicalSorter(MAY_IMPORT).prepare()


def test_no_file_is_directly_in_the_package_but_the_recipes_the_commands_and_the_names_of_other_libraries():
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "_other_libraries.py", "recipes.py"}


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("low", "from toy import high", "the row of low does not list high"),
        ("low", "def f():\n    from .high.part import x", "the row of low does not list high"),
        ("low", "if TYPE_CHECKING:\n    import toy.high.part", "the row of low does not list high"),
        ("low", "import toy", "imports toy itself"),
        ("high/part", "from .. import chain", "imports toy itself"),
        ("new", "", "has no row for 'new'"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, text: str, complaint: str):
    texts = {
        "low": "",
        "high/__init__": "",
        "high/part": "from ..low import y\nfrom . import z\nimport torch",
    }
    table: dict[str, set[str]] = {"low": set(), "high": {"low"}}
    assert complaints(toy(tmp_path, texts), table) == []
    assert any(
        complaint in line for line in complaints(toy(tmp_path, {**texts, file: text}), table)
    )


ALLOWED = {
    "checkpoint/files.py": "the longest time that a save waits for readers of the checkpoint that it replaces",
    "testing/optimizers/ranks.py": "ranks that do not finish are ended after some time",
    "internal/progress.py": "lines of progress are at least some seconds apart",
    "testing/laws/ambient.py": "a law moves the clock, to see that no result depends on it",
}
CLOCKS = {"time", "timeit", "datetime", "sched"}


def reads_a_clock(tree: ast.AST) -> bool:
    """True if a module imports a clock, times events of a device or tunes kernels."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Import)
            and {name.name.partition(".")[0] for name in node.names} & CLOCKS
        ):
            return True
        if isinstance(node, ast.ImportFrom) and node.module in CLOCKS:
            return {name.name for name in node.names} != {"timedelta"}
        if isinstance(node, ast.Attribute) and node.attr in (
            "elapsed_time",
            "autotune",
            "do_bench",
        ):
            return True
    return False


def test_only_the_listed_modules_read_a_clock():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if reads_a_clock(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)
