"""Laws of ambient modes: settings of torch, Python and the process change no result, and no step changes a setting."""

from __future__ import annotations

import builtins
import random
import sys
import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch

from muonfx.core import Transform
from muonfx.testing.examples import Example, History, history, scaled
from muonfx.testing.law import law
from muonfx.testing.laws.structure import require_no_grad
from muonfx.testing.laws.values import names_within
from muonfx.testing.other_process import histories_elsewhere
from muonfx.testing.violation import Breach, require_same
from muonfx.tree import PyTree

T = TypeVar("T")


@contextmanager
def _changed(read: Callable[[], T], write: Callable[[T], object], value: T) -> Generator[None]:
    """Change a global setting of torch in a ``with`` block, and restore the usual value at the end.

    For example, ``read`` is ``torch.get_num_threads`` and ``write`` is ``torch.set_num_threads``. With
    the value 2, the block runs with two threads.
    """
    usual_value = read()
    write(value)
    try:
        yield
    finally:  # also after an error in the block
        write(usual_value)


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


def _deterministic_algorithms() -> AbstractContextManager[None]:
    """Choose deterministic algorithms; torch then also fills new memory with NaN, which shows where it is read."""
    # 1: torch warns where an operation has no deterministic algorithm.
    return _changed(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1)


def _another_number_of_threads() -> AbstractContextManager[None]:
    return _changed(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1)


Mode = Callable[[], AbstractContextManager[Any]]

TORCH_MODES: dict[str, Mode] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "the default dtype float64": lambda: _default_dtype(torch.float64),
    "the default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "the default device meta": lambda: torch.device("meta"),
    "torch.no_grad": torch.no_grad,
    "torch.inference_mode": torch.inference_mode,
    "deterministic algorithms": _deterministic_algorithms,
    "another number of threads": _another_number_of_threads,
}
"""The modes of torch that a caller may have set, by name."""


@law(on=Example.shortened, share=0.1)
def modes_of_torch_change_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `init` and `update` return the same bits under every mode of torch that the caller may have set.

    The modes are autocast, other default dtypes and another default device, no_grad and inference mode, deterministic
    algorithms, and another number of threads.

    >>> import muonfx as mfx
    >>> modes_of_torch_change_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    _check_modes(TORCH_MODES, tx, params, steps, history(tx, params, steps))


def _check_modes(
    modes: dict[str, Mode], tx: Transform, params: PyTree, steps: list[PyTree], expected: History
) -> None:
    """Raise `Breach` (a failed law) if the initial state or a step has other bits under one of the modes.

    A mode is a setting around the call, such as ``torch.no_grad``. ``modes`` are functions that return a context
    manager, by name. ``expected`` are the updates and the state of each step without a mode.
    """
    first_state = tx.init(params)
    for name, mode in modes.items():
        with mode():
            state = tx.init(params)
        # Compare outside of the mode, under which the comparison itself could compute other values.
        require_same(f"under {name}, the state from init", state, first_state, "without it")
        with mode():
            results = history(tx, params, steps)
        require_same(f"under {name}, (updates, state) by step", results, expected, "without it")


@contextmanager
def _another_seed() -> Generator[None]:
    """Set other seeds for the random numbers of torch and Python, and restore their states at the end."""
    state_of_python = random.getstate()
    with torch.random.fork_rng(devices=()):  # restores the state of torch's generator on the CPU
        torch.manual_seed(1234)  # for torch.rand
        random.seed(1234)  # for random.random, which fork_rng does not restore
        try:
            yield
        finally:
            random.setstate(state_of_python)


def _another_time() -> AbstractContextManager[Any]:
    """Move the clocks of the module `time` by about 11 days and 7 seconds."""
    return mock.patch.multiple(
        time,
        time=_later(time.time),
        monotonic=_later(time.monotonic),
        perf_counter=_later(time.perf_counter),
        process_time=_later(time.process_time),
    )


