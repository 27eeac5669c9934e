"""AdamW for the hidden matrices, with a rate of its own, next to the same AdamW for the rest."""

from benchmarks.track.parts import adamw, with_adamw

SETTINGS = {"rate": 0.005}
STEPS = 500


def optimizer(model, steps, rate):
    hidden = adamw(rate, steps)
    return with_adamw(model, hidden, steps)
