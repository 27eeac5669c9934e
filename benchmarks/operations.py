"""One optimizer step on paper: the operations, FLOPs and bytes that it takes on a CUDA device. Nothing is computed.

The parameters are fake tensors on a CUDA device, so a model of any size needs neither a GPU nor memory. The optimizers
run as they are, with the choices of a device of compute capability 9.0 (`CAPABILITY`). `Counter` records each operation
that would start a kernel; views, allocations and questions about devices start none. A kernel of `torch._foreach_*` is
one operation, whatever the number of tensors.

The time is an estimate, by which two versions of a step can be compared without a GPU: for each operation, the time
to start it (`LAUNCH_SECONDS`) and the longer of two times, one for its FLOPs and one for reading its inputs and writing
its results. Caches, overlap and small products that do not fill the device are not considered.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import muonfx as mfx
from benchmarks.peers import installed
from muonfx.polar import policy, quack
from muonfx.tree import elementwise

CAPABILITY = (9, 0)
"""The compute capability of the device whose choices are counted: Hopper."""

FLOPS_PER_SECOND = 660e12
"""The products in bf16 that an H100 was seen to reach."""

BYTES_PER_SECOND = 2.8e12
"""The memory bandwidth that an H100 was seen to reach."""

LAUNCH_SECONDS = 4e-6
"""The time to start one kernel from Python."""

ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
}
"""Operators of ``aten`` that launch no kernel although they return no view of an input."""

PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Operators that multiply matrices, and the position of the left factor among their arguments."""


RUN = mfx.Transform.run
"""The method that runs a transform, before `paper_device` replaces it."""


LARGEST_STORAGE = 1 << 40
"""The distance of the addresses of two storages in bytes: more than any storage has."""


class Totals(NamedTuple):
    """The sums over the operations of a step."""

    operations: int
    flops: float
    product_bytes: float
    """The bytes that matrix products read and write."""
    other_bytes: float
    """The bytes that all other operations read and write."""
    seconds: float


class Counter(TorchDispatchMode):
    """Adds up the operations that launch kernels while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = Totals(0, 0.0, 0.0, 0.0, 0.0)
        self.bytes_of_transforms: dict[str, float] = defaultdict(float)
        """The bytes outside of products, by the name of the innermost transform that runs; "" outside of transforms."""
        self.running = [""]
        """The names of the transforms that run, each called by the one before it."""

    def symmetric_matmul(
        self,
        p: Tensor,
        *,
        addend: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Tensor,
    ) -> Tensor:
        """Count a product by quack-kernels, which computes one half of ``p p^T``. It replaces quack's function."""
        read = [p] if addend is None else [p, addend]
        self.add(p.numel() * p.shape[-2], sum(map(touched_bytes, [*read, out])), in_product=True)
        return out

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count it if it launches a kernel."""
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if launches_kernel(operator):
            self.add(
                flops_of(operator, args),
                bytes_of(operator, args, kwargs, result),
                is_product(operator),
            )
        return result

    def add(self, flops: float, nbytes: float, in_product: bool) -> None:
        """Count one kernel."""
        seconds = LAUNCH_SECONDS + max(flops / FLOPS_PER_SECOND, nbytes / BYTES_PER_SECOND)
        before = self.totals
        self.totals = Totals(
            before.operations + 1,
            before.flops + flops,
            before.product_bytes + (nbytes if in_product else 0.0),
            before.other_bytes + (0.0 if in_product else nbytes),
            before.seconds + seconds,
        )
        if not in_product:
            self.bytes_of_transforms[self.running[-1]] += nbytes

    def run(self, tx: mfx.Transform, *args: Any, **kwargs: Any) -> Any:
        """Run a transform, and count its operations under its name. It replaces `Transform.run`."""
        self.running.append(tx.name)
        try:
            return RUN(tx, *args, **kwargs)
        finally:
            self.running.pop()


def launches_kernel(operator: Any) -> bool:
    """Return True if an operator reads or writes elements.

    >>> aten = torch.ops.aten
    >>> [
    ...     launches_kernel(op)
    ...     for op in (aten.bmm.out, aten.mul_.Tensor, aten.transpose.int, aten.empty.memory_format)
    ... ]
    [True, True, False, False]
    """
    if (
        operator.namespace != "aten"
        or name_of(operator) in ALLOCATIONS
        or name_of(operator) == "promote_types"
    ):
        return False
    returns = operator._schema.returns
    is_view = any(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )
    return not is_view


def name_of(operator: Any) -> str:
    """Return the name of an operator without its namespace and overload, such as "bmm"."""
    return operator._schema.name.split("::")[1]


def is_product(operator: Any) -> bool:
    """Return True if an operator multiplies matrices."""
    return name_of(operator) in PRODUCTS


def flops_of(operator: Any, args: Any) -> float:
    """Return the floating-point operations of a matrix product, two for a multiply-add; 0 for other operations."""
    if not is_product(operator):
        return 0.0
    first = PRODUCTS[name_of(operator)]
    left, right = args[first], args[first + 1]
    return 2.0 * left.numel() * right.shape[-1]


def bytes_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operation reads from its inputs and writes to its results."""
    written = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    read = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
    for argument in operator._schema.arguments:
        is_output_only = argument.name == "out" and argument.is_out
        if argument.name in kwargs and not is_output_only:
            read += [
                value for value in tree_leaves(kwargs[argument.name]) if isinstance(value, Tensor)
            ]
    if not written:  # a foreach operator in place returns nothing, and writes its first argument
        written = [value for value in tree_leaves(args[0]) if isinstance(value, Tensor)]
    is_overwritten = name_of(operator) in ("copy_", "_foreach_copy_", "zero_", "fill_")
    if is_overwritten:  # the first argument is written and not read
        read = read[len(written) :]
    return sum(map(touched_bytes, read)) + sum(map(touched_bytes, written))


