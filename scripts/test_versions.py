"""Run the core tests on the oldest supported torch and on the newest, and write the results to docs/tested-versions.md.

Run it with ``make test-versions``; ``PYTHON=python3.13`` selects the Python. Each torch has a virtual environment in
build/versions/, which is kept. If the package index has only GPU builds of torch, each downloads about 3 GB. Options
are passed to pytest, except ``--torch 2.11.0``, which selects one release.
"""

import argparse
import datetime
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tested-versions.md"
TESTS = [
    *(
        "core",
        "polar",
        "optimizer",
        "placement",
        "sharding",
        "transforms",
        "routing",
        "trajectories",
    ),
    *(
        "checkpoint/test_round_trip.py",
        "test_core.py",
        "test_wrong_arguments.py",
        "test_chain_algebra.py",
    ),
]
PACKAGES = ["numpy", "pytest>=9", "pytest-timeout", "pytest-xdist"]


def oldest_torch() -> str:
    """Return the lower bound of torch in pyproject.toml, for example ``2.10``."""
    return re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        0
    ]


def installed_python(requirement: str) -> Path:
    """Install ``requirement``, a release of torch, into a virtual environment of its own, and return its Python."""
    python_version = ".".join(platform.python_version_tuple()[:2])
    folder = ROOT / "build" / "versions" / f"python{python_version}-{requirement.replace('==', '')}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--upgrade",
        "-e",
        ".[examples,testing]",
        requirement,
        *PACKAGES,
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return python


def build_of(python: Path) -> str:
    """Return the build of torch in an environment, for example ``2.10.0+cu128``."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_tests(python: Path, options: list[str]) -> tuple[bool, str]:
    """Run the tests; return True if they passed, and the counts of pytest's last line."""
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--timeout",
        "600",
        "-m",
        "not slow and not engines",
        *options,
    ]
    command += [f"tests/{test}" for test in TESTS]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last_line = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last_line = line.strip() or last_line
    return process.wait() == 0, counts(last_line)


def counts(last_line: str) -> str:
    """Return the counts of pytest's last line, without the time.

    >>> counts("= 2 failed, 3487 passed, 12 skipped in 301.20s (0:05:01) =")
    '2 failed, 3487 passed, 12 skipped'
    """
    return last_line.strip("= ").partition(" in ")[0]


def with_row(page: str, python_version: str, build: str, result: str, date: str) -> str:
    r"""Return the page with the row of a Python and a build of torch added to its first table, or replaced there.

    >>> page = ["| Python |", "| --- |", "", "| engine |"]
    >>> with_row("\n".join(page), "3.11.7", "2.10.0", "3 passed", "2026-11-28").splitlines()[1:4]
    ['| --- |', '| 3.11.7 | 2.10.0 | 2026-11-28 | 3 passed |', '']
    """
    first_cells = f"| {python_version} | {build} |"
    row = f"{first_cells} {date} | {result} |"
    lines = [line for line in page.splitlines() if not line.startswith(first_cells)]
    header = next(index for index, line in enumerate(lines) if line.startswith("|"))
    after_table = lines.index("", header) if "" in lines[header:] else len(lines)
    lines.insert(after_table, row)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Test each release, write a row for each to the page, and exit with an error if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch", help="one release, such as 2.11.0; default: the oldest supported and the newest"
    )
    options, pytest_options = parser.parse_known_args()
    releases = (
        [f"torch=={options.torch}"] if options.torch else [f"torch=={oldest_torch()}.0", "torch"]
    )
    all_passed = True
    for requirement in releases:
        python = installed_python(requirement)
        build = build_of(python)
        print(f"=== Python {platform.python_version()}, torch {build}", flush=True)
        passed, result = run_tests(python, pytest_options)
        today = datetime.date.today().isoformat()
        page = with_row(
            PAGE.read_text(encoding="utf-8"), platform.python_version(), build, result, today
        )
        PAGE.write_text(page, encoding="utf-8")
        all_passed = all_passed and passed
    sys.exit(not all_passed)


if __name__ == "__main__":
    main()
