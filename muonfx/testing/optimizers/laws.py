"""The laws for optimizers that one process checks. The first line of each docstring is the law."""

from __future__ import annotations

import copy
import io
import tempfile

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from muonfx.testing.examples import copied_tree
from muonfx.testing.optimizers.law import Build, NotApplicable, optimizer_law
from muonfx.testing.optimizers.runs import (
    STEPS,
    ReversedModel,
    Run,
    UnusualShapes,
    load_by_dcp,
    require_close,
    require_equal,
    require_finite,
    require_moved,
    require_same_end,
    require_unmoved,
    resumed_run,
    seeded,
    state_tensors,
)
from muonfx.testing.violation import Breach, require_spec


@optimizer_law
def steps_are_repeatable(build: Build) -> None:
    """Two runs from the same weights with the same gradients end in the same bits."""
    first = Run(build).steps(STEPS)
    second = Run(build).steps(STEPS)
    require_equal(second.values(), first.values(), "a second run")


# ----------------------------------------------------------------------------------------------------- stop and resume


@optimizer_law
def torch_save_resumes_the_run(build: Build) -> None:
    """A run resumed from torch.save of the state dict ends in the bits of the run that was not stopped."""
    # Save after three steps, and load into a new optimizer of a model with the same weights.
    stopped = Run(build).steps(STEPS)
    file = io.BytesIO()
    torch.save(stopped.optimizer.state_dict(), file)
    file.seek(0)
    resumed = resumed_run(build, stopped)
    resumed.optimizer.load_state_dict(torch.load(file, weights_only=True))
    # Both take three more steps with the same gradients, and are compared.
    require_same_end(resumed, stopped)


@optimizer_law
def dcp_resumes_the_run(build: Build) -> None:
    """A run resumed from torch.distributed.checkpoint ends in the bits of the run that was not stopped."""
    stopped = Run(build).steps(STEPS)
    resumed = resumed_run(build, stopped)
    with tempfile.TemporaryDirectory() as folder:
        load_by_dcp(resumed, stopped, folder, no_dist=True)
    require_same_end(resumed, stopped)


@optimizer_law
def names_resume_the_run_in_another_order(build: Build) -> None:
    """A state dict by names resumes a run whose model registers its layers in another order."""
    stopped = Run(build).steps(STEPS)
    saved = copy.deepcopy(get_optimizer_state_dict(stopped.model, stopped.optimizer))
    # The same layers in the opposite order: parameter 0 of one model is the last of the other. Only names match.
    resumed = resumed_run(build, stopped, seeded(ReversedModel))
    set_optimizer_state_dict(resumed.model, resumed.optimizer, saved)
    start = stopped.values()
    stopped.steps(STEPS)
    resumed.steps(STEPS)
    require_close(resumed.values(), stopped.values(), start, 1e-5, "the resumed run")


@optimizer_law
def states_keep_their_dtypes(build: Build) -> None:
    """Each tensor of the state keeps its dtype and shape from the first step on, and through load_state_dict."""
    run = Run(build).steps(1)  # many optimizers create their state at the first step
    first = copied_tree(state_tensors(run.optimizer))
    run.steps(STEPS)
    _require_same_specs("after more steps, the state", run.optimizer, first)
    # `load_state_dict` of torch casts the state to the dtype of its parameter, unless the optimizer prevents this.
    loaded = Run(build)
    loaded.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    _require_same_specs("after load_state_dict, the state", loaded.optimizer, first)


def _require_same_specs(what: str, optimizer: Optimizer, first: dict[str, Tensor]) -> None:
    state = state_tensors(optimizer)
    difference = sorted(state.keys() ^ first.keys())
    if difference:
        raise Breach(
            what, f"has other entries than after the first step: {', '.join(difference[:4])}"
        )
    require_spec(what, state, first, "after the first step")


# ----------------------------------------------------------------------------------------------------------- gradients


