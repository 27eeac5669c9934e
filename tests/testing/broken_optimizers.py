"""Optimizers with one mistake each, of kinds that were found in real ones: `check_optimizer` should find each."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Momentum(Optimizer):
    """Momentum and a normalized step, right in all respects. Others change one method."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)
        return loss

    def update(self, param: Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum(param)
        param.sub_(self.direction(param, momentum) * self.rate(group))

    def momentum(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        state["momentum"].mul_(0.9).add_(param.grad)
        return state["momentum"]

    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        return momentum / (momentum.abs() + 1e-8)

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"]


class DrawsNoise(Momentum):
    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        return momentum.sign() + torch.randn_like(momentum)


class CountsOutsideOfItsState(Momentum):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def rate(self, group: dict[str, Any]) -> Any:
        self.count += 1
        return group["lr"] / self.count


class NarrowsItsState(Momentum):
    def momentum(self, param: Tensor) -> Tensor:
        momentum = super().momentum(param)
        self.state[param]["momentum"] = momentum.to(torch.float16).to(torch.bfloat16)
        return momentum


class RequiresEveryGradient(Momentum):
    def step(self, closure: Any = None) -> Any:
        gradients = [param.grad.abs() for group in self.param_groups for param in group["params"]]
        return super().step(closure) if gradients else None


class DividesByTheNorm(Momentum):
    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        return momentum / momentum.norm()


class HidesNaN(Momentum):
    def momentum(self, param: Tensor) -> Tensor:
        param.grad = param.grad.nan_to_num()
        return super().momentum(param)


class SpreadsNaN(Momentum):
    def step(self, closure: Any = None) -> Any:
        params = [
            param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        return super().step(closure)


class SquaresInFp32(Momentum):
    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        square = momentum.square().sum() + 1e-8
        return momentum * (square / square.sqrt() / square)


class UnpacksTwoDims(Momentum):
    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        if param.ndim > 1:
            rows, columns = param.shape
            return momentum.sign() * max(1, rows / max(columns, 1)) ** 0.5
        return momentum.sign()


class WidensParameters(Momentum):
    def update(self, param: Tensor, group: dict[str, Any]) -> None:
        param.data = param.data.float()
        param.grad = param.grad.float()
        super().update(param, group)


class MovesFrozenParameters(Momentum):
    def step(self, closure: Any = None) -> Any:
        for param, state in self.state.items():
            if param.grad is None and "momentum" in state:
                param.data.sub_(state["momentum"], alpha=0.01)
        return super().step(closure)


class ReadsItsRateOnce(Momentum):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.first_rate = self.defaults["lr"]

    def rate(self, group: dict[str, Any]) -> Any:
        return self.first_rate


class TakesFloatsOnly(Momentum):
    def rate(self, group: dict[str, Any]) -> Any:
        if not isinstance(group["lr"], float):
            raise TypeError("lr must be a float")
        return group["lr"]


class ForgetsZeroGrad(Momentum):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups[1:]:
            for param in group["params"]:
                param.grad = None


class CallsTheClosureWithoutGradients(Momentum):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        return loss


class MultipliesUnderAutocast(Momentum):
    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        if param.ndim != 2 or isinstance(param, DTensor):
            return momentum.sign()
        return momentum @ (momentum.mT @ momentum)


class StepsTwiceWhenCompiled(Momentum):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * 2 if torch.compiler.is_compiling() else group["lr"]


class FailsOnTheLastRank(Momentum):
    """Raises an error in the step of one rank."""

    def step(self, closure: Any = None) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise RuntimeError("out of paper")
        return super().step(closure)


class DependsOnTheRank(Momentum):
    def rate(self, group: dict[str, Any]) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return group["lr"] * (1 + rank)


class NormalizesItsShard(Momentum):
    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        if not isinstance(momentum, DTensor):
            return momentum / (momentum.norm() + 1e-8)
        local = momentum.to_local()
        direction = local / (local.norm() + 1e-8)
        return DTensor.from_local(
            direction,
            momentum.device_mesh,
            momentum.placements,
            shape=momentum.shape,
            stride=momentum.stride(),
        )


def build(name: str, model: nn.Module) -> Optimizer:
    """Return the optimizer with this class name for a model."""
    return globals()[name](model.parameters())
