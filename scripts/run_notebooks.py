"""Execute every notebook of the repository from top to bottom; the first cell that fails is an error.

With `--write` the new outputs are kept in the files, which is how the committed outputs are made. Otherwise nothing is
written.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent


def find(paths: list[Path]) -> list[Path]:
    return paths or sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path, *, write: bool) -> str | None:
    """Run one notebook in its own folder; give the error's text, or None."""
    notebook: Any = nbformat.read(path, as_version=4)
    folder = str(path.resolve().parent)
    try:
        NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],  # else a note in every log that the local socket is not encrypted
        ).execute()
    except CellExecutionError as error:
        return str(error)
    if write:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # timestamps: noise in a diff
        nbformat.write(notebook, path)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/")
    parser.add_argument("--write", action="store_true", help="keep the new outputs")
    arguments = parser.parse_args()
    failed = False
    for path in find(arguments.notebooks):
        start = time.perf_counter()
        error = execute(path, write=arguments.write)
        print(f"{'FAILED' if error else 'ok':6} {path.name} ({time.perf_counter() - start:.0f} s)", flush=True)
        if error:
            failed = True
            print(error, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
