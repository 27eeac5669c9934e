"""The training text: the source files of Python's standard library, as bytes.

A hash of a file's relative path assigns the file to training or validation, so the split is the same on every machine.
The bytes depend on the Python version; two runs with equal `Corpus.digest` read the same text. A batch is a pure
function of the seed and the step, so a resumed run continues with the same batches.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Tests, data in source files (code pages, help texts), other packages, and modules that some installations lack.
EXCLUDED = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "__pycache__"),
    *("site-packages", "dist-packages", "lib-dynload", "ensurepip", "distutils", "tkinter"),
    *("sitecustomize.py", "usercustomize.py"),
}
EXCLUDED_PREFIXES = (".", "config-", "_sysconfigdata")
SUFFIXES = (".py", ".txt", ".md")
MINIMUM = 20_000  # bytes in each split


class NoText(Exception):
    """Raised if there is too little text to train on."""


class Corpus(NamedTuple):
    """The training and validation texts, from disjoint sets of files."""

    train: Tensor
    """uint8."""
    validation: Tensor
    """uint8."""
    train_files: list[str]
    """Relative paths, sorted."""
    validation_files: list[str]
    """Relative paths, sorted."""
    digest: str
    """Hash of all bytes and paths."""

    def batch(self, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets (size, context) int64 that depend on the seed and the step alone."""
        draw = random.Random(f"{seed}:{step}")
        return _windows(self.train, [draw.randrange(len(self.train) - context) for _ in range(size)], context)

    def validation_batches(self, count: int, size: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """Return the validation batches, the same for every run: windows spread evenly over the validation text."""
        stride = (len(self.validation) - context - 1) / (count * size)
        starts = [int(stride * place) for place in range(count * size)]
        return [_windows(self.validation, starts[i : i + size], context) for i in range(0, len(starts), size)]

    def __str__(self) -> str:
        return (
            f"{len(self.train):,} bytes of {len(self.train_files)} files to train on, "
            f"{len(self.validation):,} bytes of {len(self.validation_files)} other files to validate on"
        )


def _windows(text: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def is_validation(relative: str) -> bool:
    """Return True if a file is used for validation: one in ten, by a hash of its relative path."""
    return hashlib.sha256(relative.encode()).digest()[0] < 26


def read_corpus(folder: Path | None = None) -> Corpus:
    """Read the Python standard library, or the ``.py``, ``.txt`` and ``.md`` files of a folder.

    Raises:
        NoText: there are too few bytes, for example because this Python has its library in a zip file.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    files: dict[bool, list[str]] = {False: [], True: []}
    texts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    digest = hashlib.sha256()
    for relative in _found(root, SUFFIXES if folder else (".py",)):
        text = (root / relative).read_bytes()
        split = is_validation(relative)
        files[split].append(relative)
        texts[split] += text
        digest.update(f"{relative}\0{len(text)}\0".encode() + text)
    if min(len(text) for text in texts.values()) < MINIMUM:
        whose = "the folder given with --text" if folder else "this Python's standard library (is it in a zip file?)"
        raise NoText(
            f"{whose} has too little text: found {len(texts[False])} bytes in {len(files[False])} files for training "
            f"and {len(texts[True])} in {len(files[True])} for validation, expected at least {MINIMUM} each: "
            "choose another folder of .py, .txt or .md files with --text FOLDER"
        )
    train, validation = (torch.frombuffer(texts[split], dtype=torch.uint8) for split in (False, True))
    return Corpus(train, validation, files[False], files[True], digest.hexdigest()[:16])


def _found(root: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the sorted relative paths of the text files under a folder, with forward slashes."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _excluded(name)]
        chosen = [Path(folder, name) for name in files if name.endswith(suffixes) and not _excluded(name)]
        found += [path.relative_to(root).as_posix() for path in chosen if path.is_file()]
    return sorted(found)


def _excluded(name: str) -> bool:
    return name in EXCLUDED or name.startswith(EXCLUDED_PREFIXES)
