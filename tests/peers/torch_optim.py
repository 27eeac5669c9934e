"""The checks of PyTorch's ``test/test_optim.py``, rewritten: its wheel has their inputs, but not the checks.

Each has torch's name and gets an optimizer of ours, made from tensors with torch's keywords as `OptimizerInfo` and
timm's registry take them, and the keywords that torch tries. Ours need names: tensors without names are numbered here.
Where torch takes tensors that were never trained by a model, a step without any gradient warns here; the checks expect
it.
"""

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)
from torch.testing._internal.common_utils import TestCase

import muonfx as mfx


def named(params: Any) -> list[Any]:
    """Number the tensors that have no names, over all groups."""
    numbers = count()

    def numbered(items: Any) -> list[Any]:
        items = [items] if isinstance(items, torch.Tensor) else list(items)
        return [
            (str(next(numbers)), item) if isinstance(item, torch.Tensor) else item for item in items
        ]

    items = [params] if isinstance(params, torch.Tensor) else list(params)
    is_groups = items and isinstance(items[0], dict)
    return (
        [{**group, "params": numbered(group["params"])} for group in items]
        if is_groups
        else numbered(items)
    )


def _by_dims(params: Any) -> dict[str, str]:
    return {name: "muon" if param.ndim > 1 else "adamw" for name, param in params.items()}


class Muon(mfx.Muon):
    def __init__(self, params: Any, lr: Any = 1e-3, **options: Any) -> None:
        super().__init__(named(params), lr, labels=_by_dims, **options)


class AdamW(mfx.TransformOptimizer):
    def __init__(self, params: Any, lr: Any = 1e-3, weight_decay: Any = 1e-2) -> None:
        super().__init__(named(params), mfx.adamw(lr, b2=0.999, weight_decay=weight_decay))


class Lion(mfx.TransformOptimizer):
    def __init__(self, params: Any, lr: Any = 1e-4, weight_decay: Any = 1e-2) -> None:
        super().__init__(named(params), mfx.lion(lr, weight_decay=weight_decay))


def _lion_inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
    return [
        OptimizerInput(params=None, kwargs=options, desc=str(options))
        for options in ({}, {"lr": 1e-3}, {"lr": torch.tensor(1e-3)}, {"weight_decay": 0.1})
    ]


def _of_torch(name: str) -> OptimizerInfo:
    return next(info for info in optim_db if info.optim_cls.__name__ == name)


# Torch's own inputs for its optimizers of the same name, and the schedulers that torch tries with each.
INFOS = [
    OptimizerInfo(
        optim_cls,
        optim_inputs_func=inputs,
        scheduler_inputs=_of_torch(like).scheduler_inputs,
        supported_impls=(),
        not_og_supported_flags=(),
        supports_complex=False,
    )
    for optim_cls, inputs, like in (
        (Muon, _of_torch("Muon").optim_inputs_func, "Muon"),
        (AdamW, _of_torch("AdamW").optim_inputs_func, "AdamW"),
        (Lion, _lion_inputs, "SGD"),
    )
]

NOT_OURS = {
    "amsgrad": "no transform of that name",
    "maximize": "a chain has `scale(1.0)` in the place of the negative learning rate",
    "ns_coefficients": "`coefficients=`",
    "ns_steps": "`coefficients=` has as many triples as steps",
}
"""Keywords of torch's inputs that ours do not have, and what there is instead."""


def inputs_of(info: OptimizerInfo) -> list[dict[str, Any]]:
    """New keywords each time: a scheduler writes into a rate that is a tensor."""
    found = [one.kwargs for one in info.optim_inputs_func(device="cpu")]
    unknown = {key for options in found for key in options} - {
        "lr",
        "weight_decay",
        "momentum",
        "betas",
    }
    assert unknown <= NOT_OURS.keys(), (
        f"torch has new keywords: {sorted(unknown - NOT_OURS.keys())}"
    )
    return [options for options in found if NOT_OURS.keys().isdisjoint(options)]


Make = Callable[..., torch.optim.Optimizer]
same = TestCase().assertEqual


class Task:
    """A linear layer whose squared output falls."""

    def __init__(self, *, rows: int = 10, columns: int = 5, contiguous: bool = True) -> None:
        torch.manual_seed(0)
        drawn = torch.randn(rows, columns, 2)[..., 0], torch.randn(rows, 2)[..., 0]
        self.weight, self.bias = (nn.Parameter(x.contiguous() if contiguous else x) for x in drawn)
        self.input = torch.randn(columns)

    @property
    def params(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def loss(self, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = (self.weight.mv(self.input) + self.bias).square().sum()
        loss.backward()
        return loss.detach()

    def falls(self, optimizer: torch.optim.Optimizer, makers: Any = (), steps: int = 20) -> None:
        schedulers = [maker(optimizer) for maker in makers]
        first = self.loss(optimizer).item()
        for _ in range(steps):
            loss = optimizer.step(partial(self.loss, optimizer))
            for scheduler in schedulers:
                scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))
        assert self.loss(optimizer).item() < first

    def train(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            self.loss(optimizer)
            optimizer.step()


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))


