"""Whatever happens to the files: an error of ours, or no harm; never another error, a hang, or a wrong tensor.

The second half has files that are forged to do harm: an error that names the file, soon, and never much memory.
"""

import errno
import hashlib
import io
import json
import os
import pickle
import random
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, CorruptError, FormatError, MismatchError
from muonfx.checkpoint.index import BLOCK, INDEX, LONGEST
from muonfx.checkpoint.reader import DataReader
from tests.checkpoint.common import assert_same_tree, copies, grads_like, threads
from tests.processes import run_python

ck = mfx.checkpoint
PARAMS = {
    "embed.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
    "up.weight": torch.zeros(6, 4),
    "none": torch.zeros(0),
}
TX = mfx.chain(mfx.momentum(dtype=None), mfx.scale_by_adam(), mfx.add_decayed_weights(0.1))


@pytest.fixture
def good(tmp_path: Path):
    _, state = TX.update(grads_like(PARAMS, 0), TX.init(PARAMS), PARAMS)
    path = ck.save(
        tmp_path / "here",
        state,
        tx=TX,
        params=PARAMS,
        step=1,
        extra={"seed": 3, "losses": [1.0, 0.5]},
    )
    return path, state


def use(path: Path, state: Any) -> str:
    """Load and look; "fine" if all is as it was saved, else the name of our error. Other errors pass through."""
    try:
        ck.inspect(path)
        loaded = ck.load(path, like=state, tx=TX)
        params = ck.load_params(path, like=PARAMS)
    except CheckpointError as error:
        return type(error).__name__ if str(path.parent) in str(error) else f"names no path: {error}"
    assert_same_tree((loaded, params), (state, PARAMS))
    ck.read(path)
    return "fine"


def damaged(data: bytes, draw: random.Random) -> bytes:
    """A copy with something wrong."""
    a, b = sorted(draw.randrange(len(data)) for _ in range(2))
    return draw.choice(
        [
            *[data[:a] + bytes([data[a] ^ 1 << draw.randrange(8)]) + data[a + 1 :]] * 3,
            data[:a] + bytes(b - a) + data[b:],
            data[:a] + draw.randbytes(b - a) + data[b:],
            data[:a],
            data[:a] + data[b:],
            data[:b] + data[a:],
            data + draw.randbytes(draw.choice([1, 8, 100])),
            data[:a] + data[b : b + 8] + data[a + 8 : b] + data[a : a + 8] + data[b + 8 :],
        ]
    )


SEEDS = [
    pytest.param(0, 3000, marks=pytest.mark.slow),
    *(pytest.param(seed, 10_000, marks=pytest.mark.deep) for seed in range(1, 6)),
]


@pytest.mark.parametrize(("seed", "number"), SEEDS)
def test_thousands_of_damages_are_noticed(good, seed: int, number: int):
    path, state = good
    draw, whole = random.Random(seed), copies(path)
    for _ in range(number):
        name = draw.choice(sorted(whole))
        found = damaged(whole[name], draw)
        (path / name).write_bytes(found)
        assert use(path, state) == ("fine" if found == whole[name] else "CorruptError")
        (path / name).write_bytes(whole[name])
    assert use(path, state) == "fine"


def signed(body: Any) -> bytes:
    text = (body if isinstance(body, str) else json.dumps(body)).encode()
    return (
        b'{"sha256": "'
        + hashlib.sha256(text).hexdigest().encode()
        + b'",\n"index": '
        + text
        + b"}\n"
    )


# fmt: off
VALUES = [
    None, True, False, 0, 1, -1, 3, 4, 8, 32, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, "", "x", "../x.safetensors",
    "float32", "int8", "float99", "a\0b", "\ud800", "zzzzzzzz", "00000000", [], {}, [0], [[]], [2**62, 0], [2, -2],
    {"a": 1},
]
# fmt: on


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(place for key, item in inner for place in places(item, (*at, key)))]


def edited(body: Any, draw: random.Random) -> Any:
    """Put something else in some place, leave it out, move it, or have it twice."""
    body = json.loads(json.dumps(body))
    *way, last = draw.choice(places(body)[1:])
    holder = body
    for key in way:
        holder = holder[key]
    kind = draw.choice(["value", "value", "value", "drop", "rename", "twice", "number"])
    if kind == "drop":
        del holder[last]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw.choice(["", "x", "__proto__", "a//b", last * 2, "trace/w", "params"])] = (
            holder.pop(last)
        )
    elif kind == "twice" and isinstance(holder, list):
        holder.append(holder[last])
    elif kind == "number" and isinstance(holder[last], int):
        holder[last] += draw.choice([-8, -4, -1, 1, 4, 8, 64])
    else:
        holder[last] = draw.choice(VALUES)
    return body


# Parts of the index that may change without harm to tensors.
TOLD = {"save_id", "step", "extra", "chain", "versions"}


