"""Execute every notebook of the repository from top to bottom. A cell that fails is an error.

A notebook that takes longer than `--limit` seconds is an error too. `--write` saves the new outputs, as for the
committed files. Without it nothing is written, and cells with a changed text are listed. A changed text is not an
error, because other machines round differently. `--workers` runs several notebooks at a time. Cells that measure times
are then not comparable, so `--write` runs one at a time.
"""

import argparse
import base64
import functools
import io
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300.0
"""Time limit for a notebook in seconds; each takes less than a minute on an idle machine."""


class Result(NamedTuple):
    """Result of running one notebook."""

    seconds: float
    error: str | None
    changed: list[int]
    """Numbers of the cells with a changed text."""


def find(paths: list[Path]) -> list[Path]:
    """Return the given notebooks, or all notebooks of the repository with experiments last."""
    folder = ROOT / "notebooks"
    return paths or [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("experiments/*.ipynb"))]


def text_of(cell: Any) -> str:
    """Return the text output of a code cell, without pictures."""
    outputs = cell.get("outputs", [])
    return "".join(
        output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
        for output in outputs
        if "image/png" not in output.get("data", {})
        and "image/svg+xml" not in output.get("data", {})
    )


def execute(path: Path, *, limit: float = LIMIT, write: bool = False) -> Result:
    """Run one notebook in its own folder for at most ``limit`` seconds in total."""
    start = time.monotonic()
    notebook: Any = nbformat.read(path, as_version=4)
    before = [text_of(cell) for cell in notebook.cells]
    client = NotebookClient(
        notebook,
        # Time left for this cell.
        timeout_func=lambda cell: max(1, round(start + limit - time.monotonic())),
        kernel_name="python3",
        coalesce_streams=True,  # the split of output into messages is random
        resources={"metadata": {"path": str(path.resolve().parent)}},
        extra_arguments=["--log-level=ERROR"],  # hides a warning about the local socket
    )
    error = None
    try:
        client.execute()
    except CellTimeoutError:
        error = f"stopped after {limit:g} s in this cell:\n{running(notebook)}"
    except CellExecutionError as failure:
        error = re.sub(r"\x1b\[[0-9;]*m", "", str(failure))  # remove colours
    seconds = time.monotonic() - start
    if error is None and seconds > limit:
        error = f"took {seconds:.1f} s, expected at most {limit:g} s (--limit)"
    changed = [
        at
        for at, (cell, text) in enumerate(zip(notebook.cells, before, strict=True))
        if text_of(cell) != text
    ]
    if write and error is None:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # timestamps: noise in a diff
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = shrink(output.data["image/png"])
        nbformat.write(notebook, path)
    return Result(seconds, error, changed)


def shrink(png: str) -> str:
    """Reduce a base64 picture to at most 128 colors, about a third of its size."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA")
    small = io.BytesIO()
    picture.quantize(128, method=Image.Quantize.FASTOCTREE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def running(notebook: Any) -> str:
    """Return the source of the last cell that started."""
    started = [
        cell
        for cell in notebook.cells
        if "iopub.execute_input" in cell.metadata.get("execution", {})
    ]
    return started[-1].source if started else "(none had started)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "notebooks",
        nargs="*",
        type=Path,
        help="notebooks to run; default: all in notebooks/ and its experiments",
    )
    parser.add_argument("--write", action="store_true", help="save the new outputs")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help="time limit for one notebook in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="how many notebooks run at a time (default: 1)"
    )
    arguments = parser.parse_args()
    failed = False
    paths = find(arguments.notebooks)
    run = functools.partial(execute, limit=arguments.limit, write=arguments.write)
    with ThreadPoolExecutor(1 if arguments.write else arguments.workers) as pool:
        for path, result in zip(paths, pool.map(run, paths), strict=True):
            note = (
                f"; changed text in cells {result.changed}"
                if result.changed and not result.error
                else ""
            )
            print(
                f"{'FAILED' if result.error else 'ok':6} {path.name} ({result.seconds:.0f} s){note}",
                flush=True,
            )
            if result.error:
                failed = True
                print(result.error, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
