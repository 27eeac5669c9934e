"""The speed of devices at the products of the iteration: numbers, each with its source.

A choice that follows from them (`muonfx.polar.policy`) must be the same on all ranks and in a resumed run, so nothing
is measured by itself. `python -m muonfx.polar.calibrate` measures a machine and writes a file; `use_rates` reads it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["BUILT_IN", "Rates", "read_rates", "use_rates", "used", "write_rates"]

FORMAT = "muonfx rates 1"


class Rates(NamedTuple):
    """The speed of a device at symmetric products; in multiply-adds unless said otherwise."""

    halved_from: float
    """The size of a product, `n^2 k`, from which on leaving out its half pays; infinite where it never does."""
    share: float
    """The time that it then takes, over that of the full product."""
    pass_cost: float
    """Multiply-adds in the time that one element of a small matrix is read and written again."""
    source: str
    """A sentence on the measurement, or on the guess."""


_AVX512 = "measured on 2 cores of an AVX512-BF16 CPU, torch 2.13"
_AVX = "measured on 2 cores of an AVX512-BF16 CPU, with all of it and held to AVX2 alike, torch 2.13"
_AVX2 = "bf16 that the CPU has no products for: measured on 2 cores of one that was held to AVX2, torch 2.13"
_AMX = (
    "halving measured to lose up to 1024 x 4096, on 2 threads of a CPU with AMX, torch 2.13; "
    "a pass scaled from AVX512-BF16, not measured"
)
_H200 = "from an H200's data sheet, not measured"
_NEVER = math.inf

BUILT_IN: dict[tuple[str, torch.dtype], Rates] = {
    ("cpu", torch.bfloat16): Rates(1.3e8, 0.8, 35, _AVX512),
    ("cpu", torch.float32): Rates(6e7, 0.75, 25, _AVX),
    ("cpu", torch.float64): Rates(6e7, 0.75, 25, "taken over from fp32, not measured"),
    ("avx2", torch.bfloat16): Rates(2e7, 0.67, 1, _AVX2),
    ("amx", torch.bfloat16): Rates(_NEVER, 1.0, 200, _AMX),
    ("cuda", torch.bfloat16): Rates(1e9, 0.6, 1000, _H200),
    ("cuda", torch.float16): Rates(1e9, 0.6, 1000, _H200),
    ("cuda", torch.float32): Rates(1e9, 0.6, 100, _H200),
}
"""By kind of device ("cpu", "amx" for one with tile registers, "avx2" for one without bf16 products, "cuda") and dtype
of the products."""

UNKNOWN = Rates(_NEVER, 1.0, 100, "a guess that loses least: nothing is known about this device and dtype")

_measured: dict[tuple[str, torch.dtype], Rates] = {}


def use_rates(path: str | os.PathLike[str] | None) -> None:
    """Choose methods and products by the rates in a file, in this process, from the next plan on.

    Call it before optimizers are made, on all ranks with one file, and again where a run goes on: other rates may
    choose another method, which rounds otherwise. Ranks that use different rates are told when they meet.

    Args:
        path: what ``python -m muonfx.polar.calibrate`` has written; None: the built-in rates again.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no file of rates; the message says what is wrong. The rates are as before then.

    >>> use_rates(None)
    """
    found = {} if path is None else read_rates(path)
    _measured.clear()
    _measured.update(found)


def used(kind: str, tiles: bool, dtype: torch.dtype, *, has_bf16: bool = True) -> Rates:
    """The rates of a device: those that were read, else those that are built in, else a guess.

    >>> used("cpu", False, torch.float32).share
    0.75
    """
    return _measured.get((kind, dtype)) or built_in(kind, tiles, dtype, has_bf16=has_bf16)


def built_in(kind: str, tiles: bool, dtype: torch.dtype, *, has_bf16: bool = True) -> Rates:
    """The rates of a kind of device that are built in, else a guess.

    >>> built_in("tpu", False, torch.float32).halved_from
    inf
    """
    if kind == "cpu" and dtype == torch.bfloat16:
        kind = "amx" if tiles else "cpu" if has_bf16 else "avx2"
    return BUILT_IN.get((kind, dtype), UNKNOWN)


def in_use() -> str:
    """A sentence on the rates that this process has read, for ranks to compare.

    >>> in_use()
    'built in'
    """
    return "; ".join(f"{kind} {dtype}: {rates!r}" for (kind, dtype), rates in sorted(_measured.items(), key=str)) or (
        "built in"
    )


def write_rates(path: str | os.PathLike[str], rates: dict[tuple[str, torch.dtype], Rates]) -> None:
    """Write a file for `use_rates`."""
    entries = [
        {
            "device": kind,
            "dtype": str(dtype).removeprefix("torch."),
            **one._asdict(),
            "halved_from": None if one.halved_from == _NEVER else one.halved_from,
        }
        for (kind, dtype), one in rates.items()
    ]
    Path(path).write_text(json.dumps({"format": FORMAT, "rates": entries}, indent=1) + "\n")


def read_rates(path: str | os.PathLike[str]) -> dict[tuple[str, torch.dtype], Rates]:
    """Read a file that `write_rates` has written.

    Raises:
        ValueError: it is none; the message names the entry that is wrong, and what was expected.
    """
    try:
        held = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no JSON ({error}); expected a file of python -m muonfx.polar.calibrate") from error
    if not isinstance(held, dict) or held.get("format") != FORMAT or not isinstance(held.get("rates"), list):
        raise ValueError(f"{path}: found no {FORMAT!r}; expected a file of python -m muonfx.polar.calibrate")
    return dict(_read_entry(path, place, entry) for place, entry in enumerate(held["rates"]))


def _read_entry(path: str | os.PathLike[str], place: int, entry: object) -> tuple[tuple[str, torch.dtype], Rates]:
    where = f"{path}: entry {place} of rates"
    if not isinstance(entry, dict) or not entry.keys() >= {"device", "dtype", *Rates._fields}:
        raise ValueError(f"{where}: expected device, dtype, {', '.join(Rates._fields)}")
    dtype = getattr(torch, str(entry["dtype"]), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{where}: dtype: found {entry['dtype']!r}, expected one such as 'float32'")
    if entry["device"] not in ("cpu", "cuda"):
        raise ValueError(f"{where}: device: found {entry['device']!r}, expected 'cpu' or 'cuda'")
    halved_from = _NEVER if entry["halved_from"] is None else entry["halved_from"]
    for name, value, most in (
        ("halved_from", halved_from, _NEVER),
        ("share", entry["share"], 1),
        ("pass_cost", entry["pass_cost"], 1e9),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise ValueError(f"{where}: {name}: found {value!r}, expected a number above 0 and at most {most}")
    source = f"{entry['source']}, read from {Path(path).name}"
    return (entry["device"], dtype), Rates(float(halved_from), float(entry["share"]), float(entry["pass_cost"]), source)
