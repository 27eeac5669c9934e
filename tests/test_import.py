"""``import muonfx``: what comes with it, and what its modules show to an editor or a notebook that completes names."""

import importlib
import subprocess
import sys

import pytest

import muonfx

# Parts of torch and others that take longer to import than all of the package, or are not needed by most who import it.
HEAVY = {
    "argparse",
    "hypothesis",
    "matplotlib",
    "muonfx.checkpoint",
    "muonfx.contrib",
    "muonfx.engines",
    "muonfx.optimizer",
    "muonfx.plot",
    "muonfx.program",
    "muonfx.sharding",
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


MODULES = ["checkpoint", "checkpoint.convert", "contrib", "core.checks", "core.schedules", "inspect", "plot", "polar"]
MODULES += ["select", "sharding", "testing", "transforms.attention", "tree"]


@pytest.mark.parametrize("name", ["muonfx", *(f"muonfx.{name}" for name in MODULES)])
def test_dir_shows_public_names_only(name: str):
    module = importlib.import_module(name)
    lazy = {"plot", "testing"} if name == "muonfx" else set[str]()  # not for `from muonfx import *`
    assert set(dir(module)) - {"__version__"} == set(module.__all__) | lazy
    assert all(hasattr(module, shown) for shown in dir(module))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "extra"), [("plot", "matplotlib", "examples"), ("testing", "hypothesis", "testing")]
)
def test_a_lazy_module_without_its_extra_says_what_to_install(name: str, needs: str, extra: str):
    code = f"""
import sys
sys.modules[{needs!r}] = None  # as if it were not installed
import muonfx
try:
    muonfx.{name}
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"muonfx.{name} needs {needs}: pip install 'muonfx[{extra}]'\n"


def test_lazy_modules_come_when_they_are_used_and_other_names_do_not():
    assert muonfx.plot is importlib.import_module("muonfx.plot")
    assert muonfx.testing is importlib.import_module("muonfx.testing")
    with pytest.raises(AttributeError, match="module 'muonfx' has no attribute 'plots'"):
        _ = muonfx.plots  # pyright: ignore[reportAttributeAccessIssue]
