"""Check an optimizer from the command line: ``python -m muonfx.testing package.module:function``.

The exit code is 0 if all laws hold, 1 if a law does not hold, and 2 if the optimizer cannot be imported.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from muonfx.testing.optimizers import OPTIMIZER_LAWS, check_optimizer
from muonfx.testing.optimizers.law import Build


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. Arguments that cannot be parsed end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m muonfx.testing",
        description="Check a torch optimizer against the laws that training loops rely on.",
    )
    parser.add_argument(
        "optimizer",
        help="module:name of a function from a model to its optimizer, or of an optimizer's class, "
        "such as torch.optim:AdamW",
    )
    parser.add_argument(
        "--lr", type=float, default=0.01, help="learning rate of a class; default: 0.01"
    )
    parser.add_argument(
        "--laws", nargs="+", metavar="LAW", choices=OPTIMIZER_LAWS, help="check these laws only"
    )
    options = parser.parse_args(argv)
    # A name that cannot be imported is a mistake of the caller, and is shown without a traceback.
    try:
        build = _imported(options.optimizer, options.lr)
    except (ImportError, AttributeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = check_optimizer(build, laws=options.laws)
    print(report)
    return 1 if report.failures else 0


def _imported(name: str, rate: float) -> Build:
    """Import a name such as "torch.optim:AdamW", and return a function that builds the optimizer of a model.

    The name of a class gives a function that creates this optimizer with the learning rate ``rate``. Any other name is
    the name of such a function.
    """
    _, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"found {name!r}, expected module:name, such as torch.optim:AdamW")
    value: Any = pkgutil.resolve_name(name)
    if isinstance(value, type) and issubclass(value, Optimizer):
        return partial(build_with_class, value, rate)
    return value


def build_with_class(optimizer_class: Any, rate: float, model: nn.Module) -> Optimizer:
    """Return an optimizer of a class for all parameters of a model, with one learning rate."""
    return optimizer_class(model.parameters(), lr=rate)


if __name__ == "__main__":
    sys.exit(main())
