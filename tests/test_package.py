"""The package: its metadata, what `import muonfx` brings, and the environment in which its tests are collected."""

import importlib
import importlib.util
import inspect
import re
from email import message_from_string
from email.message import Message
from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

import muonfx
from tests.processes import ROOT, run_python
from tests.public import NAMES

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
    script = (
        "import sys, hatchling.build as b; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
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
    # A page about a file, as `blob` shows, is not the file.
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)
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
    floor = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        0
    ]
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
    assert [
        (page, package, version) for page, package, version in named if version != required[package]
    ] == []


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


MODULES = [
    "checkpoint",
    "checkpoint.convert",
    "contrib",
    "core.checks",
    "core.schedules",
    "inspect",
    "plot",
    "polar",
]
MODULES += ["routing", "sharding", "testing", "transforms.attention", "tree"]


@pytest.mark.parametrize("name", ["muonfx", *(f"muonfx.{name}" for name in MODULES)])
def test_dir_shows_public_names_only(name: str):
    module = importlib.import_module(name)
    lazy = {"plot", "testing"} if name == "muonfx" else set[str]()  # not for `from muonfx import *`
    assert set(dir(module)) - {"__version__"} == set(module.__all__) | lazy
    assert all(hasattr(module, shown) for shown in dir(module))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "extra"),
    [("plot", "matplotlib", "examples"), ("testing", "hypothesis", "testing")],
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


RECORDED = (int, float, str, tuple, muonfx.Transform)
"""The types of the defaults in `DEFAULTS`, except the default "auto"."""
DEFAULTS = """
Muon(lr=0.002, weight_decay=0.1, momentum=0.95, orthogonalize=orthogonalize(), lr_scaling='match_rms_adamw',
    betas=(0.9, 0.95), donate_grads=False)
accumulate(mean=True)
adamw(learning_rate=0.001, b1=0.9, b2=0.999, eps=1e-08, nesterov=False, weight_decay=0.01)
add_decayed_weights(weight_decay=0.0, cautious=False)
apply_updates(donate=False)
cautious(min_share=0.001)
cosine_decay_schedule(end=0.0)
default_labels(rules=(), muon='muon', other='adamw', roles=False)
ema_nesterov(decay=0.99, lookahead=0.5)
ema_params(decay=0.999)
floor_by_weight_norms(floor=0.35)
fp8(block=2048, format='e4m3', min_size=4096, stochastic=False, seed=0)
int8(block=2048, code='linear', min_size=4096, stochastic=False, seed=0)
leafwise(locality=<Locality.ELEMENT: 0>, reads_params=False)
lion(learning_rate=0.0001, b1=0.9, b2=0.99, weight_decay=0.0)
matrixwise(reads_params=False)
momentum(decay=0.95, nesterov=True, debias=False, heavy_ball=False)
monitor(name='updates', metrics=('norm', 'rms'), by_leaf=False)
muon(learning_rate=0.002, decay=0.95, nesterov=True, orthogonalize=orthogonalize(), lr_scaling='match_rms_adamw',
    weight_decay=0.0)
muon_with_adamw(learning_rate=0.002, decay=0.95, orthogonalize=orthogonalize(), lr_scaling='match_rms_adamw',
    weight_decay=0.1, adam=scale_by_adam(b2=0.95), adamw_weight_decay=0.1)
muonclip(learning_rate=0.002, tau=100.0, alpha=0.5)
normalize_neurons(decay=0.95, eps=1e-08, axis='rows')
normuon(learning_rate=0.002, decay=0.95, neuron_decay=0.95, orthogonalize=orthogonalize(), weight_decay=0.0)
orthogonalize(coefficients='polar_express_5')
qk_clip(tau=100.0, alpha=0.5)
radial_brake(outward=0.5, inward=1.0)
reduce_on_plateau(factor=0.1, patience=10, rtol=0.0001, atol=0.0, cooldown=0, min_scale=0.0)
sam(rho=0.05, adaptive=False)
sam_gradient(has_aux=False)
scale_by_adam(b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, nesterov=False)
scale_by_dion(rank=768, decay=0.95)
scale_by_dion2(shrink=4, decay=0.95, coefficients='polar_express_5')
scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=128, eps=1e-30)
scale_by_lion(b1=0.9, b2=0.99)
scale_by_namo(b1=0.95, b2=0.99, eps=1e-08)
scale_by_prodigy(learning_rate=1.0, b1=0.9, b2=0.999, eps=1e-08, estim_lr0=1e-06, estim_lr_coef=1.0, weight_decay=0.0,
    safeguard_warmup=False)
scale_by_rms(decay=0.9, eps=1e-08, eps_in_sqrt=True, debias=False)
scale_by_shampoo(b2=0.95, damping=0.0001, refresh=1)
scale_by_shape(lr_scaling='match_rms_adamw')
scale_by_soap(b1=0.95, b2=0.95, eps=1e-08, factors='shampoo', refresh=1, max_precondition_size=10000)
schedule_free(b1=0.9, weight_lr_power=2.0)
scion(learning_rate=0.000244140625, decay=0.9, constrained=True, orthogonalize=orthogonalize())
stateless(locality=<Locality.TREE: 3>)
study(vmap=True, progress=True)
subtract_decayed_weights(weight_decay=0.0, cautious=False)
warmup_cosine_decay_schedule(start=0.0, end=0.0)
warmup_stable_decay_schedule(start=0.0, end=0.0)
"""


def test_a_default_changes_only_with_this_table_and_the_changelog():
    signatures: list[str] = []
    for name, function in sorted(NAMES.items()):
        if not inspect.isfunction(function) and function is not muonfx.Muon:
            continue
        defaults: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            if isinstance(parameter.default, RECORDED) and parameter.default != "auto":
                defaults.append(f"{parameter.name}={parameter.default!r}")
        if defaults:
            signatures.append(f"{name}({', '.join(defaults)})")
    assert " ".join(signatures).split() == DEFAULTS.split()


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
    pins = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "requirements").glob("*.txt")
    )
    engines = set(map(canonicalize_name, re.findall(r"^([\w-]+)==", pins, re.MULTILINE)))
    assert len(engines) > 15
    hidden = [
        package
        for package, distributions in packages_distributions().items()
        if package.isidentifier() and engines & set(map(canonicalize_name, distributions))
    ]
    run_python("-c", COLLECT, *hidden, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
