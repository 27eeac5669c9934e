"""timm's checks of an optimizer, rewritten for ours in a registry of timm's own.

Its package imports torchvision. Only `timm.optim` is loaded here, which needs nothing of it but the layers of a model,
for layer-wise decay.
"""

import copy
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest")

from tests.peers.torch_optim import INFOS, Task, require_twins

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm: make engines"),
]


@pytest.fixture(scope="module")
def registry() -> Iterator[Any]:
    spec = importlib.util.find_spec("timm")
    assert spec is not None
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "timm"}
    package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    package.__path__ = list(spec.submodule_search_locations or ())
    models.group_parameters = None
    sys.modules.update({"timm": package, "timm.models": models})
    optim = importlib.import_module("timm.optim")
    made = optim.OptimizerRegistry()
    for info in INFOS:
        made.register(optim.OptimInfo(info.optim_cls.__name__, info.optim_cls, has_eps=False))
    yield made
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        del sys.modules[name]
    sys.modules.update(before)


GROUPS: dict[str, Callable[[Task], Any]] = {
    "tensors": lambda task: task.params,
    "groups": lambda task: [{"params": [task.weight]}, {"params": [task.bias], "lr": 1e-2}],
    "one group of a tensor": lambda task: [{"params": task.bias, "lr": 1e-2}],
}
NAMES = [info.optim_cls.__name__.lower() for info in INFOS]


@pytest.mark.filterwarnings("ignore:Muon. found no parameter with the label 'muon'")  # a bias alone
@pytest.mark.filterwarnings("ignore:load_state_dict. the state dict was saved with other numbers")
@pytest.mark.parametrize("given", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_and_a_copy_that_loads_the_state_goes_on_alike(
    registry: Any, name: str, given: str
) -> None:
    assert name in registry.list_optimizers()
    assert issubclass(
        registry.get_optimizer_class(name, bind_defaults=False), torch.optim.Optimizer
    )
    make = partial(registry.create_optimizer, opt=name, lr=1e-3)
    for contiguous in (True, False):
        task = Task(contiguous=contiguous)
        task.falls(make(GROUPS[given](task)), steps=50)
    task = Task()
    optimizer = make(GROUPS[given](task))
    task.train(optimizer, 5)
    twin = copy.deepcopy(task)
    require_twins(task, optimizer, twin, make(GROUPS[given](twin)))
