"""Types help: pyright and mypy find planted mistakes and nothing in correct uses, and know the names in registries."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import muonfx as mfx
from muonfx.compact.books import FLOAT8
from muonfx.compact.dtypes import Code, Format
from muonfx.polar.coefficients import PRESETS
from muonfx.sharding.layouts import Partition
from muonfx.sharding.transform import Replicas
from muonfx.transforms.scale import SHAPE_RULES

ROOT = Path(__file__).resolve().parent.parent
PLANTED = ROOT / "tests" / "types"
MARK = re.compile(r"# wrong: (?P<pyright>\w+), (?P<mypy>[\w-]+)$")
FENCE = re.compile(r"^```python[^\n]*\n(?P<text>.*?)^``` *$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/editor.md")

Found = dict[str, dict[int, set[str]]]
"""By file and line, the codes of errors."""


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that uses muonfx: the planted files, and each page's code as one module."""
    folder = tmp_path_factory.mktemp("consumer")
    for name in ("correct.py", "mistakes.py"):
        shutil.copy(PLANTED / name, folder)
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        code = "".join(match["text"] for match in FENCE.finditer(text))
        (folder / f"{Path(page).stem.lower()}_page.py").write_text(code, encoding="utf-8")
    return folder


def run(command: list[str], folder: Path) -> str:
    # As an installed package: mypy then reports what importers see.
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    full = [sys.executable, "-m", *command]
    done = subprocess.run(full, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def by_pyright(consumer: Path) -> Found:
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (consumer / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    found: Found = {}
    report = json.loads(
        run(["basedpyright", "--pythonpath", sys.executable, "--outputjson", "."], consumer)
    )
    assert report["summary"]["filesAnalyzed"] == 2 + len(PAGES)
    for error in report["generalDiagnostics"]:
        if error["severity"] == "error":
            line = error["range"]["start"]["line"] + 1
            found.setdefault(Path(error["file"]).name, {}).setdefault(line, set()).add(
                error.get("rule", "")
            )
    return found


@pytest.fixture(scope="module")
def by_mypy(consumer: Path) -> Found:
    # torch's own Tensor.backward has no types, which --strict counts against whoever calls it
    strict = [
        "mypy",
        "--strict",
        "--untyped-calls-exclude=torch",
        "--cache-dir",
        str(consumer / "cache"),
    ]
    said = run(
        [*strict, "--output", "json", *(path.name for path in consumer.glob("*.py"))], consumer
    )
    found: Found = {}
    for line in said.splitlines():
        error = json.loads(line)
        if error["severity"] == "error":
            found.setdefault(Path(error["file"]).name, {}).setdefault(error["line"], set()).add(
                error["code"]
            )
    return found


def marked(checker: str) -> dict[int, str]:
    lines = (PLANTED / "mistakes.py").read_text(encoding="utf-8").splitlines()
    found = {number: MARK.search(line) for number, line in enumerate(lines, 1)}
    return {number: match[checker] for number, match in found.items() if match}


def assert_finds_all(found: dict[int, set[str]], planted: dict[int, str]) -> None:
    missed = {line: code for line, code in planted.items() if code not in found.get(line, ())}
    assert not missed, f"planted mistakes that were not found, by line: {missed}"
    assert found.keys() == planted.keys(), "errors where no mistake was planted"


def test_pyright_finds_each_planted_mistake_and_no_other(by_pyright: Found):
    planted = marked("pyright")
    assert len(planted) >= 20
    assert_finds_all(by_pyright.pop("mistakes.py"), planted)


@pytest.mark.slow
def test_mypy_finds_each_planted_mistake_and_no_other(by_mypy: Found):
    assert_finds_all(by_mypy["mistakes.py"], marked("mypy"))


def test_pyright_finds_nothing_in_correct_uses_and_in_the_pages(by_pyright: Found):
    assert by_pyright.keys() <= {"mistakes.py"}


@pytest.mark.slow
def test_strict_mypy_finds_nothing_in_correct_uses_in_the_pages_and_in_muonfx(by_mypy: Found):
    assert by_mypy.keys() == {"mistakes.py"}


def test_what_type_checkers_take_for_correct_runs():
    spec = importlib.util.spec_from_file_location("correct", PLANTED / "correct.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


@pytest.mark.parametrize(
    ("literal", "registry"),
    [
        (mfx.ShapeRule, SHAPE_RULES),
        (mfx.polar.CoefficientSet, PRESETS),
        (Format, FLOAT8),
    ],
)
def test_a_literal_has_the_names_of_its_registry(literal: Any, registry: Any):
    assert get_args(literal) == tuple(registry)


def test_names_without_a_registry_are_all_taken():
    params = {"w": torch.zeros(4, 4)}
    layout = mfx.sharding.zero(params, 1)
    names_of_methods, _ = get_args(mfx.polar.MethodLike)  # or the steps of each stage
    for method in get_args(names_of_methods):
        assert mfx.orthogonalize(method=method).arguments["method"] == method
    for partition in get_args(Partition):
        assert mfx.sharding.zero(params, 1, partition=partition).size == 1
    for replicas in get_args(Replicas):
        assert (
            mfx.sharding.sharded(mfx.momentum(), layout, replicas=replicas).arguments["replicas"]
            == replicas
        )
    for code in get_args(Code):
        assert mfx.int8(code=code).arguments["code"] == code


@pytest.mark.slow
def test_the_wheel_says_that_it_is_typed(tmp_path: Path):
    command = [
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    run(command, tmp_path)
    (wheel,) = tmp_path.glob("muonfx-*.whl")
    assert "muonfx/py.typed" in zipfile.ZipFile(wheel).namelist()
