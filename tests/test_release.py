"""A release: the wheel, the sdist, the workflows that build and publish them, and the files about the project."""

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import muonfx
from tests.processes import ROOT
from tests.test_docs import Block, blocks

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
ISSUE_FORMS = sorted(
    path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"
)
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read_yaml(path: Path) -> Any:
    """The contents of a YAML file. Without a timestamp or a key that YAML 1.1 would read as a bool, such as ``on``."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


# ------------------------------------------------------------------------------------------------------ workflows


def make_targets() -> set[str]:
    """The targets of the Makefile that have a description."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))


def commands_of(workflow: Any) -> list[str]:
    """All shell commands of a workflow."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_a_trigger_least_rights_and_commands_that_exist(path: Path):
    workflow = read_yaml(path)
    assert workflow["on"]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"].startswith("ubuntu-")
        assert all("uses" in step or "run" in step for step in job["steps"])
    for command in commands_of(workflow):
        program, *arguments = command.split()
        if program == "make":
            assert arguments[0] in make_targets(), command
        elif program != "test":
            assert (ROOT / program).stat().st_mode & 0o100, (
                f"{command}: {program} is not an executable file"
            )


def test_the_workflows_run_all_checks_both_torches_and_the_release():
    names = [path.stem for path in WORKFLOWS]
    assert names == ["ci", "publish", "versions"]
    ci, publish, versions = map(read_yaml, WORKFLOWS)
    assert set(ci["on"]) == {"push", "pull_request"}
    assert commands_of(ci) == [".ci/run"]
    assert "schedule" in versions["on"]
    assert commands_of(versions) == ["make test-versions"]
    assert publish["on"]["push"]["tags"] == ["v*"]
    assert commands_of(publish)[:2] == [".ci/run", "make dist"]


def test_publishing_needs_no_token():
    job = read_yaml(GITHUB / "workflows" / "publish.yml")["jobs"]["publish"]
    assert job["permissions"] == {"id-token": "write"}
    assert job["environment"]
    assert "secrets." not in (GITHUB / "workflows" / "publish.yml").read_text(encoding="utf-8")


def test_the_weekly_workflow_covers_every_python_that_the_classifiers_name():
    classifiers = METADATA["project"]["classifiers"]
    named = [line.rpartition(" :: ")[2] for line in classifiers if re.search(r":: 3\.\d+$", line)]
    matrix = read_yaml(GITHUB / "workflows" / "versions.yml")["jobs"]["run"]["strategy"]["matrix"]
    assert matrix["python"] == named
    tested = (ROOT / "docs" / "tested-versions.md").read_text(encoding="utf-8")
    assert [version for version in named if f"| {version}" not in tested] == []


# -------------------------------------------------------------------------------------------------- issues and pages


@pytest.mark.parametrize("path", ISSUE_FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_fields_that_github_accepts(path: Path):
    form = read_yaml(path)
    assert form["name"]
    assert form["description"]
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown")
        assert field["attributes"]["label"]
        assert ("options" in field["attributes"]) == (field["type"] == "dropdown")


def test_the_command_that_forms_ask_for_prints_the_versions():
    shown = read_yaml(GITHUB / "ISSUE_TEMPLATE" / "wrong-update.yml")["body"][-2:]
    command = re.findall(r'`python -c "(.*)"`', str(shown))[0]
    printed = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert printed.stdout.startswith(f"{muonfx.__version__} 2.")


@pytest.mark.parametrize(
    "name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "LICENSE", "CHANGELOG.md"]
)
def test_a_file_that_strangers_look_for_is_at_the_root(name: str):
    assert len((ROOT / name).read_text(encoding="utf-8")) > 400


def test_the_citation_is_of_this_version():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == muonfx.__version__
    assert citation["license"] == METADATA["project"]["license"]
    assert citation["repository-code"] == METADATA["project"]["urls"]["Source"]


def test_the_hosted_site_is_built_from_extras_that_exist():
    configuration = read_yaml(ROOT / ".readthedocs.yaml")
    (command,) = configuration["build"]["jobs"]["install"]
    extras = re.findall(r"\.\[(.*)\]", command)[0].split(",")
    assert set(extras) <= set(METADATA["project"]["optional-dependencies"])
    assert (ROOT / configuration["sphinx"]["configuration"]).exists()
    assert (ROOT / "constraints.txt").exists()


def test_the_changelog_has_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(muonfx.__version__)}\]", changelog, re.MULTILINE)


# ------------------------------------------------------------------------------------------------ the wheel, the sdist


def run(*words: object, cwd: Path) -> str:
    """Run a command in a folder, require that it succeeds, and return its output."""
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    pytest.importorskip("hatchling", reason="hatchling is not installed (make setup)")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new virtual environment with the wheel, and with the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    site_packages = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
        ).strip()
    )
    # A folder named in a .pth file is searched last. No .pth file inside it is read, so this checkout is not found.
    dependencies = Path(pytest.__file__).parent.parent
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")
    return python


PRINT_THE_FILE = "import muonfx; print(muonfx.__file__, muonfx.__version__)"


@pytest.mark.slow
def test_the_readme_runs_on_the_installed_wheel_in_an_empty_folder(installed: Path, tmp_path: Path):
    place, version = run(installed, "-c", PRINT_THE_FILE, cwd=tmp_path).split()
    assert Path(place).is_relative_to(installed.parent.parent)
    assert version == muonfx.__version__

    readme = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    for number, block in enumerate(readme):
        _run_block(installed, block, tmp_path / f"block_{number}")
    assert len(readme) >= 2


def _run_block(python: Path, block: Block, path: Path) -> None:
    """Run a block of a page as a script, or as a doctest if it is a session."""
    path.write_text(block.text, encoding="utf-8")
    if block.is_session:
        options = ["-o", "NORMALIZE_WHITESPACE", "-o", "ELLIPSIS"]
        run(python, "-m", "doctest", *options, path, cwd=path.parent)
    else:
        run(python, path, cwd=path.parent)


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel_and_trains(dist: Path, installed: Path, tmp_path: Path):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()

    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        tmp_path / "again",
        cwd=source,
    )
    (wheel,), (wheel_again,) = dist.glob("*.whl"), (tmp_path / "again").glob("*.whl")
    assert zipfile.ZipFile(wheel_again).namelist() == zipfile.ZipFile(wheel).namelist()

    run(
        installed,
        "examples/train_gpt.py",
        "--quick",
        "--steps",
        "2",
        "--out",
        tmp_path / "runs",
        cwd=source,
    )
    assert list((tmp_path / "runs").rglob("*.png"))


def test_the_wheel_has_the_package_its_types_and_no_file_of_a_tool(dist: Path):
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "muonfx/py.typed" in names
    folders = {name.split("/")[0] for name in names}
    assert folders == {"muonfx", f"muonfx-{muonfx.__version__}.dist-info"}
    kinds = {Path(name).suffix for name in names if name.startswith("muonfx/")}
    assert kinds <= {".py", ".typed", ".mplstyle", ".json"}
