"""The package's metadata: what a package index shows of it leads somewhere."""

import importlib.util
import re
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
    ran = subprocess.run(
        [sys.executable, "-c", script, str(where)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return message_from_string((where / ran.stdout.split()[-1] / "METADATA").read_text(encoding="utf-8"))


def test_the_readme_of_the_metadata_has_absolute_links_only(metadata: Message):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str)
    links = LINK.findall(text)
    assert len(links) == len(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) > 25
    assert not [link for link in links if not re.match("https?:|#", link)]


def test_links_into_the_repository_lead_to_files_that_exist(metadata: Message):
    text = metadata.get_payload()
    assert isinstance(text, str)
    inside = [link for link in LINK.findall(text) if link.startswith((BLOB, RAW))]
    assert len(inside) > 15
    for link in inside:
        path = link.removeprefix(BLOB).removeprefix(RAW).partition("#")[0]
        assert (ROOT / path).exists(), f"{link}: there is no {path}"


def test_a_picture_is_taken_raw(metadata: Message):
    """A page about a file is not the file: `blob` shows a page."""
    text = metadata.get_payload()
    assert isinstance(text, str)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)
    assert pictures
    assert all(picture.startswith(RAW) for picture in pictures)


def test_project_urls_name_one_repository(metadata: Message):
    urls = dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL", []))
    assert list(urls) == ["Documentation", "Source", "Issues", "Changelog"]
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    for url in urls.values():
        if url.startswith(BLOB):
            assert (ROOT / url.removeprefix(BLOB)).exists()


def test_an_older_torch_is_refused_at_import():
    found = "2.12.1+cpu"
    floor = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]
    code = f"import torch; torch.__version__ = '{found}'; import muonfx"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    advice = f"pip install --upgrade 'torch>={floor}'"
    said = f"ImportError: muonfx needs torch {floor} or later, found torch {found}: {advice}"
    assert ran.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("version", ["{floor}.0a0+git1234567", "3.0.0"])
def test_the_oldest_torch_and_all_later_ones_are_accepted(version: str):
    floor = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]
    code = f"import torch; torch.__version__ = '{version.format(floor=floor)}'; import muonfx"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