@pytest.mark.filterwarnings("ignore:.*the checkpoint was saved with other numbers")
@pytest.mark.parametrize(("seed", "number"), SEEDS)
def test_thousands_of_signed_edits_are_noticed_or_harmless(good, seed: int, number: int):
    path, state = good
    body = json.loads((path / INDEX).read_bytes())["index"]
    draw, outcomes = random.Random(seed), Counter[str]()
    for _ in range(number):
        other = body
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            other = edited(other, draw)
        (path / INDEX).write_bytes(signed(other))
        outcome = use(path, state)
        outcomes[outcome] += 1
        if outcome == "fine" and isinstance(other, dict):
            # Only unused keys and boxes without elements have changed, and nothing on which bytes depend.
            same = {
                key: value for key, value in body.items() if key not in TOLD and key != "leaves"
            }
            assert {key: other[key] for key in same} == same
    assert set(outcomes) == {"CorruptError", "MismatchError", "FormatError", "fine"}
    assert outcomes["CorruptError"] > 0.5 * number


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[" * 200_000, CorruptError, "has invalid contents"),
        ("{}", CorruptError, "has invalid contents"),
        ("null", CorruptError, "has invalid contents"),
        ("9" * 10_000, CorruptError, "has invalid contents"),
        ('{"format": "muonfx checkpoint", "version": 1}', CorruptError, "has invalid contents"),
        (
            '{"format": "something else", "version": 1}',
            FormatError,
            "has the format 'something else'",
        ),
        (
            '{"format": "muonfx checkpoint", "version": 2}',
            FormatError,
            "version 2 .* reads version 1: upgrade",
        ),
    ],
)
def test_texts_that_are_no_index(good, text: str, error: type[Exception], message: str):
    path, state = good
    (path / INDEX).write_bytes(signed(text))
    with pytest.raises(error, match=f"{path}.*{message}"):
        ck.load(path, like=state)


def test_a_dtype_of_another_version_is_named_with_its_leaf(good):
    path, state = good

    def change(body: Any) -> None:
        body["leaves"]["momentum/trace/embed.weight"]["dtype"] = "float4"

    sign(path, change)
    with pytest.raises(
        CorruptError, match=r"'momentum/trace/embed\.weight' has the unknown dtype 'float4'"
    ):
        ck.load(path, like=state)


def test_a_chunk_in_a_file_that_is_not_listed_is_named_with_its_leaf(good):
    path, state = good

    def change(body: Any) -> None:
        body["leaves"]["momentum/trace/embed.weight"]["chunks"][0]["file"] = 5

    sign(path, change)
    with pytest.raises(
        CorruptError,
        match=r"a chunk of 'momentum/trace/embed\.weight' is in file 5, and there are 1",
    ):
        ck.load(path, like=state)


def test_a_checkpoint_cannot_run_code(good, tmp_path: Path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "trapped").write_text, ("x",)

    path, state = good
    archive = io.BytesIO()
    torch.save(Trap(), archive)
    for data in (pickle.dumps(Trap()), archive.getvalue()):
        for name, whole in copies(path).items():
            (path / name).write_bytes(data)
            for act in (ck.verify, ck.read, lambda p: ck.load(p, like=state)):
                with pytest.raises(CheckpointError):
                    act(path)
            (path / name).write_bytes(whole)
    assert not (tmp_path / "trapped").exists()
    for source in Path(ck.__file__).parent.glob("*.py"):
        assert "import pickle" not in source.read_text()
        assert "torch.load(" not in source.read_text()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("number", [1, 3])
