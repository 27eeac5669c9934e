"""Our plan beside other libraries' schemes: ``python -m benchmarks.simulator --model llama-70b --mesh dp=8,shard=64``.

Takes the options of ``python -m muonfx.sharding.plan``, whose rows are those of the plan that runs; the others are
counted in the same units, with the same Newton-Schulz iteration and dtypes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.simulator.peers import PEERS
from muonfx.sharding.plan import __main__ as plan
from muonfx.sharding.plan.tally import OURS


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and return 0; wrong usage ends the process with 2."""
    return plan.main(argv, (*OURS, *PEERS), prog="python -m benchmarks.simulator")


if __name__ == "__main__":
    sys.exit(main())