def _later(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: clock() + 1_000_007.0


@contextmanager
def _another_hash() -> Generator[None]:
    """Let calls of ``hash("w")`` return other integers, as in a process with another PYTHONHASHSEED.

    Ranks have different hashes of strings, so a result must not depend on them, as with the seed ``hash("w")``.
    """
    usual_hash = builtins.hash

    def other_hash(value: object) -> int:
        may_have_strings = isinstance(value, str | bytes | tuple | frozenset)
        calling_function = sys._getframe(1).f_code.co_name
        # Its old keys were stored with the usual hash.
        is_key_of_dict = calling_function == "__hash__"
        if may_have_strings and not is_key_of_dict:
            return usual_hash(("salt", value))  # equal values still have equal hashes
        return usual_hash(value)

    with mock.patch.object(builtins, "hash", other_hash):
        yield


PROCESS_MODES: dict[str, Mode] = {
    "another seed of random numbers": _another_seed,
    "another time of the clock": _another_time,
    "another hash of strings": _another_hash,
}
"""The differences between two processes that run the same step, by name."""


@law(on=Example.shortened, share=0.1)
def seeds_clocks_and_hashes_change_nothing(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that results do not depend on the seeds of random numbers, the clock, ``hash`` of a name, or the thread.

    Ranks differ in these, and must still compute the same updates. Python's hash of a string is another in each
    process, unless PYTHONHASHSEED is set.

    >>> import muonfx as mfx
    >>> seeds_clocks_and_hashes_change_nothing(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    expected = history(tx, params, steps)
    _check_modes(PROCESS_MODES, tx, params, steps, expected)
    # A new thread, where values that are kept for each thread are still unset.
    with ThreadPoolExecutor(1) as pool:
        in_thread = pool.submit(history, tx, params, steps).result()
    require_same("(updates, state) in another thread", in_thread, expected, "in this thread")


def _cannot_be_elsewhere(tx: Transform) -> str | None:
    """Return why another process cannot import the functions and classes in a transform; None if it can.

    For example, a function that is defined in the running script (``__main__``) cannot be imported.
    """
    for name, value in names_within(tx).items():
        module = sys.modules.get(value.__module__)
        # A module that was imported from a file has a spec, by which another process finds the file too.
        if value.__module__ == "__main__" or getattr(module, "__spec__", None) is None:
            return f"{name} is not in a module that another process can import"
    return None


@law(on=Example.shortened, unless=_cannot_be_elsewhere, share=0.02)
def another_process_gives_the_same_bits(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that another process returns the same bits. No cache is shared with it.

    The other process has another hash of strings, so that sets of names have another order. It runs the examples in the
    reverse order, and first with other numbers, so a value that is cached at the first call of a process differs.

    >>> import muonfx as mfx
    >>> another_process_gives_the_same_bits(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    runs = _runs_with_other_names_and_values(tx, Example(params, steps))
    expected = {name: history(run_tx, *example) for name, (run_tx, example) in runs.items()}
    # The other process takes the runs in the reverse order, so that its caches are filled by another run than here.
    names = list(reversed(runs))
    histories = histories_elsewhere([runs[name] for name in names])
    results = dict(zip(names, histories, strict=True))
    require_same(
        "(updates, state) by run, in another process", results, expected, "in this process"
    )


def _runs_with_other_names_and_values(
    tx: Transform, example: Example
) -> dict[str, tuple[Transform, Example]]:
    """Return a transform and an example for the name of each run: "this example", "names in model", "other values"."""
    runs = {"this example": (tx, example)}
    # Names such as "a.w" instead of "w", so that sets of names have several orders.
    for prefix in ("a", "b", "model"):
        longer_names = example.map_trees(lambda values, prefix=prefix: {prefix: values})
        if _can_run(tx, longer_names):
            runs[f"names in {prefix}"] = (tx, longer_names)
    # The same shapes with other values and numbers, for which a cached result of the first example would be wrong.
    other_values = example.map_trees(lambda values: scaled(values, -3.0))
    runs["other values"] = (tx, other_values)
    runs["all numbers times 0.9"] = (scaled(tx, 0.9), other_values)
    return runs


def _can_run(tx: Transform, example: Example) -> bool:
    """Return False if the transform accepts only certain names of parameters: `init` or `update` raises an error."""
    try:
        history(tx, *example)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _settings() -> dict[str, Any]:
    """Return the settings of torch and Python that a step must leave as they are, by name."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "the filters of warnings": list(warnings.filters),
        "the random numbers of Python": random.getstate(),
        "the random numbers of torch": torch.get_rng_state().tolist(),
    }


@law(share=0.1)
def settings_stay_as_they_were(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `init` and `update` change no global setting, and draw no number from a global generator.

    A step that calls ``torch.manual_seed`` would change the dropout of the model.

    >>> import muonfx as mfx
    >>> settings_stay_as_they_were(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    with _rare_settings():
        before = _settings()
        state = tx.init(params)
        _require_settings("init", before)
        for step, grads in enumerate(steps):
            _, state = tx.update(grads, state, params)
            _require_settings(f"update, at step {step},", before)


@contextmanager
def _rare_settings() -> Generator[None]:
    """Choose rare settings, because the usual ones may be those that a transform has set at an earlier call."""
    with (
        warnings.catch_warnings(),
        _default_dtype(torch.bfloat16),
        torch.no_grad(),
        _deterministic_algorithms(),
        _another_seed(),
    ):
        warnings.resetwarnings()
        yield


def _require_settings(what: str, before: dict[str, Any]) -> None:
    for name, value in _settings().items():
        if value != before[name]:
            raise Breach(None, f"{what} has changed {name}")


@law(share=0.2)
def results_need_no_grad_if_inputs_need_none(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that updates and states do not require grad if neither gradients, parameters nor the state do.

    >>> import muonfx as mfx
    >>> results_need_no_grad_if_inputs_need_none(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    # The parameters and gradients of examples do not require grad. A result that does would keep a graph in memory.
    for step, results in enumerate(history(tx, params, steps)):
        require_no_grad(f"step {step}, (updates, state)", results, "no input does")
