"""Another process that runs transforms, with another hash of strings and without any earlier call."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import io
import os
import subprocess
import sys
from typing import IO, Any

import torch

from muonfx.testing.examples import Example, history
from muonfx.testing.violation import values_within

_PROGRAM = "from muonfx.testing.other_process import serve; serve()"


class OtherProcess:
    """A Python process that runs examples. It starts at the first one, and ends with this process."""

    def __init__(self) -> None:
        """Start the process, with the import paths and the number of threads of this one."""
        # A hash of strings that is fixed, so that a failure can be repeated, and is not this process's.
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        paths = map(os.path.abspath, sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums of large tensors depend on it
            },
        )
        atexit.register(self._process.kill)

    def histories(self, tx: Any, examples: list[Example]) -> list[Any]:
        """Run a transform on examples in order, and return the pairs (updates, state) of each.

        Raises:
            RuntimeError: the other process raised an error, which the message contains, or has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = _packed((tx, examples))
        try:
            _send(self._process.stdin, question)
            answer = _receive(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            other_process.cache_clear()  # the next law starts another
            raise RuntimeError("another process has ended before it returned its results") from error
        results_or_error = _unpacked(answer)
        if isinstance(results_or_error, str):
            raise RuntimeError(f"another process raised {results_or_error}")
        return results_or_error


def _packed(value: object) -> bytes:
    """Return a value as bytes. ``pickle`` alone does not support float8 tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(message: bytes) -> Any:
    # The other process is ours, so its message is safe to unpickle.
    return torch.load(io.BytesIO(message), weights_only=False)


# The length first, so that a message that cannot be unpickled is read to its end: the next one would be misread.


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little"))
    stream.write(message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """Return the next message. Raise EOFError if the other side has closed the stream."""
    length = stream.read(8)
    if len(length) < 8:
        raise EOFError
    size = int.from_bytes(length, "little")
    message = stream.read(size)
    if len(message) < size:
        raise EOFError
    return message


@functools.cache
def other_process() -> OtherProcess:
    """Return the other process, which all laws use, because starting one takes seconds."""
    return OtherProcess()


def serve() -> None:
    """Run the examples that arrive on stdin, and write their results to stdout, until stdin is closed."""
    results = sys.stdout.buffer
    sys.stdout = sys.stderr  # a transform may print
    while True:
        try:
            question = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            tx, examples = _unpacked(question)
            answer = _packed([history(tx, *example) for example in examples])
        except Exception as error:
            answer = _packed(f"{type(error).__name__}: {error}")
        _send(results, answer)


def why_not_elsewhere(tx: Any) -> str | None:
    """Return why another process cannot import the parts of a transform; None if it can."""
    for value in values_within(tx):
        factory = getattr(value, "factory", value)
        name = getattr(factory, "__module__", None)
        if isinstance(name, str) and callable(factory) and not _is_importable(name):
            return f"{getattr(factory, '__qualname__', factory)} is not in a module that another process can import"
    return None


@functools.cache
def _is_importable(name: str) -> bool:
    """Return True if a module is found by its name, in the file from which this process imported it."""
    module = sys.modules.get(name)
    if name == "__main__" or module is None:
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == getattr(module, "__file__", spec.origin)
