"""Compare optimizers over rates and seeds in one call.

A `Task` consists of initial parameters, batches and a loss. `study` trains it with each optimizer at each rate from
each seed, all seeds and rates of one optimizer together under ``torch.func.vmap``, and returns rows. The functions
`muonfx.plot.plot_losses`, `muonfx.plot.plot_rates` and `muonfx.plot.plot_steps_to` draw them.
"""

from muonfx.studies.study import study
from muonfx.studies.task import Task

__all__ = ["Task", "study"]


def __dir__() -> list[str]:
    return sorted(__all__)
