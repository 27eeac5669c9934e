"""The CRC-32 of isal, which is used if it is installed, has the values of zlib's."""

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import files
from muonfx.checkpoint.index import BLOCK
from tests.checkpoint.common import assert_same_tree

ck = mfx.checkpoint
isal_zlib = pytest.importorskip("isal.isal_zlib")
STATE = {
    "large": torch.arange(1_500_000.0),
    "small": torch.ones(3, dtype=torch.bfloat16),
    "none": torch.zeros(0),
}


def test_isal_is_used_if_it_is_installed():
    assert files.crc32_of is isal_zlib.crc32


def test_isal_has_the_values_of_zlib(tmp_path: Path):
    draw = random.Random(0)
    for size in (0, 1, 7, 64, 1000, 5121, 70_000, BLOCK, BLOCK + 3):
        found = draw.randbytes(size)
        assert isal_zlib.crc32(found) == zlib.crc32(found)
        assert isal_zlib.crc32(memoryview(found)[1:]) == zlib.crc32(found[1:])
    for file in ck.save(tmp_path / "one", STATE).iterdir():
        assert isal_zlib.crc32(file.read_bytes()) == zlib.crc32(file.read_bytes())


@pytest.mark.parametrize(
    ("writer", "reader"), [(zlib, isal_zlib), (isal_zlib, zlib)], ids=["zlib", "isal"]
)
def test_a_checkpoint_that_one_has_written_verifies_with_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any, reader: Any
):
    monkeypatch.setattr(files, "crc32_of", writer.crc32)
    path = ck.save(tmp_path / "one", STATE)
    monkeypatch.setattr(files, "crc32_of", reader.crc32)
    assert ck.verify(path).nbytes == 6_000_006
    assert_same_tree(ck.load(path, like=STATE), STATE)