@optimizer_law
def parameters_without_gradients_stay(build: Build) -> None:
    """A parameter whose gradient is None does not change, and the step raises no error."""
    names_without = ["up.weight", "norm.bias"]

    def without_gradients(name: str, grad: Tensor) -> Tensor | None:
        if name in names_without:
            return None
        return grad

    # One usual step before, so that these parameters have momentum, which must not move them either.
    run = Run(build).steps(1)
    before = run.values()
    run.step(without_gradients)
    after = run.values()
    require_unmoved(before, after, names_without, "with the gradient None")
    require_moved(
        before,
        after,
        run.optimized.keys() - names_without,
        "beside parameters with the gradient None",
    )


@optimizer_law
def zero_gradients_give_finite_values(build: Build) -> None:
    """Gradients of zeros, from the first step on and after others, leave all parameters finite."""

    def zeros(name: str, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)

    run = Run(build)
    run.step(zeros)  # the moments are zero too: 0 / 0 would give NaN
    require_finite(run.values(), "after a first step with zeros")
    run.step(zeros)
    run.step()
    require_finite(run.values(), "after a step that follows steps with zeros")


@optimizer_law
def nan_stays_in_its_parameter(build: Build) -> None:
    """A NaN in one gradient stays visible in its own parameter, and changes no other parameter."""
    name_of_nan = _a_hidden_matrix(Run(build))

    def with_nan(name: str, grad: Tensor) -> Tensor:
        if name == name_of_nan:
            grad[0, 0] = torch.nan
        return grad

    run = Run(build).steps(1)
    run.step(with_nan)
    values = run.values()
    if bool(values[name_of_nan].isfinite().all()):
        raise Breach(
            name_of_nan,
            "is finite after a step whose gradient has a NaN, expected that the NaN is visible",
        )
    usual_values = Run(build).steps(2).values()
    del usual_values[name_of_nan]  # all others are compared
    require_equal(values, usual_values, f"with a NaN in the gradient of {name_of_nan}")


@optimizer_law
def gradients_of_any_norm_give_finite_values(build: Build) -> None:
    """Gradients whose elements have sizes from 1e-30 to 1e30 leave all parameters finite."""
    # The square of 1e30 is infinite in float32, and the square of 1e-30 is zero.
    for exponent in (-30, -20, -10, 10, 19, 30):
        size = 10.0**exponent
        run = Run(build)
        for _ in range(2):
            run.step(lambda name, grad, size=size: grad * size)
        require_finite(run.values(), f"with gradients of size 1e{exponent}")


def _a_hidden_matrix(run: Run) -> str:
    """Return the name of a hidden matrix that the optimizer has."""
    for name in ("up.weight", "down.weight"):
        if name in run.optimized:
            return name
    raise NotApplicable("the optimizer has no hidden matrix of the model")


# ------------------------------------------------------------------------------------------------- shapes and dtypes


@optimizer_law
def unusual_shapes_are_taken(build: Build) -> None:
    """Parameters with the shapes [1, N], [N, 1], [0, N] and with four dims are updated, or refused at construction."""
    # An optimizer may refuse shapes when it is built. It must not fail or give NaN later, in a step.
    try:
        run = Run(build, seeded(UnusualShapes))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise NotApplicable(f"refused at construction: {error}") from error
    before = run.values()
    run.steps(STEPS)
    require_finite(run.values(), "with unusual shapes")
    with_elements = [name for name, param in run.optimized.items() if param.numel()]
    require_moved(before, run.values(), with_elements, "with unusual shapes")


@optimizer_law
def bf16_parameters_are_trained(build: Build) -> None:
    """Parameters in bfloat16 keep their dtype, change, and stay finite."""
    run = Run(build, seeded().to(torch.bfloat16))
    before = run.values()
    run.steps(STEPS)
    for name, value in run.values().items():
        if value.dtype != torch.bfloat16:
            raise Breach(name, f"has dtype {value.dtype}, expected torch.bfloat16")
    require_finite(run.values(), "in bfloat16")
    require_moved(before, run.values(), run.optimized, "in bfloat16")


