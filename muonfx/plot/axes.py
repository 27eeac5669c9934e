"""The style of all plots, its colours, and the axes to draw on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib import style as styles
from matplotlib.axes import Axes

COLORS = {
    "blue": "#5b6ee1",
    "orange": "#d0702c",
    "green": "#2a9d8f",
    "purple": "#b45cb0",
    "red": "#d1495b",
    "gray": "#7a7f8c",
}
"""The colours of muonfx plots, in their order; each is legible on white and on nearly black pages."""

_STYLE = Path(__file__).with_name("style.mplstyle")


@contextmanager
def style() -> Generator[None]:
    """Apply the style of muonfx plots to figures that are created in a ``with`` block.

    The background is transparent, axes and text are gray, and colours have a medium lightness, so that pictures are
    legible on light and dark pages. The context manager also decorates functions: ``@mfx.plot.style()``.
    ``matplotlib.pyplot.style.use("muonfx.plot.style")`` sets the style permanently.

    >>> import muonfx as mfx
    >>> from matplotlib import pyplot as plt
    >>> with mfx.plot.style():
    ...     figure, ax = plt.subplots()
    >>> figure.get_facecolor()
    (0.0, 0.0, 0.0, 0.0)
    >>> plt.close(figure)
    """
    with styles.context(_STYLE):
        yield
        # The first figure of a process may turn on interactive mode: a notebook shows no figure without it. The end of
        # the style would turn it off again.
        interactive = matplotlib.is_interactive()
    matplotlib.interactive(interactive)


@contextmanager
def axes_for(ax: Axes | None, height: float | None = None) -> Generator[Axes]:
    """Yield the given axes, or the axes of a new figure in the muonfx style that is ``height`` inches high.

    Every plot draws in a ``with`` block of it, so that the style also applies to lines and text.
    """
    if ax is not None:  # the caller's axes have the caller's style
        yield ax
        return
    from matplotlib import pyplot as plt

    with style():
        width, default_height = plt.rcParams["figure.figsize"]
        _, ax = plt.subplots(figsize=(width, height or default_height))
        yield ax
