"""Every transform on a CUDA device on paper: fake tensors refuse what mixes devices or reads a value.

The kernels of CUDA have further rules, which fake tensors do not know. `ForeachRules` and `CudaRules` raise where
these would be broken.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import muonfx as mfx
from benchmarks.operations import Counter, paper_device
from muonfx.compact import books
from muonfx.optimizer.over_ranks import SMALL_BUCKET_ON_CUDA
from muonfx.polar.many import DEVICE_SCRATCH
from muonfx.testing import MATRIX_ONLY
from muonfx.testing.transforms import with_value
from muonfx.tree import elementwise as ew
from tests.transforms.test_every_transform import CASES

MATRICES = {"a.weight": (48, 32), "b.weight": (48, 32), "c.weight": (300, 400)}
VECTORS = {"a.bias": (48,), "b.bias": (48,), "scale": ()}
NARROW = (torch.bfloat16, torch.float16)
IN_HOST_MEMORY = {"accumulate"}
"""Transforms that read values by design: they count in host memory."""
WITH_AN_EMPTY_GROUP = {"muon_with_adamw"}
"""Transforms with a case in which no parameter has one of the labels: the group's count is in host memory."""


class ForeachRules(TorchFunctionMode):
    """Raises where a foreach operator on CUDA tensors refuses a scalar in host memory.

    Not among `CudaRules`, because `paper_device` replaces the scalar by a list before an operator is dispatched.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in ("_foreach_add", "_foreach_add_") and isinstance(
            args[1], Tensor
        ):
            assert args[1].is_cuda, f"{function}: the scalar must be on the device of the list"
        return function(*args, **(kwargs or {}))


class CudaRules(TorchDispatchMode):
    """Raises where a step on a CUDA device would fail, wait or lose digits, although fake tensors accept it."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        name = operator._schema.name
        if name in ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"):
            devices.add(torch.device(kwargs.get("device") or tensors[0].device).type)
            waits = len(devices) > 1 and not kwargs.get("non_blocking")
            assert not waits, f"{operator}: waits for a copy between {devices}"
        elif name == "aten::clamp":
            assert len(devices) == 1, f"{operator}: the bounds must be on the device of the tensor"
        if name.removesuffix("_") in (
            "aten::mul",
            "aten::add",
            "aten::_foreach_mul",
            "aten::_foreach_add",
        ):
            has_narrow = any(tensor.dtype in NARROW and tensor.ndim for tensor in tensors)
            scalars = [tensor for tensor in tensors if not tensor.ndim and tensor.is_cuda]
            is_rounded = has_narrow and any(
                scalar.dtype in (torch.float32, torch.float64) for scalar in scalars
            )
            assert not is_rounded, (
                f"{operator}: the kernel rounds a scalar on the device to the dtype of the tensor"
            )
        return operator(*args, **kwargs)