def test_what_is_damaged_is_named(tmp_path: Path, number: int):
    state = {"trace": {"w": torch.randn(3 * BLOCK // 4 + 5), "b": torch.randn(7)}}
    first, last = (ck.save(ck.step_path(tmp_path, step), state, step=step) for step in (1, 2))
    index = ck.inspect(last)
    data = last / index.files[0].name
    whole, begin = data.read_bytes(), index.leaves["trace/w"].chunks[0].begin
    acts = (lambda: ck.load(last, like=state), lambda: ck.read(last), lambda: ck.verify(last))

    def refused(message: str) -> None:
        for act in acts:
            with threads(number), pytest.raises(CorruptError, match=message):
                act()

    flip(data, begin + 2 * BLOCK + 100)
    refused(
        f"{data}: the leaf 'trace/w' is damaged in bytes {begin + 2 * BLOCK} to {begin + 3 * BLOCK}"
    )
    assert ck.latest(tmp_path) == last  # which reads no leaf
    with pytest.warns(UserWarning, match=r"step-000000002 is not used.*'trace/w' is damaged"):
        assert ck.latest(tmp_path, verify=True) == first
    flip(data, 20)
    refused("the header of the data file is damaged")
    data.write_bytes(whole[:-1])
    refused(f"has {len(whole) - 1} bytes, expected {len(whole)}")
    data.unlink()
    refused("the data file cannot be read: No such file")
    with pytest.warns(UserWarning, match="step-000000002 is not used"):
        assert ck.latest(tmp_path) == first
    (last / INDEX).write_bytes((last / INDEX).read_bytes()[:-3])
    refused(rf"{INDEX} is damaged")


@pytest.mark.parametrize("number", [1, 3])
def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path, number: int):
    """The length is right when the file is opened, and no longer when a leaf is read."""
    from muonfx.checkpoint.reader import DataReader

    ck.save(tmp_path, {"w": torch.randn(5 * BLOCK // 4)})
    with threads(number), DataReader(tmp_path, ck.inspect(tmp_path)) as reader:
        data = next(tmp_path.glob("*.safetensors"))
        reader.check_files()
        with data.open("r+b") as file:
            file.truncate(4 * BLOCK + 1000)
        with pytest.raises(CorruptError, match="ends too early"):
            reader.verify()


@pytest.mark.parametrize("number", [1, 3])
def test_a_damaged_leaf_is_named_among_many_that_are_read_together(tmp_path: Path, number: int):
    """Small leaves share a part that a thread reads; some are widened, and are read by themselves."""
    state = {f"w{i:02}": torch.randn(BLOCK // 16 + i) for i in range(12)}  # three parts of a thread
    like = {name: leaf.double() if name in ("w03", "w09") else leaf for name, leaf in state.items()}
    ck.save(tmp_path, state)
    index = ck.inspect(tmp_path)
    data = tmp_path / index.files[0].name
    with threads(number):
        loaded = ck.load(tmp_path, like=like)
        assert all(
            torch.equal(loaded[name], like[name]) and loaded[name].dtype == like[name].dtype
            for name in like
        )
        whole = data.read_bytes()
        for name in ("w00", "w03", "w07", "w11"):
            flip(data, index.leaves[name].chunks[0].begin + index.leaves[name].spec.nbytes - 1)
            with pytest.raises(CorruptError, match=f"the leaf '{name}' is damaged"):
                ck.load(tmp_path, like=like)
            data.write_bytes(whole)
        assert_same_tree(ck.read(tmp_path), state)


def test_errors_survive_pickling():
    found = pickle.loads(pickle.dumps(MismatchError("all wrong", ["a", "b"])))
    assert (str(found), found.problems) == ("all wrong", ("a", "b"))


STATE = {"trace": {"w": torch.randn(6, 4), "b": torch.randn(3)}}

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
    "a shape whose product overflows": lambda body: leaf(body).update(
        shape=[2**32, 2**32, 0, 2**63 - 1]
    ),
    "a shape of a million dims": lambda body: leaf(body).update(shape=[1] * 10**6),
    "a shape of 100 dims": lambda body: (
        leaf(body).update(shape=[24] + [1] * 99),
        leaf(body)["chunks"][0].update(offsets=[0] * 100, sizes=[24] + [1] * 99),
    )[0],
    "two leaves of the same bytes": lambda body: body["leaves"].update(copy=leaf(body)),
    "a leaf beyond the file": lambda body: leaf(body)["chunks"][0].update(begin=2**62),
    "a leaf before the leaves": lambda body: leaf(body)["chunks"][0].update(begin=0),
    "a number of 5000 digits": lambda body: json.dumps(body).replace(
        '"seed": 1', f'"seed": {"7" * 5000}'
    ),
    "a step of 4000 digits": lambda body: body.update(step=int("7" * 4000)),
    "a name twice": lambda body: json.dumps(body).replace('"trace/b"', '"trace/w"'),
    "a depth of 100,000": lambda body: json.dumps(body).replace(
        '"seed": 1', f'"seed": {"[" * 10**5}{"]" * 10**5}'
    ),
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

    done = run_python("-c", PROGRAM, *(path for _, path in made))
    *outcomes, last = done.stdout.split("=\n")
    assert len(outcomes) == len(made)
    for (what, _), lines in zip(made, map(str.splitlines, outcomes), strict=True):
        refused = lines[1:] if "as data" in what else lines  # of damaged data the index is good
        of_the_path = {"NotFoundError"} | (
            {"CheckpointError"} if what.startswith("a link to itself") else set()
        )
        assert all(line.startswith("PATH") or line in of_the_path for line in refused), (
            what,
            lines,
        )
        assert "NotFoundError" not in refused or "nowhere" in what, (what, lines)
    assert last.startswith(f"{whole} ")


def test_a_header_that_no_reader_would_take_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from muonfx.checkpoint import index, writer

    monkeypatch.setattr(writer, "LONGEST_HEADER", 100)
    with pytest.raises(ck.CheckpointError, match="save with group="):
        ck.save(tmp_path / "a", STATE)
    monkeypatch.undo()
    monkeypatch.setattr(index, "LONGEST", 100)
    with pytest.raises(ck.CheckpointError, match="save fewer leaves"):
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


def test_an_error_of_a_data_file_is_not_told_as_one_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = ck.save(tmp_path / "one", {"w": torch.ones(4)})

    def too_many_files(self: object, numbers: object = None) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(DataReader, "check_files", too_many_files)
    with pytest.raises(OSError, match="Too many open files") as error:
        ck.read(path)
    assert not isinstance(error.value, ck.CheckpointError)
