"""Tests are collected in the environment that `make test` makes: with the packages of the extra `dev` and no others."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

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


def installed_by(extra: str) -> set[str]:
    """The distributions that an extra of this project installs, with all of their own requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = project["optional-dependencies"]
    todo = [Requirement(line) for line in [*project["dependencies"], *own[extra]]]
    found: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for chosen in {"", *requirement.extras} - {chosen for seen, chosen in found if seen == name}:
            found.add((name, chosen))
            if name == "muonfx":
                todo += [Requirement(line) for line in own.get(chosen, [])]
                continue
            try:
                lines = requires(name) or []
            except PackageNotFoundError:  # for another platform
                continue
            needed = [Requirement(line) for line in lines]
            todo += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": chosen})]
    return {name for name, _ in found}


@pytest.mark.slow
def test_no_collected_module_imports_a_package_outside_the_extra_dev():
    installed = installed_by("dev")
    hidden = [
        package
        for package, distributions in packages_distributions().items()
        if package.isidentifier() and not installed & set(map(canonicalize_name, distributions))
    ]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", COLLECT, *hidden]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