class LiveMemory(TorchDispatchMode):
    """Adds up the bytes of the tensors that exist on the device: ``current``, and the most at any time, ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if (
                isinstance(leaf, Tensor)
                and leaf.is_cuda
                and leaf.untyped_storage() not in self._storages
            ):
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.current)
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._storages.add(storage)
        self._change(storage.nbytes())
        weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, nbytes: int) -> None:
        self.current += nbytes


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Codebooks are copied to the device once, and are not cached for fake tensors.
    monkeypatch.setattr(
        books, "table", lambda numbers, device: torch.empty(len(numbers), device=device)
    )
    with paper_device(Counter(), symmetric_kernels=False), CudaRules(), ForeachRules():
        yield


def empty_leaves(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="cuda") for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "tx"),
    [
        pytest.param(name, tx, id=f"{name}-{index}")
        for name, cases in CASES.items()
        for index, tx in enumerate(cases)
        if name not in IN_HOST_MEMORY
    ],
)
@pytest.mark.usefixtures("fake_gpu")
def test_every_transform_steps_on_a_device(name: str, tx: mfx.Transform, dtype: torch.dtype):
    shapes = MATRICES if name in MATRIX_ONLY else MATRICES | VECTORS
    params = empty_leaves(shapes, dtype)
    state = tx.init(params)
    for donate in (False, True):
        updates, state = tx.update(empty_leaves(shapes, dtype), state, params, donate=donate)
        for leaf in tree_leaves((updates, state)):
            is_count_of_group = (
                name in WITH_AN_EMPTY_GROUP and leaf is not None and leaf.dtype == torch.int64
            )
            assert leaf is None or leaf.is_cuda or is_count_of_group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.usefixtures("fake_gpu")
def test_a_schedule_is_not_rounded_to_bf16_on_a_device(dtype: torch.dtype, reuse: bool):
    rate = mfx.linear_schedule(0.001, 0.0, 10)(torch.zeros((), dtype=torch.int64, device="cuda"))
    (product,) = ew.mul([torch.empty(3, dtype=dtype, device="cuda")], rate, reuse=reuse)
    assert product.dtype == dtype


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.usefixtures("fake_gpu")
def test_a_leaf_without_dims_keeps_its_shape_beside_a_bf16_leaf(reuse: bool):
    rate = torch.zeros((), dtype=torch.float64, device="cuda")
    leaves = [torch.empty((), device="cuda"), torch.empty(3, dtype=torch.bfloat16, device="cuda")]
    products = ew.mul(leaves, rate, reuse=reuse)
    assert [(product.shape, product.dtype) for product in products] == [
        (leaf.shape, leaf.dtype) for leaf in leaves
    ]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.usefixtures("fake_gpu")
def test_a_number_in_host_memory_is_added_on_a_device(reuse: bool):
    eps = torch.full((), 1e-8, dtype=torch.float64)
    (total,) = ew.shift([torch.empty(3, device="cuda")], eps, reuse=reuse)
    assert total.is_cuda


@pytest.mark.parametrize(
    "make_transform",
    [
        mfx.clip_by_global_norm,
        mfx.contrib.scale_by_prodigy,
        lambda number: mfx.cautious(mfx.momentum(), min_share=number),
        lambda number: with_value(mfx.contrib.reduce_on_plateau(min_scale=number)),
    ],
)
@pytest.mark.usefixtures("fake_gpu")
def test_an_update_copies_no_number_from_host_memory(
    make_transform: Callable[[Any], mfx.Transform],
):
    tx = make_transform(torch.full((), 0.5, dtype=torch.float64))
    params = empty_leaves(MATRICES, torch.float32)
    state = tx.init(params)
    tx.update(params, state, params)


@pytest.mark.parametrize(
    "name", ["adamw", "clip_by_global_norm", "momentum", "schedule_free", "skip_nonfinite"]
)
@pytest.mark.usefixtures("fake_gpu")
def test_the_parameters_may_be_on_two_devices(name: str):
    tx = CASES[name][0]
    params = empty_leaves(MATRICES | VECTORS, torch.float32)
    params["c.weight"] = torch.empty(300, 400, device="cuda:1")
    state = tx.init(params)
    updates, _ = tx.update(params, state, params)
    for leaf_name, param in params.items():
        assert updates[leaf_name].device == param.device


@pytest.mark.parametrize(
    "call",
    [
        lambda x, number: x.to("cpu"),
        lambda x, number: x.copy_(torch.empty(3)),
        lambda x, number: x.bfloat16() * number,
        lambda x, number: torch._foreach_mul([x.bfloat16()], number),
        lambda x, number: torch._foreach_add_([x], torch.empty(())),
        lambda x, number: number.clamp(min=torch.empty(())),
        lambda x, number: number.item(),
        lambda x, number: x + torch.empty(3),
    ],
)
@pytest.mark.usefixtures("fake_gpu")
def test_a_mistake_is_seen(call: Callable[[Tensor, Tensor], object]):
    with pytest.raises((AssertionError, RuntimeError)):
        call(torch.empty(3, device="cuda"), torch.empty((), device="cuda"))


@pytest.mark.parametrize(("count", "shape"), [(128, (2048, 1024)), (8, (14336, 4096))])
@pytest.mark.usefixtures("fake_gpu")
def test_a_step_takes_at_most_one_bucket_and_the_scratch_of_one_batch(
    count: int, shape: tuple[int, int]
):
    with LiveMemory() as memory:
        leaves = empty_leaves({f"p{index:03}": shape for index in range(count)}, torch.float32)
        params = {name: nn.Parameter(leaf) for name, leaf in leaves.items()}
        for param in params.values():
            param.grad = torch.empty_like(param)
        optimizer = mfx.TransformOptimizer(params, mfx.muon(1e-3))
        optimizer.step()
        before = memory.current
        memory.peak = before
        optimizer.step()
        assert memory.current == before
        peak = memory.peak - before
    # The updates of all parameters are larger than a bucket.
    assert SMALL_BUCKET_ON_CUDA < peak <= SMALL_BUCKET_ON_CUDA + DEVICE_SCRATCH
