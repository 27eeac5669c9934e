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


def test_project_urls_name_one_repository(metadata: Message):
    urls = dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL", []))
    assert list(urls) == ["Documentation", "Source", "Issues", "Changelog"]
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    for url in urls.values():
        if url.startswith(BLOB):
            assert (ROOT / url.removeprefix(BLOB)).exists()


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
    command = [sys.executable, "-c", TRY_TO_IMPORT, "2.12.1+cpu", f"{floor}.0a0+git1"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    advice = f"muonfx needs torch {floor} or later, found torch 2.12.1+cpu: pip install --upgrade 'torch>={floor}'"
    assert said.splitlines() == [advice, "imported"]
