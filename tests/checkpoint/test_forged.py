"""Files made to do harm: an error of ours, soon, that names the file; never a wait, never much memory."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import MismatchError
from muonfx.checkpoint.index import INDEX, LONGEST
from tests.checkpoint.test_damage import signed

ck = mfx.checkpoint
STATE = {"trace": {"w": torch.randn(6, 4), "b": torch.randn(3)}}
ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: a wait there is a time-out here, and large memory an error, not the machine's end.
PROGRAM = """
import resource, sys, torch, muonfx as mfx
from pathlib import Path
room = 3 << 30
resource.setrlimit(resource.RLIMIT_DATA, (room, room))
ck, paths = mfx.checkpoint, [Path(path) for path in sys.argv[1:]]
state = {"trace": {"w": torch.zeros(6, 4), "b": torch.zeros(3)}}
acts = [ck.inspect, ck.verify, ck.read, lambda path: ck.load(path, like=state)]
for path in paths:
    for act in acts:
        try:
            act(path)
        except ck.CorruptError as error:
            assert str(path) in str(error), error
            print(str(error).replace(str(path), "PATH")[:300])
        except ck.CheckpointError as error:
            print(type(error).__name__)
        else:
            print("fine")
    print("=")
import warnings
warnings.simplefilter("ignore")
folder = paths[0].parent.parent / "folder"
print(ck.latest(folder), len(ck.prune(folder, 1)), len(ck.checkpoints(folder)))
"""


def good_one(folder: Path, number: int) -> Path:
    return ck.save(ck.step_path(folder, number), STATE, step=number, extra={"seed": 1})


def sign(path: Path, change: Callable[[Any], Any]) -> None:
    body = json.loads((path / INDEX).read_bytes())["index"]
    (path / INDEX).write_bytes(signed(change(body) or body))


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def sparse(size: int, begin: bytes = b"") -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, size)

    return make


def listen(path: Path) -> None:
    at = os.open(path.parent, os.O_RDONLY)  # the path itself may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{at}/{path.name}")
    finally:
        os.close(at)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": listen,
    "a folder": Path.mkdir,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
}
INDEXES: dict[str, Callable[[Path], object]] = {
    "8 GB of nothing": sparse(8 << 30),
    "8 GB behind a beginning": sparse(8 << 30, b'{"sha256": "'),
    "as large as may be": sparse(LONGEST - 1, b'{"sha256": "'),
    "empty": lambda path: path.touch(),
    "no UTF-8": lambda path: path.write_bytes(signed("\xff\xfe").replace(b"\xc3", b"\xff")),
}


def too_large(body: Any) -> None:
    """A header of 50 GB."""
    body["files"][0].update(nbytes=50 << 30, header_nbytes=(50 << 30) - 108)
    for leaf, begin in zip(body["leaves"].values(), (12, 0), strict=True):
        leaf["chunks"][0]["begin"] = (50 << 30) - 108 + begin


def leaf(body: Any) -> Any:
    return body["leaves"]["trace/w"]


EDITS: dict[str, Callable[[Any], Any]] = {
    "a header of 50 GB": too_large,
    "a leaf of 2^70 elements": lambda body: leaf(body).update(shape=[2**35, 2**35]),
    "a shape whose product overflows": lambda body: leaf(body).update(shape=[2**32, 2**32, 0, 2**63 - 1]),
    "a shape of a million dims": lambda body: leaf(body).update(shape=[1] * 10**6),
    "a shape of 100 dims": lambda body: (
        leaf(body).update(shape=[24] + [1] * 99),
        leaf(body)["chunks"][0].update(offsets=[0] * 100, sizes=[24] + [1] * 99),
    )[0],
    "two leaves of the same bytes": lambda body: body["leaves"].update(copy=leaf(body)),
    "a leaf beyond the file": lambda body: leaf(body)["chunks"][0].update(begin=2**62),
    "a leaf before the leaves": lambda body: leaf(body)["chunks"][0].update(begin=0),
    "a number of 5000 digits": lambda body: json.dumps(body).replace('"seed": 1', f'"seed": {"7" * 5000}'),
    "a step of 4000 digits": lambda body: body.update(step=int("7" * 4000)),
    "a name twice": lambda body: json.dumps(body).replace('"trace/b"', '"trace/w"'),
    "a depth of 100,000": lambda body: json.dumps(body).replace('"seed": 1', f'"seed": {"[" * 10**5}{"]" * 10**5}'),
    "a file elsewhere": lambda body: body["files"][0].update(name="../../x.safetensors"),
    "a file with a null": lambda body: body["files"][0].update(name="x\0.safetensors"),
    "a name of a megabyte": lambda body: body["files"][0].update(name="x" * 10**6 + ".safetensors"),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sockets, devices and limits of Linux")
def test_forged_files_end_in_an_error_of_ours_in_bounded_time_and_memory(tmp_path: Path):
    whole = good_one(tmp_path / "folder", 0)
    for number, make in enumerate(NO_FILES.values(), 1):
        replace(good_one(tmp_path / "folder", number) / INDEX, make)
    made: list[tuple[str, Path]] = []

    def another(what: str) -> Path:
        made.append((what, good_one(tmp_path / str(len(made)), 1)))
        return made[-1][1]

    for what, make in {**NO_FILES, **INDEXES}.items():
        replace(another(f"{what} as index") / INDEX, make)
    for what, make in NO_FILES.items():
        replace(next(another(f"{what} as data").glob("*.safetensors")), make)
    for what, change in EDITS.items():
        sign(another(what), change)
    path = another("a header of 50 GB, in a file of that size")
    sign(path, too_large)
    replace(next(path.glob("*.safetensors")), sparse(50 << 30))

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(path) for _, path in made)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *outcomes, last = done.stdout.split("=\n")
    assert len(outcomes) == len(made)
    for (what, _), lines in zip(made, map(str.splitlines, outcomes), strict=True):
        refused = lines[1:] if "as data" in what else lines  # of damaged data the index is good
        of_the_path = {"NotFoundError"} | ({"CheckpointError"} if what.startswith("a link to itself") else set())
        assert all(line.startswith("PATH") or line in of_the_path for line in refused), (what, lines)
        assert "NotFoundError" not in refused or "nowhere" in what, (what, lines)
    assert last.startswith(f"{whole} ")


def test_a_header_that_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from muonfx.checkpoint import data, index

    monkeypatch.setattr(data, "LONGEST_HEADER", 100)
    with pytest.raises(ck.CheckpointError, match="save with group="):
        ck.save(tmp_path / "a", STATE)
    monkeypatch.undo()
    monkeypatch.setattr(index, "LONGEST", 100)
    with pytest.raises(ck.CheckpointError, match="save fewer pieces"):
        ck.save(tmp_path / "b", STATE)


def test_a_thousand_differences_are_ten_and_a_number(tmp_path: Path):
    leaf = torch.zeros(())
    path = ck.save(tmp_path / "one", {f"a{number:05}": leaf for number in range(1000)})
    with pytest.raises(MismatchError) as caught:
        ck.load(path, like={f"b{number:05}": leaf for number in range(1000)})
    message = str(caught.value)
    assert len(caught.value.problems) == 2000
    assert message.count("missing:   'b") == message.count("extra:     'a") == 10
    assert "missing: ... and 990 more" in message
    assert "extra: ... and 990 more" in message
