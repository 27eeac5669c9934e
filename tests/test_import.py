"""``import muonfx``: what comes with it, and what its modules show to an editor or a notebook that completes names."""

import importlib
import subprocess
import sys

import pytest

# Parts of torch and others that take longer to import than all of the package, or are not needed by most who import it.
HEAVY = {
    "argparse",
    "hypothesis",
    "matplotlib",
    "muonfx.checkpoint.convert.cli",
    "muonfx.testing",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.fx.experimental.proxy_tensor",
    "triton",
}


def test_nothing_heavy_is_imported_with_the_package():
    found = "import sys, torch; before = set(sys.modules); import muonfx; print(*(set(sys.modules) - before))"
    new = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True).stdout.split()
    assert "muonfx" in new
    assert not HEAVY & set(new)


MODULES = ["attention", "checkpoint", "checkpoint.convert", "checks", "polar", "schedules", "select", "sharding"]


@pytest.mark.parametrize("name", ["muonfx", *(f"muonfx.{name}" for name in [*MODULES, "testing", "tree"])])
def test_dir_shows_public_names_only(name: str):
    module = importlib.import_module(name)
    assert set(dir(module)) - {"__version__"} == set(module.__all__)
    assert all(hasattr(module, shown) for shown in dir(module))
