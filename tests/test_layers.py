"""The law of the layers: imports go down only.

`LAYERS` is the list. A module may import from a lower layer, from its own part, and from a neighbour on its own layer
as long as no circle of parts comes of it. An import for types only (under `TYPE_CHECKING`) may close such a circle, but
may not go up either. Nobody imports the roof, `muonfx/__init__.py`, from inside.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "muonfx"

LAYERS = {
    "display": 0,
    "tree": 0,
    "boxes": 0,
    "arguments": 0,
    "identity": 0,
    "wrappers": 0,
    "recorded": 0,
    "elementwise": 0,
    "tracing": 0,
    "polar": 0,
    "attention": 1,
    "shards": 1,
    "checks": 1,
    "compact": 1,
    "core": 1,
    "partition": 1,
    "hyperparams": 1,
    "select": 1,
    "schedules": 1,
    "transforms": 2,
    "recipes": 3,
    "variants": 3,
    "program": 3,
    "offload": 4,
    "sharding": 4,
    "optimizer": 5,
    "checkpoint": 5,
    "engines": 6,
    "summary": 6,
    "plot": 7,
    "testing": 6,
}
ROOF = "muonfx"

# `polar` is linear algebra: it knows tensors, not trees of them.
STRANGERS = {("polar", other) for other in ("tree", "identity", "wrappers", "recorded", "elementwise", "tracing")}


def parts_of(package: Path) -> Iterator[tuple[Path, str]]:
    """Every module of the package but the roof, with the part that it lies in."""
    for path in sorted(package.rglob("*.py")):
        first = path.relative_to(package).parts[0].removesuffix(".py")
        if first != "__init__":
            yield path, first


def imported_parts(path: Path, package: Path) -> Iterator[tuple[int, str, bool]]:
    """Line and part of every import of our own, at any depth of the file, and whether it is for types only."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    names = {file.stem if file.suffix == ".py" else file.name for file in package.iterdir()}
    module = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        child
        for node in ast.walk(module)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            targets = [(*base, alias.name) for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == package.name:
                part = target[1] if len(target) > 1 and target[1] in names else ROOF
                yield node.lineno, part, node in for_types


def complaints(package: Path, layers: dict[str, int]) -> list[str]:
    """The breaches of the law, one sentence each."""
    found: list[str] = []
    neighbours: dict[str, set[str]] = {}
    for path, part in parts_of(package):
        where = path.relative_to(package.parent)
        if part not in layers:
            found.append(f"{where}: no layer is known for the part {part!r}: add it to LAYERS in tests/test_layers.py")
            continue
        for line, other, for_types in imported_parts(path, package):
            if other == ROOF:
                found.append(f"{where}:{line}: imports {ROOF} itself: import from the part that defines the name")
            elif other != part and other in layers:
                if not for_types:
                    neighbours.setdefault(part, set()).add(other)
                here, there = layers[part], layers[other]
                if there > here:
                    found.append(f"{where}:{line}: {part} (layer {here}) imports {other} (layer {there})")
                elif (part, other) in STRANGERS:
                    found.append(f"{where}:{line}: {part} must not know {other}")
    try:
        TopologicalSorter(neighbours).prepare()
    except CycleError as error:
        found.append(f"parts in a circle: {' -> '.join(error.args[1])}")
    return found


# Imported by those who need them, where they need them: what imports Triton, which may not be installed, and torch's
# distributed checkpoints, whose import takes longer than all of ours.
LAZY = {"muonfx.checkpoint.distributed", "muonfx.polar.kernels.launch"}


def imported_files(package: Path) -> Iterator[tuple[str, str, str]]:
    """The imports of each file of a package, as dotted names: who, whom, and "top", "hidden" or "types"."""
    names = {file: ".".join(file.relative_to(package.parent).with_suffix("").parts) for file in package.rglob("*.py")}
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
                base = name.split(".")[: len(name.split(".")) - node.level + inside] if node.level else []
                start = ".".join([*base, *(node.module.split(".") if node.module else [])])
                targets = [
                    f"{start}.{alias.name}" if f"{start}.{alias.name}" in known else start for alias in node.names
                ]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            how = "types" if node in for_types else "top" if node in top else "hidden"
            yield from ((name, target, how) for target in targets if target in known and target != name)


def file_complaints(package: Path, lazy: set[str]) -> list[str]:
    """Imports hidden in functions, and files that import each other in a circle."""
    neighbours: dict[str, set[str]] = {}
    found: list[str] = []
    for who, whom, how in imported_files(package):
        if how == "hidden" and whom not in lazy:
            found.append(f"{who} imports {whom} inside a function: import it at the top")
        if how != "types" and who != package.name:
            neighbours.setdefault(who, set()).add(whom)
    try:
        TopologicalSorter(neighbours).prepare()
    except CycleError as error:
        found.append(f"files in a circle: {' -> '.join(error.args[1])}")
    return found


def test_no_file_imports_in_a_circle_or_inside_a_function():
    found = file_complaints(PACKAGE, LAZY)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("from toy.b import x", "files in a circle"),
        ("from . import b", "files in a circle"),
        ("def f():\n    from toy.c import x", "toy.a imports toy.c inside a function"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.b import x", None),
    ],
)
def test_a_circle_of_files_is_found(tmp_path: Path, text: str, complaint: str | None):
    package = tmp_path / "toy"
    package.mkdir()
    for name, content in {"__init__": "", "a": text, "b": "from toy.a import y", "c": ""}.items():
        (package / f"{name}.py").write_text(content)
    found = file_complaints(package, set())
    assert (not found) if complaint is None else any(complaint in line for line in found)