# ------------------------------------------------------------------------------------------------------ training loops


@optimizer_law
def frozen_parameters_stay(build: Build) -> None:
    """A parameter that is frozen after some steps stays, and trains again once it is unfrozen."""
    run = Run(build).steps(2)
    name = _a_hidden_matrix(run)
    param = run.params[name]
    before = run.values()
    param.requires_grad_(False)
    run.steps(2)
    require_unmoved(before, run.values(), [name], "while it is frozen")
    param.requires_grad_(True)
    run.steps(1)
    require_moved(before, run.values(), [name], "after it is unfrozen")


@optimizer_law
def rates_are_read_at_each_step(build: Build) -> None:
    """A rate that is written into the groups counts from the next step on: with the rate zero nothing moves."""
    # An optimizer that copies the rate at construction would still move with the rate zero.
    run = Run(build).steps(2)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    before = run.values()
    run.set_rate(0.0)
    run.steps(1)
    require_unmoved(before, run.values(), run.params, "with the rate 0.0")
    # With the former rates, they move again.
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    run.steps(1)
    require_moved(before, run.values(), run.optimized, "with the former rate again")


@optimizer_law
def rates_may_be_tensors(build: Build) -> None:
    """A rate that is a tensor gives the update of the same rate as a float, and is read at each step."""
    by_float = Run(build).steps(1)
    by_tensor = Run(build).steps(1)
    start = by_float.values()
    for rate in (0.25, 0.125):  # another rate at each step; both are exact in every dtype
        by_float.set_rate(rate)
        by_tensor.set_rate(torch.tensor(rate))
        by_float.step()
        by_tensor.step()
    require_close(by_tensor.values(), by_float.values(), start, 1e-5, "with a tensor as the rate")


@optimizer_law
def zero_grad_clears_every_gradient(build: Build) -> None:
    """zero_grad clears the gradients of all parameters of the optimizer."""
    run = Run(build)
    run.set_gradients()
    run.optimizer.zero_grad()
    for name, param in run.optimized.items():
        if param.grad is not None and bool(param.grad.any()):
            raise Breach(name, "has a gradient after zero_grad()")


@optimizer_law
def closures_are_called_with_gradients_enabled(build: Build) -> None:
    """step(closure) calls the closure with gradients enabled, and returns its loss."""
    run = Run(build)
    modes: list[bool] = []  # for each call of the closure, whether gradients are enabled

    def closure() -> float:
        modes.append(torch.is_grad_enabled())
        run.set_gradients()
        return 1.5

    loss = run.optimizer.step(closure)
    if not modes:
        raise Breach("step(closure)", "has not called the closure")
    if not all(modes):
        raise Breach("step(closure)", "has called the closure with gradients disabled")
    if loss != 1.5:
        raise Breach("step(closure)", f"returned {loss!r}, expected the loss of the closure, 1.5")


@optimizer_law
def autocast_changes_nothing(build: Build) -> None:
    """A step under torch.autocast has the bits of a step outside of it."""
    outside = Run(build).steps(STEPS)
    inside = Run(build)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside.steps(STEPS)
    require_equal(inside.values(), outside.values(), "under autocast")


@optimizer_law
def compiled_steps_equal_eager_ones(build: Build) -> None:
    """A step that torch.compile has traced gives the update of the eager step."""
    eager = Run(build)
    start = eager.values()
    compiled = Run(build)
    compiled_step = torch.compile(lambda: compiled.optimizer.step(), backend="aot_eager")
    for _ in range(STEPS):
        eager.step()
        # The same, but with the compiled step of the optimizer.
        compiled.set_gradients()
        compiled_step()
        compiled.next_step += 1
    require_close(compiled.values(), eager.values(), start, 1e-3, "compiled")
