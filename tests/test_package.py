"""The package: its metadata, what `import muonfx` brings, and the environment in which its tests are collected."""

import importlib
import importlib.util
import re
from email import message_from_string
from email.message import Message
from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

import muonfx
from tests.processes import ROOT, run_python

REPOSITORY = "https://github.com/muonfx/muonfx"
BLOB, RAW = f"{REPOSITORY}/blob/main/", "https://raw.githubusercontent.com/muonfx/muonfx/main/"
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """The METADATA file of a wheel, as the build backend writes it."""
    for needed in ("hatchling", "hatch_fancy_pypi_readme"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed (make setup)")
    where = tmp_path_factory.mktemp("metadata")
    script = "import sys, hatchling.build as b; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    said = run_python("-c", script, where).stdout
    return message_from_string((where / said.split()[-1] / "METADATA").read_text(encoding="utf-8"))


def test_links_of_the_readme_are_absolute_and_lead_to_files_that_exist(metadata: Message):
    text = metadata.get_payload()
    assert isinstance(text, str)
    links = LINK.findall(text)
    assert len(links) == len(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) > 20
    assert not [link for link in links if not re.match("https?:|#", link)]
    for link in links:
        path = link.removeprefix(BLOB).removeprefix(RAW).partition("#")[0]
        assert path.startswith("http") or (ROOT / path).exists(), f"{link}: there is no {path}"
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)  # a page about a file, as `blob` shows, is not the file
    assert pictures
    assert all(picture.startswith(RAW) for picture in pictures)


TRY_TO_IMPORT = """
import sys, torch
for torch.__version__ in sys.argv[1:]:
    try:
        import muonfx
    except ImportError as error:
        print(error)
    else:
        print("imported")
"""


def test_an_older_torch_is_refused_at_import():
    floor = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]
    said = run_python("-c", TRY_TO_IMPORT, "2.9.1+cpu", f"{floor}.0a0+git1").stdout
    advice = f"muonfx needs torch {floor} or later, found torch 2.9.1+cpu: pip install --upgrade 'torch>={floor}'"
    assert said.splitlines() == [advice, "imported"]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_pages_name_the_versions_that_the_metadata_require():
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = {
        "Python": re.findall(r'requires-python = ">=([\d.]+)"', metadata)[0],
        "PyTorch": re.findall(r'"torch>=([\d.]+)"', metadata)[0],
    }
    named: list[tuple[str, str, str]] = []
    for page in PAGES:
        for package, version in re.findall(
            r"(Python|PyTorch) (\d+\.\d+) (?:or|and) later", page.read_text(encoding="utf-8")
        ):
            named.append((page.name, package, version))
    assert len(named) >= 8
    assert [(page, package, version) for page, package, version in named if version != required[package]] == []


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
    "muonfx.placement",
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
    new = run_python("-c", found).stdout.split()
    assert "muonfx" in new
    assert not HEAVY & set(new)


MODULES = ["checkpoint", "checkpoint.convert", "contrib", "core.checks", "core.schedules", "inspect", "plot", "polar"]
MODULES += ["routing", "sharding", "testing", "transforms.attention", "tree"]


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
    said = run_python("-c", code).stdout
    assert said == f"muonfx.{name} needs {needs}: pip install 'muonfx[{extra}]'\n"


def test_lazy_modules_come_when_they_are_used_and_other_names_do_not():
    assert muonfx.plot is importlib.import_module("muonfx.plot")
    assert muonfx.testing is importlib.import_module("muonfx.testing")
    with pytest.raises(AttributeError, match="module 'muonfx' has no attribute 'plots'"):
        _ = muonfx.plots  # pyright: ignore[reportAttributeAccessIssue]


# Collects as if the packages in sys.argv were not installed.
COLLECT = """
import sys
from importlib.machinery import PathFinder

import pytest

hidden = set(sys.argv[1:])


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "pytest_timeout", "-p", "no:cacheprovider"]))
"""


@pytest.mark.slow
def test_no_collected_module_imports_a_package_outside_the_extra_dev():
    pins = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "requirements").glob("*.txt"))
    engines = set(map(canonicalize_name, re.findall(r"^([\w-]+)==", pins, re.MULTILINE)))
    assert len(engines) > 15
    hidden = [
        package
        for package, distributions in packages_distributions().items()
        if package.isidentifier() and engines & set(map(canonicalize_name, distributions))
    ]
    run_python("-c", COLLECT, *hidden, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
