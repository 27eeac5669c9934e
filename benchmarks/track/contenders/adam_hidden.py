"""AdamW for the hidden matrices, with a rate of its own, next to the same AdamW for the rest."""

from benchmarks.track.parts import ADAM_RATE, DECAY, adamw, with_adamw

SETTINGS = {"rate": 0.005}
STEPS = 500


def optimizer(model, steps, rate, decay=DECAY, rest=ADAM_RATE):
    hidden = adamw(rate, steps, decay)
    return with_adamw(model, hidden, steps, rest, decay)