def test_tests_mirror_the_package_the_benchmarks_and_the_documentation():
    tests = Path(__file__).resolve().parent
    tested = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    # other projects' own work, and recorded runs of the whole package
    tested -= {Path("engines", "references"), Path("peers"), Path("trajectories")}
    roots = {"benchmarks": tests.parent, "docs": tests.parent}  # all others lie in the package
    subjects = {folder: roots.get(folder.parts[0] if folder.parts else "", PACKAGE) / folder for folder in tested}
    missing = sorted(str(folder) for folder, subject in subjects.items() if not subject.is_dir())
    assert not missing, f"neither muonfx/ nor benchmarks/ nor docs/ has {missing}; a test lies where its subject lies"


def test_imports_go_down_only():
    found = complaints(PACKAGE, LAYERS)
    assert not found, "\n".join(found)


TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("low.py", "from toy.high import x", "low (layer 0) imports high (layer 1)"),
        ("low.py", "from toy import high", "low (layer 0) imports high (layer 1)"),
        ("low.py", "def f():\n    from .high.part import x", "low (layer 0) imports high (layer 1)"),
        ("low.py", "import toy.high.part", "low (layer 0) imports high (layer 1)"),
        ("low.py", TYPES + "from toy.high import x", "low (layer 0) imports high (layer 1)"),
        ("low.py", "import toy", "imports muonfx itself"),
        ("high/part.py", "from .. import chain", "imports muonfx itself"),
        ("new.py", "", "no layer is known for the part 'new'"),
        ("beside.py", "from . import low", "parts in a circle"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, text: str, complaint: str):
    package = tmp_path / "toy"
    (package / "high").mkdir(parents=True)
    for name in ("__init__.py", "low.py", "high/__init__.py", "high/part.py"):
        (package / name).write_text("")
    (package / "low.py").write_text("from . import beside")
    (package / "beside.py").write_text(TYPES + "from toy import low")
    (package / "high" / "part.py").write_text("from ..low import y\nfrom . import z\nimport torch")
    layers = {"low": 0, "beside": 0, "high": 1}
    assert complaints(package, layers) == []
    (package / file).write_text(text)
    assert any(complaint in line for line in complaints(package, layers))
