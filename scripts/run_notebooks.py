"""Execute every notebook of the repository from top to bottom; the first cell that fails is an error.

So is a notebook that takes longer than `--limit` seconds; an experiment may take three times that, as it measures. With
`--write` the new outputs are kept in the files, which is how the committed outputs are made. Otherwise nothing is
written, and cells whose text is not the committed one are named: another machine rounds differently, so that is no
error.
"""

import argparse
import base64
import io
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300.0
"""Seconds after which a notebook counts as hung; each takes less than a minute on an idle machine."""


class Result(NamedTuple):
    """One notebook's run."""

    seconds: float
    error: str | None
    changed: list[int]
    """Numbers of the cells whose text is another than before."""


def find(paths: list[Path]) -> list[Path]:
    """The given notebooks, or all of the repository's, experiments last."""
    folder = ROOT / "notebooks"
    return paths or [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("experiments/*.ipynb"))]


def text_of(cell: Any) -> str:
    """The text that a code cell printed and gave, without its pictures."""
    outputs = cell.get("outputs", [])
    return "".join(
        output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
        for output in outputs
        if "image/png" not in output.get("data", {}) and "image/svg+xml" not in output.get("data", {})
    )


def execute(path: Path, *, limit: float = LIMIT, write: bool = False) -> Result:
    """Run one notebook in its own folder, for at most ``limit`` seconds in all."""
    start = time.monotonic()
    notebook: Any = nbformat.read(path, as_version=4)
    before = [text_of(cell) for cell in notebook.cells]
    client = NotebookClient(
        notebook,
        timeout_func=lambda cell: max(1, round(start + limit - time.monotonic())),  # what is left for this cell
        kernel_name="python3",
        coalesce_streams=True,  # where one print ends and the next begins is a matter of chance
        resources={"metadata": {"path": str(path.resolve().parent)}},
        extra_arguments=["--log-level=ERROR"],  # else a note in every log that the local socket is not encrypted
    )
    error = None
    try:
        client.execute()
    except CellTimeoutError:
        error = f"stopped after {limit:g} s in this cell:\n{running(notebook)}"
    except CellExecutionError as failure:
        error = re.sub(r"\x1b\[[0-9;]*m", "", str(failure))  # colours of the traceback
    seconds = time.monotonic() - start
    if error is None and seconds > limit:
        error = f"{seconds:.1f} s, and {limit:g} s are allowed"
    changed = [at for at, (cell, text) in enumerate(zip(notebook.cells, before, strict=True)) if text_of(cell) != text]
    if write and error is None:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # timestamps: noise in a diff
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = shrink(output.data["image/png"])
        nbformat.write(notebook, path)
    return Result(seconds, error, changed)


def shrink(png: str) -> str:
    """The same picture with at most 128 colors, about a third as large; base64, as it comes."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA")
    small = io.BytesIO()
    picture.quantize(128, method=Image.Quantize.FASTOCTREE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def running(notebook: Any) -> str:
    """The source of the cell that ran last."""
    started = [cell for cell in notebook.cells if "iopub.execute_input" in cell.metadata.get("execution", {})]
    return started[-1].source if started else "(none had started)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/, experiments too")
    parser.add_argument("--write", action="store_true", help="keep the new outputs")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one notebook (default: %(default)g)")
    arguments = parser.parse_args()
    failed = False
    for path in find(arguments.notebooks):
        result = execute(path, limit=arguments.limit, write=arguments.write)
        note = f"; other text than committed in cells {result.changed}" if result.changed and not result.error else ""
        print(f"{'FAILED' if result.error else 'ok':6} {path.name} ({result.seconds:.0f} s){note}", flush=True)
        if result.error:
            failed = True
            print(result.error, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
