"""Run the tests of the core on the oldest torch that muonfx accepts and on the newest, each in its own environment.

``make test-versions`` starts it; ``PYTHON=python3.13`` chooses the Python. The environments are kept in
build/versions/. A package index may offer only GPU builds of these torch versions: about 3 GB to download for each.
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
    """The lower bound of torch in pyproject.toml, as ``2.13``."""
    return re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]


def tests_pass(name: str, torch: str) -> bool:
    """Install a torch release into the environment of that name and run the tests there."""
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
