"""No number depends on a clock: the modules that read one are listed, with the reason."""

import ast
from pathlib import Path

import muonfx

ALLOWED = {
    "checkpoint/distributed.py": "a pause before a replaced checkpoint is read again",
}
CLOCKS = {"time", "timeit", "datetime", "sched"}
ROOT = Path(muonfx.__file__).parent


def reads_a_clock(tree: ast.AST) -> bool:
    """True if a module imports a clock, times events of a device or lets Triton time kernels."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and {name.name.partition(".")[0] for name in node.names} & CLOCKS:
            return True
        if isinstance(node, ast.ImportFrom) and node.module in CLOCKS:
            return {name.name for name in node.names} != {"timedelta"}
        if isinstance(node, ast.Attribute) and node.attr in ("elapsed_time", "autotune", "do_bench"):
            return True
    return False


def test_only_the_listed_modules_read_a_clock():
    found = {
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if reads_a_clock(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)
