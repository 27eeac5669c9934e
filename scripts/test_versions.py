"""Run the core tests on the oldest supported torch and on the newest, each in a separate virtual environment.

Run it with ``make test-versions``; ``PYTHON=python3.13`` selects the Python. The environments are kept in
build/versions/. If the package index has only GPU builds of torch, each downloads about 3 GB.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    *("core", "optimizer", "polar", "program", "test_core.py", "test_wrong_arguments.py", "test_chain_algebra.py"),
    *("checkpoint/test_round_trip.py", "sharding/test_law.py"),
]


def oldest_torch() -> str:
    """Return the lower bound of torch in pyproject.toml, for example ``2.13``."""
    return re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]


def tests_pass(name: str, torch: str) -> bool:
    """Install a torch release into the virtual environment ``name``, run the tests there, return True if they pass."""
    folder = ROOT / "build" / "versions" / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    packages = ["-e", ".[testing]", torch, "numpy", "pytest>=9", "pytest-timeout", "pytest-xdist"]
    subprocess.run([python, "-m", "pip", "install", "-q", "--upgrade", *packages], cwd=ROOT, check=True)
    show = "import platform, torch; print('===', 'Python', platform.python_version(), 'torch', torch.__version__)"
    subprocess.run([python, "-c", show], check=True)
    command = [python, "-m", "pytest", "-q", "-n", "2", "--timeout", "600", "-m", "not slow", *sys.argv[1:]]
    return subprocess.run([*command, *(f"tests/{test}" for test in TESTS)], cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    passed = [tests_pass("oldest", f"torch=={oldest_torch()}.0"), tests_pass("newest", "torch")]
    sys.exit(not all(passed))
