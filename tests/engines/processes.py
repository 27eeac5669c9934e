"""Groups of fresh processes for engines: an engine takes seconds to import, and changes the process that imports it.

A worker is a script that ends in ``serve(CASES, carried_out)``; a test calls `launched` with its path. All cases of one
number of processes run in one group of them, one after another.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]


class Rank(NamedTuple):
    """One process of a group."""

    rank: int
    size: int
    folder: Path
    """Of the group: shared by its processes, empty at the beginning."""


def real(engine: str, *needed: str, timeout: float = 600) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need the real engine and other packages."""
    is_missing = any(find_spec(name) is None for name in (engine, *needed))
    skip = pytest.mark.skipif(
        is_missing, reason=f"needs {', '.join((engine, *needed))}: make engines"
    )
    return [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(timeout), skip]


def launched(
    worker: str, size: int, names: Iterable[str], folder: Path, limit: float = 500
) -> list[dict[str, Any]]:
    """Run the named cases of a script in this folder in `size` processes; return each rank's results by case."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    script = str(Path(__file__).parent / worker)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    logs = [folder / f"log_{rank}" for rank in range(size)]
    with ExitStack() as stack:
        running = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", script, str(folder), *names],
                env=os.environ | shared | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            _wait(running, limit)
        finally:
            for one in running:
                one.kill()
                one.wait()
    written = [folder / f"found_{rank}.json" for rank in range(size)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in written]
    if not all(path.exists() for path in written):
        errors = [case["error"] for rank in found for case in rank.values() if "error" in case]
        raise AssertionError("\n".join([*errors, *(log.read_text()[-3000:] for log in logs)]))
    return found


def _wait(running: list[subprocess.Popen[bytes]], limit: float, grace: float = 120) -> None:
    """Wait `limit` seconds at most, and `grace` after the first has ended: others may wait for it in vain."""
    ends, is_first = time.monotonic() + limit, True
    while any(one.poll() is None for one in running) and time.monotonic() < ends:
        if is_first and any(one.poll() is not None for one in running):
            ends, is_first = min(ends, time.monotonic() + grace), False
        time.sleep(0.1)


def result_of(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The result of a case, the same on all ranks; fails with the error of any."""
    results = [rank.get(name, {"error": "not reached: look at an earlier case"}) for rank in found]
    for result in results:
        assert "error" not in result, result["error"]
    assert all(result == results[0] for result in results), results
    return results[0]


def serve(
    cases: Mapping[str, Any], carried_out: Callable[[str, Any, Rank], dict[str, Any]]
) -> None:
    """Run the cases that the command line names as one rank, write their results, which all ranks share, and exit."""
    folder, *names = sys.argv[1:]
    here = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for name in names:
            try:
                found[name] = carried_out(name, cases[name], here)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
                break  # the other ranks may be waiting for this one
    Path(folder, f"found_{here.rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # fully_shard on gloo aborts at the interpreter's exit now and then, with any optimizer
    os._exit(0)


def small_llama(words: int, **more: Any) -> Any:
    """Return a small Llama of transformers, the same in every process."""
    import transformers

    torch.manual_seed(0)
    sides: dict[str, Any] = {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    sides |= {"vocab_size": words, "num_hidden_layers": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**{**sides, **more})
    return transformers.LlamaForCausalLM(config)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's whole parameters, by name."""
    wholes = {
        name: getattr(param, "full_tensor", param.clone)()
        for name, param in model.named_parameters()
    }
    return {name: whole.detach().float() for name, whole in wholes.items()}


def trained_alone(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    batches: Iterable[Any],
    loss_of: Callable[[Any, Any], Tensor],
    clip: float,
) -> dict[str, Tensor]:
    """Train on the batches by hand; the whole parameters afterwards."""
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return values_of(model)


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of two sets of parameters."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    return max((found[name] - wanted[name].float()).abs().max().item() for name in wanted)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """True if two sets of parameters have the same bits."""
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )
