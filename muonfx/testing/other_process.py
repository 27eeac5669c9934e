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


def histories_elsewhere(runs: list[tuple[Any, Example]]) -> list[Any]:
    """Run transforms on examples in another process, and return for each run the updates and the state of every step.

    ``runs`` are pairs of a transform and an example, which run in this order.

    Raises:
        RuntimeError: the other process raised an error, which the message contains, or has ended.
    """
    process = _other_process()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, runs)
        histories, error_text = _receive(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        _other_process.cache_clear()  # the next law starts another
        raise RuntimeError("another process has ended before it returned its results") from error
    if error_text:
        raise RuntimeError(f"another process raised {error_text}")
    return histories


def _send(stream: IO[bytes], value: object) -> None:
    """Write a value to a stream. If it cannot be written, raise an error and write nothing."""
    buffer = io.BytesIO()
    torch.save(value, buffer)  # pickle alone does not support float8 tensors
    # Pickled, the bytes have an end, even if the other process cannot load the value: the next one would be misread.
    pickle.dump(buffer.getvalue(), stream)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """Return the next value. Raise EOFError if the other side has closed the stream."""
    message: bytes = pickle.load(stream)
    # The other process is ours, so its message is safe to load.
    return torch.load(io.BytesIO(message), weights_only=False)


def serve() -> None:
    """Run the examples that arrive on stdin, and write their results to stdout, until stdin is closed.

    A message on stdin is a list of pairs of a transform and an example. The answer is a pair of a list with the
    updates and states of each run, and the text of an error such as "ValueError: found a vector", or "".
    """
    stdout = sys.stdout.buffer
    sys.stdout = sys.stderr  # a transform may print, which must not come between the answers
    while True:
        try:
            runs = _receive(sys.stdin.buffer)
            histories = [history(tx, *example) for tx, example in runs]
            _send(stdout, (histories, ""))
        except EOFError:  # the first process has closed stdin
            return
        except Exception as error:  # also of a result that cannot be sent
            _send(stdout, ([], f"{type(error).__name__}: {error}"))