def train_small(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(2)
    image = torch.rand(1, 4, 16, 16)
    for _ in range(steps):
        optimizer.zero_grad()
        model(image).square().sum().backward()
        optimizer.step()


def step_quietly(optimizer: Any, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="step\\(\\) found no gradient")
        return optimizer.step(*arguments)


def require_twins(task: Task, optimizer: Any, twin: Task, other: Any) -> None:
    """Require that an optimizer of equal parameters loads the state of another, and continues with equal steps."""
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(10):
        task.train(optimizer, 1)
        twin.train(other, 1)
        same(task.params, twin.params)
    same(optimizer.state_dict(), other.state_dict())


# --------------------------------------------------------------------------------------------------------- the checks


def test_errors(info: OptimizerInfo, options: dict[str, Any]) -> None:
    """Each input that torch refuses for all optimizers is refused here, in our words."""
    for one in get_error_inputs_for_all_optims("cpu", torch.float32):
        given = one.optimizer_error_input
        if given.desc == "invalid param type" or "with/without names" in given.desc:
            continue  # `named` gives names: nothing is wrong
        if "lr" in given.kwargs and info.optim_cls.__name__ != "Muon":
            continue  # the argument of a factory, which checks it: tests/internal/test_arguments.py
        params = given.params if given.params is not None else [nn.Parameter(torch.ones(2, 2))]
        try:
            info.optim_cls(params, **given.kwargs)
        except (TypeError, ValueError, RuntimeError):
            continue
        raise AssertionError(f"{given.desc}: accepted")


def test_forloop_goes_right_direction(info: OptimizerInfo, options: dict[str, Any]) -> None:
    for contiguous in (True, False):
        for makers in [*info.scheduler_inputs, ()]:
            task = Task(contiguous=contiguous)
            task.falls(info.optim_cls(task.params, **copy.deepcopy(options)), makers)


def test_param_group_with_lrscheduler_goes_right_direction(
    info: OptimizerInfo, options: dict[str, Any]
) -> None:
    for makers in info.scheduler_inputs:
        task = Task()
        groups = [{"params": [task.weight]}, {"params": [task.bias], "lr": 0.01}]
        task.falls(info.optim_cls(groups, **copy.deepcopy(options)), makers)


def test_tensor_lr(info: OptimizerInfo, options: dict[str, Any]) -> None:
    for shape in ((), (1,)):
        plain, tensor = Task(), Task()
        rest = {key: value for key, value in options.items() if key != "lr"}
        if info.optim_cls.__name__ == "Muon":
            one = info.optim_cls(tensor.params, lr=torch.full(shape, 1e-3), **rest)
        else:  # a factory takes 0-d tensors, a group any of one element
            one = info.optim_cls(tensor.params, lr=torch.tensor(1e-3), **rest)
            for group in one.param_groups:
                group["lr"] = torch.full(shape, 1e-3)
        other = info.optim_cls(plain.params, lr=1e-3, **rest)
        for _ in range(5):
            plain.train(other, 1)
            tensor.train(one, 1)
            same(plain.params, tensor.params)


def test_param_groups_weight_decay(info: OptimizerInfo, options: dict[str, Any]) -> None:
    task = Task()
    first = {key: value for key, value in options.items() if key != "momentum"}
    groups = [
        {"params": [task.weight], **first},
        {"params": [task.bias], **first, "weight_decay": 0.0},
    ]
    task.falls(info.optim_cls(groups))


def test_param_groups_lr(info: OptimizerInfo, options: dict[str, Any]) -> None:
    task = Task()
    irrelevant = nn.Parameter(torch.randn(2))
    before = irrelevant.detach().clone()
    own = {"lr": 1e-3, **{key: value for key, value in options.items() if key != "momentum"}}
    groups = [
        {"params": [task.weight], **own},
        {"params": [task.bias], **own},
        {"params": [irrelevant]},
    ]
    optimizer = info.optim_cls(groups, lr=1e-28)
    first = task.loss(optimizer).item()
    for _ in range(20):
        task.loss(optimizer)
        irrelevant.grad = torch.rand_like(irrelevant)
        optimizer.step()
    assert task.loss(optimizer).item() < first
    same(irrelevant, before)


def test_step_is_noop_when_params_have_no_grad(
    info: OptimizerInfo, options: dict[str, Any]
) -> None:
    params = [nn.Parameter(torch.randn(2, 3), requires_grad=False) for _ in range(2)]
    before = [param.clone() for param in params]
    step_quietly(info.optim_cls(params, **options), lambda: torch.tensor([1.0]))
    same(params, before)


def test_step_is_noop_for_zero_grads(info: OptimizerInfo, options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.randn(5, 1))
    before = param.detach().clone()
    optimizer = info.optim_cls([param], **{**options, "weight_decay": 0.0})
    param.grad = torch.zeros_like(param)
    optimizer.step(lambda: torch.tensor([1.0]))
    same(param, before)


def test_optimizer_can_be_printed(info: OptimizerInfo, options: dict[str, Any]) -> None:
    assert "lr" in repr(info.optim_cls(Task().params, **options))


def test_state_dict_deterministic(info: OptimizerInfo, options: dict[str, Any]) -> None:
    task = Task(rows=2, columns=3)
    optimizer = info.optim_cls(task.params, **copy.deepcopy(options))
    task.train(optimizer, 10)
    twin = copy.deepcopy(task)
    require_twins(task, optimizer, twin, info.optim_cls(twin.params, **copy.deepcopy(options)))


def test_can_load_older_state_dict(info: OptimizerInfo, options: dict[str, Any]) -> None:
    """Our flags have all existed from the start. A saved state loads, and a step follows."""
    model = small()
    optimizer = info.optim_cls(model.parameters(), **options)
    train_small(model, optimizer, 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_small(model, optimizer, 1)


def test_can_load_from_to_named_state_dict(info: OptimizerInfo, options: dict[str, Any]) -> None:
    """Named and named; unnamed tensors are numbered, and ours refuse a state of other names."""
    model = small()
    optimizer = info.optim_cls(model.named_parameters(), **copy.deepcopy(options))
    train_small(model, optimizer, 3)
    other = info.optim_cls(model.named_parameters(), **copy.deepcopy(options))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_small(model, other, 1)
    names = [name for group in other.state_dict()["param_groups"] for name in group["param_names"]]
    same(sorted(names), sorted(name for name, _ in model.named_parameters()))


def test_save_load_equality_with_weights_only(info: OptimizerInfo, options: dict[str, Any]) -> None:
    task = Task()
    optimizer = info.optim_cls(task.params, **options)
    task.train(optimizer, 3)
    saved, file = optimizer.state_dict(), io.BytesIO()
    torch.save(saved, file)
    for weights_only in (False, True):
        file.seek(0)
        same(torch.load(file, weights_only=weights_only), saved)


def test_state_dict_pre_and_post_hook(info: OptimizerInfo, options: dict[str, Any]) -> None:
    optimizer = info.optim_cls(Task().params, **options)

    def after(_: object, saved: dict[str, Any]) -> dict[str, Any]:
        saved["seen"] = saved["state"].pop("test", None)
        return saved

    optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] is None
    handle = optimizer.register_state_dict_pre_hook(lambda one: one.state.__setitem__("test", 1))
    assert optimizer.state_dict()["seen"] == 1
    handle.remove()


def test_load_state_dict_pre_and_post_hook(info: OptimizerInfo, options: dict[str, Any]) -> None:
    optimizer = info.optim_cls(Task().params, **options)
    seen: list[float] = []

    def first(_: object, saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["lr"] = 0.002

    def second(_: object, saved: dict[str, Any]) -> dict[str, Any]:
        saved = copy.deepcopy(saved)
        saved["param_groups"][0]["lr"] = 0.003
        return saved

    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one.param_groups[0]["lr"]))
    optimizer.register_load_state_dict_pre_hook(first)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(second, prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(second)
    optimizer.load_state_dict(optimizer.state_dict())
    same(seen, [0.002, 0.002, 0.003])


def test_step_all_hooks(info: OptimizerInfo, options: dict[str, Any]) -> None:
    optimizer, data = info.optim_cls(Task().params, **options), list[int]()

    def noting(number: int) -> Callable[..., None]:
        return lambda *_: data.append(number)

    handles = [
        register_optimizer_step_pre_hook(noting(0)),
        register_optimizer_step_post_hook(noting(5)),
        optimizer.register_step_pre_hook(noting(1)),
        optimizer.register_step_post_hook(noting(2)),
    ]
    for _ in range(2):
        step_quietly(optimizer)
    for handle in handles:
        handle.remove()
    step_quietly(optimizer)
    same(data, [0, 1, 2, 5] * 2)


def test_deepcopy_copies_all_public_attrs(info: OptimizerInfo, options: dict[str, Any]) -> None:
    task = Task()
    optimizer = info.optim_cls(task.params, **options)
    task.train(optimizer, 3)

    def public(one: object) -> set[str]:
        return {key for key in vars(one) if not key.startswith("_")}

    same(public(copy.deepcopy(optimizer)), public(optimizer))


def test_non_empty_state(info: OptimizerInfo, options: dict[str, Any]) -> None:
    task = Task()
    optimizer = info.optim_cls(task.params, **options)
    task.train(optimizer, 1)
    assert len(optimizer.state) == 2
    assert all(len(state) for state in optimizer.state.values())


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("test_")}


def cases() -> list[tuple[str, OptimizerInfo, int]]:
    """Each check, with each optimizer and the place of each of its inputs."""
    return [
        (name, info, at) for name in CHECKS for info in INFOS for at in range(len(inputs_of(info)))
    ]
