"""Another process that runs transforms, with another hash of strings and without any earlier call."""

from __future__ import annotations

import atexit
import functools
import io
import os
import pickle
import subprocess
import sys
from typing import IO, Any

import torch

from muonfx.testing.examples import Example, history

_PROGRAM = "from muonfx.testing.other_process import serve; serve()"


@functools.cache
def _other_process() -> subprocess.Popen[bytes]:
    """Start a second Python process and return it. At later calls it is returned again, since starting takes seconds.

    It runs `serve`, and ends with this process.
    """
    # The second process has another hash of strings than this one. It is fixed, so that a failure can be repeated.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    paths = map(os.path.abspath, sys.path)  # so that it imports the same modules
    process = subprocess.Popen(
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
    atexit.register(process.kill)  # when this process ends
    return process


def histories_elsewhere(tx: Any, examples: list[Example]) -> list[Any]:
    """Run a transform on examples in another process, and return for each the updates and the state of every step.

    Raises:
        RuntimeError: the other process raised an error, which the message contains, or has ended.
    """
    # The process is started at the first call, and answers each message on stdin by one on stdout.
    process = _other_process()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, _packed((tx, examples)))
        results_or_error = _receive(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        _other_process.cache_clear()  # the next law starts another
        raise RuntimeError("another process has ended before it returned its results") from error
    if isinstance(results_or_error, str):  # the text of an error, in place of a list of results
        raise RuntimeError(f"another process raised {results_or_error}")
    return results_or_error


def _packed(value: object) -> bytes:
    """Return a value as bytes. ``pickle`` alone does not support float8 tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _send(stream: IO[bytes], message: bytes) -> None:
    """Write a message, the bytes of a value, to a stream."""
    # Pickled, the bytes have an end, even if the other process cannot load the value: the next one would be misread.
    pickle.dump(message, stream)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """Return the next value. Raise EOFError if the other side has closed the stream."""
    message: bytes = pickle.load(stream)
    # The other process is ours, so its message is safe to load.
    return torch.load(io.BytesIO(message), weights_only=False)


def serve() -> None:
    """Run the examples that arrive on stdin, and write their results to stdout, until stdin is closed.

    A message on stdin is a pair of a transform and a list of examples. The answer is a list with the updates and states
    of each example, or the text of an error such as "ValueError: found a vector".
    """
    results = sys.stdout.buffer
    sys.stdout = sys.stderr  # a transform may print, which must not come between the results
    while True:
        try:
            tx, examples = _receive(sys.stdin.buffer)
            answer = _packed([history(tx, *example) for example in examples])
        except EOFError:  # the first process has closed stdin
            return
        except Exception as error:  # also of a result that cannot be sent
            answer = _packed(f"{type(error).__name__}: {error}")
        _send(results, answer)
