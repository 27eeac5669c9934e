"""Predict the cost of sharded Muon: ``python -m benchmarks.simulator --model llama-70b --mesh dp=8,shard=64``.

Prints the bytes, operations and memory of each scheme, ours and those of other libraries, for a model on a mesh of
ranks. Our rows are computed from the plan of a run of that size. No tensor is allocated and no process is started.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch

from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.models import MODELS, from_shapes, model
from benchmarks.simulator.peers import PEERS
from benchmarks.simulator.report import Cluster, rows, table
from benchmarks.simulator.tally import OURS

__all__ = ["main"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LAYOUTS = ("fsdp2", "hsdp", "zero-whole", "zero-flat", "ddp")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and return 0; invalid arguments exit with status 2.

    Args:
        argv: the command-line arguments; None for those of this process.

    >>> main(["--model", "gpt2-xl", "--mesh", "shard=8", "--layout", "zero-whole"])
    gpt2-xl: 1.558 billion parameters, 1.475 billion of them in 192 matrices for Muon
    shapes: config.json of openai-community/gpt2-xl
    mesh: shard=8: 8 ranks, nodes of 8
    ...
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        mesh = Mesh.parse(options.mesh)
        chosen = (
            model(options.model) if options.shapes is None else from_shapes(_shapes(options.shapes))
        )
        cluster = Cluster(
            _flops(options.flops),
            *_bandwidths(options.bandwidth),
            node=options.node,
            latency=options.latency / 1e6,
            overhead=options.overhead / 1e6,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    state_size, bucket = _DTYPES[options.state].itemsize, options.bucket * 2**20
    on = Setting(chosen, mesh, options.device, _DTYPES[options.dtype], state_size, bucket)
    layout = {"hsdp": "fsdp2"}.get(options.layout, options.layout)
    asked = [scheme for scheme in (*OURS, *PEERS) if layout in (None, scheme.layout)]
    if options.json:
        about = {"model": chosen.name, "parameters": chosen.numel, "matrices": len(on.matrices)}
        figures = [{**row._asdict(), "step": row.step} for row in rows(on, cluster, asked)]
        settings = {"mesh": mesh._asdict(), "machine": cluster._asdict(), "dtype": options.dtype}
        print(json.dumps({**about, **settings, "schemes": figures}, indent=2))
    else:
        print(table(on, cluster, asked))
    return 0


def _bandwidths(text: str) -> tuple[float, float]:
    try:
        intra, inter = (float(part) * 1e9 for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"bandwidth: found {text!r}, expected two numbers of GB/s such as '300,40'"
        ) from None
    if not (0 < intra < math.inf and 0 < inter < math.inf):
        raise ValueError(f"bandwidth: found {text!r}, expected two finite numbers above 0")
    return intra, inter


def _flops(text: str) -> tuple[tuple[int, float], ...]:
    """Parse one rate, or rates by side."""
    points: list[tuple[int, float]] = []
    try:
        for part in text.split(","):
            side, colon, rate = part.rpartition(":")
            points.append((int(side) if colon else 1, float(rate) * 1e12))
    except ValueError:
        points = []
    sides = [side for side, _ in points]
    if not points or sides[0] < 1 or any(a >= b for a, b in pairwise(sides)):
        raise ValueError(
            f"flops: found {text!r}, expected TFLOP/s such as '400', or by rising sides '128:50,1024:400'"
        )
    if not all(0 < rate < math.inf for _, rate in points):
        raise ValueError(f"flops: found {text!r}, expected finite rates above 0")
    return tuple(points)


def _shapes(text: str) -> list[tuple[int, ...]]:
    """Parse shapes such as ``"512x512*8,512x2048"``."""
    shapes: list[tuple[int, ...]] = []
    for part in text.split(","):
        sides, _, often = part.strip().partition("*")
        numbers = [*sides.split("x"), often or "1"]
        readable = all(number.isdecimal() and 0 < len(number) < 14 for number in numbers)
        if not readable or not 0 < int(numbers[-1]) <= _MOST:
            raise ValueError(
                f"shapes: found {part!r}, expected a shape and a count, such as '512x2048*8', of at most {_MOST:,}"
            )
        shapes += [tuple(map(int, numbers[:-1]))] * int(numbers[-1])
    return shapes


_MOST = 1_000_000


def _microseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a number of microseconds of at least 0"
        )
    return value


def _size(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a whole number from 1 to 999,999,999"
        )
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator",
        description="Predict the bytes, operations and memory of Muon on many ranks, for each scheme.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument(
        "--model",
        metavar="NAME|config.json",
        help=f"{', '.join(MODELS)}, or a config.json of Hugging Face",
    )
    whose.add_argument(
        "--shapes",
        metavar="512x512*8,512x2048",
        help="shapes of the parameters, instead of a model",
    )
    parser.add_argument(
        "--mesh",
        required=True,
        metavar="dp=64,shard=8",
        help="dp x shard x tp ranks; ep is within shard",
    )
    parser.add_argument(
        "--layout", choices=_LAYOUTS, help="only schemes of this layout; hsdp is fsdp2 with dp > 1"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bf16", help="dtype of messages and of Newton-Schulz"
    )
    parser.add_argument(
        "--state", choices=_DTYPES, default="fp32", help="dtype of momentum and moments"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what computes")
    parser.add_argument(
        "--flops",
        default="400",
        metavar="400|128:50,1024:400",
        help="TFLOP/s of a rank's matrix products, or rates by the short side of the matrix",
    )
    parser.add_argument(
        "--bandwidth",
        default="300,40",
        metavar="INTRA,INTER",
        help="GB/s that a rank sends within and out of its node",
    )
    parser.add_argument(
        "--latency", type=_microseconds, default=0.0, metavar="US", help="microseconds per exchange"
    )
    parser.add_argument(
        "--overhead", type=_microseconds, default=0.0, metavar="US", help="microseconds per matrix"
    )
    parser.add_argument("--node", type=_size, default=8, help="ranks per node")
    parser.add_argument("--bucket", type=_size, default=256, help="size of a bucket in MiB")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