def touched_bytes(x: Tensor) -> int:
    """Return the bytes of the elements of a tensor; an element that is repeated by `expand` counts once."""
    sides = [side for side, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return math.prod(sides) * x.dtype.itemsize


# ------------------------------------------------------------------------------------------------ a device on paper


class ForFakeTensors(TorchFunctionMode):
    """Replaces calls that fail for fake tensors of a CUDA device by others with the same kernels.

    Fake storages have no address, but code compares addresses to avoid copies, so each gets an address of its own.
    Indexing, `~` and copies query the device of the CUDA driver. A foreach operator with one number in a tensor, such
    as a step count, reads its value, which a fake tensor lacks; with a list of this tensor it does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[int, int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        if function is Tensor.data_ptr:
            storage = args[0].untyped_storage()._cdata
            start = self._addresses.setdefault(
                storage, (1 + len(self._addresses)) * LARGEST_STORAGE
            )
            return start + args[0].storage_offset() * args[0].itemsize
        if function is Tensor.__getitem__:
            return indexed(*args)
        if function is Tensor.__invert__:
            return args[0].bitwise_not()
        if function is Tensor.contiguous and not args[0].is_contiguous():
            return args[0].clone(memory_format=torch.contiguous_format)
        if function is Tensor.copy_:
            return torch._foreach_copy_([args[0]], [args[1]])[0]
        is_foreach = getattr(function, "__name__", "").startswith("_foreach_")
        if is_foreach and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], [args[1]] * len(args[0]), *args[2:])
        return function(*args, **(kwargs or {}))


def indexed(x: Tensor, index: Any) -> Tensor:
    """Return ``x[index]`` for an index of ints, slices, None and a leading ellipsis.

    >>> x = torch.arange(6).view(2, 3)
    >>> (
    ...     [indexed(x, index).tolist() for index in (1, (0, slice(1, 3)))],
    ...     indexed(x, (None, 0, None)).shape,
    ... )
    ([[3, 4, 5], [1, 2]], torch.Size([1, 1, 3]))
    """
    dim = 0
    items = list(index) if isinstance(index, tuple) else [index]
    if items[0] is Ellipsis:
        added_dims = items.count(None)
        indexed_dims = len(items) - 1 - added_dims
        items[:1] = [slice(None)] * (x.ndim - indexed_dims)
    for item in items:
        if item is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif isinstance(item, int):
            x = x.select(dim, item)
        elif isinstance(item, slice) and item.step in (None, 1):
            if item != slice(None):
                x = torch.ops.aten.slice(x, dim, item.start, item.stop)
            dim += 1
        else:
            raise TypeError(f"index: found {item!r}, expected ints, slices and None")
    return x


@contextmanager
def paper_device(counter: Counter, *, symmetric_kernels: bool) -> Iterator[None]:
    """Make tensors fake, and let muonfx choose as on a device of compute capability `CAPABILITY`.

    With ``symmetric_kernels``, it chooses as if quack-kernels were installed and had passed its self-test.
    """
    with (
        mock.patch.object(policy, "cuda_capability", return_value=CAPABILITY),
        mock.patch.object(quack, "is_capable", return_value=symmetric_kernels),
        mock.patch.object(quack, "failure", return_value=None),
        mock.patch.object(quack, "symmetric_matmul", counter.symmetric_matmul),
        # Small tensors are stacked, as plain tensors of a device are.
        mock.patch.object(elementwise, "_PLAIN", elementwise._PLAIN | {FakeTensor}),
        mock.patch.object(
            mfx.Transform, "run", lambda tx, *args, **kwargs: counter.run(tx, *args, **kwargs)
        ),
        warnings.catch_warnings(),
        FakeTensorMode(),
        ForFakeTensors(),
    ):
        warnings.simplefilter("ignore")  # a fake tensor has no memory, of which torch warns
        yield


# --------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """The parameters of a transformer block: attention with separate projections, and a multilayer perceptron."""

    def __init__(
        self, width: int, hidden: int, *, key_width: int, is_gated: bool, bias: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, key_width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        if is_gated:
            self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)


class Transformer(nn.Module):
    """The parameters of a language model with a tied head."""

    def __init__(self, layers: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            self.blocks.append(Block(width, 4 * width, key_width=width, is_gated=False, bias=True))
        self.norm = nn.LayerNorm(width)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2 small": lambda: Transformer(12, 768, 50257, 1024),
    "1.3 B, 24 layers of 2048": lambda: Transformer(24, 2048, 50257, 2048),
    "one layer of 8 B": lambda: Block(4096, 14336, key_width=1024, is_gated=True, bias=False),
}


def on_paper(model_name: str) -> nn.Module:
    """Return a model whose parameters and gradients are fake tensors of a CUDA device."""
    with torch.device("meta"):  # initial values cannot be computed for fake tensors
        model = MODELS[model_name]()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            fake = nn.Parameter(torch.empty(param.shape, device="cuda"))
            fake.grad = torch.empty_like(fake)
            setattr(module, name, fake)
    return model


# ----------------------------------------------------------------------------------------------------- candidates

OURS = "mfx.Muon"
OURS_WITH_KERNELS = "mfx.Muon with symmetric kernels"
TORCHS = "torch.optim.Muon and foreach AdamW"
PEERS = "pytorch_optimizer.Muon"


def step_of_ours(model: nn.Module) -> Callable[[], object]:
    """Return the step of our optimizer for all parameters of a model."""
    # A transform of its own, because the default one keeps the plans of the device that was counted before.
    return mfx.Muon(model, orthogonalize=mfx.orthogonalize()).step


def step_of_torch(model: nn.Module) -> Callable[[], object]:
    """Return a step of torch's optimizers: Muon for the hidden matrices, and AdamW for all other parameters."""
    hidden, others = divided(model)
    muon = torch.optim.Muon(hidden)
    adamw = torch.optim.AdamW(others, foreach=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def step_of_pytorch_optimizer(model: nn.Module) -> Callable[[], object]:
    """Return the step of the optimizer of the package pytorch_optimizer, which has AdamW for other parameters."""
    package = installed("pytorch_optimizer")
    assert package is not None
    hidden, others = divided(model)
    return package.Muon(
        [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}]
    ).step


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices of a model, and its other parameters."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in model.modules():
        for param in module.parameters(recurse=False):
            is_hidden = isinstance(module, nn.Linear) and param.ndim == 2
            (hidden if is_hidden else others).append(param)
    return hidden, others


CANDIDATES: dict[str, Callable[[nn.Module], Callable[[], object]]] = {
    OURS: step_of_ours,
    OURS_WITH_KERNELS: step_of_ours,
    TORCHS: step_of_torch,
    PEERS: step_of_pytorch_optimizer,
}


def count(model_name: str, candidate: str) -> Totals:
    """Return the totals of the second step of a candidate, whose state has been created by then."""
    return counted(model_name, candidate).totals


def counted(model_name: str, candidate: str) -> Counter:
    """Return a counter of the operations of a candidate's second step."""
    counter = Counter()
    with paper_device(counter, symmetric_kernels=candidate == OURS_WITH_KERNELS):
        step = CANDIDATES[candidate](on_paper(model_name))
        step()
        counter.totals = Totals(0, 0.0, 0.0, 0.0, 0.0)
        with counter:
            step()
    return counter


def least_bytes(model_name: str) -> int:
    """Return the bytes of a step that reads gradients, momentum and parameters once, and writes the last two."""
    with torch.device("meta"):
        params = list(MODELS[model_name]().parameters())
    return sum(5 * param.numel() * param.dtype.itemsize for param in params)


def counts() -> list[dict[str, Any]]:
    """Return a row for each model and candidate. Skip peers that are not installed or do not run on fake tensors."""
    rows: list[dict[str, Any]] = []
    for model_name in MODELS:
        for candidate in CANDIDATES:
            if candidate == PEERS and installed("pytorch_optimizer") is None:
                continue
            try:
                counter = counted(model_name, candidate)
            except RuntimeError as error:
                if candidate != PEERS:
                    raise
                print(
                    f"{candidate} does not run on fake tensors for {model_name} and is skipped: {error}"
                )
                continue
            rows.append(
                {
                    "model": model_name,
                    "candidate": candidate,
                    "least bytes": least_bytes(model_name),
                }
            )
            rows[-1].update(counter.totals._asdict())
            if candidate == OURS:
                rows[-1]["bytes of transforms"] = dict(counter.bytes_of_transforms)
    return rows
