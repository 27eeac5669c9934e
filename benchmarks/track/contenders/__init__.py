"""The contenders, one per module.

Each module has a docstring, whose first line is shown in the table; ``SETTINGS``, the numbers with which tuning starts;
and ``optimizer(model, steps, **settings)``, which returns a function that is called after each backward pass.
"""
