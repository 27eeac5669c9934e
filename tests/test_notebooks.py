"""The script that executes the notebooks: it stops one that takes too long, names what fails, and writes when told."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import run_notebooks  # noqa: E402

pytestmark = pytest.mark.slow  # each starts a kernel


def notebook(path: Path, *sources: str) -> Path:
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources]), path)
    return path


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


@pytest.mark.parametrize(
    ("sources", "limit", "message"),
    [
        (("print(3)", "raise ValueError('in the second')", "print(4)"), None, "ValueError: in the second"),
        (("import time", "time.sleep(600)"), 6, "stopped after 6 s"),
    ],
)
def test_a_failing_or_slow_cell_is_named_and_nothing_written(tmp_path: Path, sources, limit, message: str):
    path = notebook(tmp_path / "one.ipynb", *sources)
    before = path.read_bytes()
    error = run_notebooks.execute(path, write=True, **({} if limit is None else {"limit": limit})).error
    assert error is not None
    assert message in error
    assert sources[1] in error
    assert path.read_bytes() == before


def test_all_notebooks_are_found_experiments_last():
    found = [path.relative_to(ROOT / "notebooks").as_posix() for path in run_notebooks.find([])]
    assert found[0].startswith("01_")
    assert found[-1].startswith("experiments/")
    on_disk = {path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts}
    assert set(run_notebooks.find([])) == on_disk
