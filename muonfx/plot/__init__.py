"""Plots of optimizers: losses, schedules, polynomials, spectra, sizes of updates, sharding plans, memory of states.

Every function draws on one matplotlib ``Axes`` and returns it. Without ``ax``, it creates one in the `style` of the
package, which is legible on light and dark pages. Needs matplotlib:
``pip install 'muonfx[examples]'``.

>>> import muonfx as mfx
>>> ax = mfx.plot.plot_polynomial("keller")
>>> ax.figure.savefig("keller.svg")  # doctest: +SKIP
"""

try:
    import matplotlib as _  # noqa: F401
except ImportError as error:
    raise ImportError("muonfx.plot needs matplotlib: pip install 'muonfx[examples]'") from error

from muonfx.plot.axes import COLORS, style
from muonfx.plot.bars import plot_plan, plot_state_memory, plot_update_rms
from muonfx.plot.curves import plot_band, plot_polynomial, plot_spectrum
from muonfx.plot.studies import plot_losses, plot_rates, plot_schedule, plot_steps_to

__all__ = [
    "COLORS",
    "plot_band",
    "plot_losses",
    "plot_plan",
    "plot_polynomial",
    "plot_rates",
    "plot_schedule",
    "plot_spectrum",
    "plot_state_memory",
    "plot_steps_to",
    "plot_update_rms",
    "style",
]


def __dir__() -> list[str]:
    return sorted(__all__)
