"""Orthogonalization: replace each matrix by the nearest matrix with orthonormal rows or columns."""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx import polar
from muonfx.core import Donation, EmptyState, MatrixWork, Transform, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import LeafCost
from muonfx.polar.cost import newton_schulz_cost
from muonfx.polar.many import Orthogonalizer
from muonfx.transforms.matrices import Matrices, MatrixView
from muonfx.transforms.matrixwise import cost_of_matrices, matrix_locality, name_patterns, on_stacks
from muonfx.tree import PyTree


def _rounds_to(tx: Transform, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to which `orthogonalize` rounds updates of ``dtype`` before it computes."""
    arguments = tx.arguments
    compute = polar.compute_dtype(
        dtype,
        device,
        arguments["dtype"],
        coefficients=arguments["coefficients"],
        steps=arguments["steps"],
    )
    return compute if polar.same_range(dtype, compute) else dtype


def _cost(tx: Transform, device: str, compute: torch.dtype) -> LeafCost:
    """Return a function from a leaf's name, shape and dtype to the estimated work of orthogonalizing its matrices.

    Leaves are distributed over ranks by this work, such that all ranks take about the same time.

    Args:
        tx: the transform `orthogonalize` with its arguments.
        device: the type of device that computes, such as "cuda".
        compute: the dtype of matrix products if the transform's dtype is "auto", except for fp64 matrices.
    """
    arguments = tx.arguments
    is_auto = arguments["dtype"] == "auto"

    def cost_of_matrix(rows: int, columns: int, dtype: torch.dtype) -> float:
        """Return the estimated time for one matrix, as the number of operations of a full product in this time."""
        product_dtype = arguments["dtype"]
        # fp64 matrices are multiplied in fp64, and all others in the usual dtype of the device
        if is_auto:
            product_dtype = torch.float64 if dtype == torch.float64 else compute
        cost = newton_schulz_cost(
            (rows, columns),
            device,
            dtype=product_dtype,
            coefficients=arguments["coefficients"],
            steps=arguments["steps"],
            method=arguments["method"],
            products=arguments["products"],
            may_take_fp16=is_auto and device == "cuda",
        )
        return cost.load

    return cost_of_matrices(arguments["view"], cost_of_matrix)


@transform(
    locality=matrix_locality,
    reads_params=False,
    matrices=MatrixWork(rounds_to=_rounds_to, on_stacks=on_stacks, cost=_cost),
    name_patterns=name_patterns,
    position="sets_size",
)
def orthogonalize(
    *,
    coefficients: polar.CoefficientsLike | Tensor = "polar_express_5",
    steps: int | None = None,
    method: polar.MethodLike = "auto",
    dtype: polar.DTypeLike = "auto",
    products: polar.ProductsLike = "auto",
    view: MatrixView = MatrixView(),
):
    """Replace each matrix $G = U S V^T$ by about $U V^T$, with a Newton-Schulz iteration.

    Args:
        coefficients: the polynomial coefficients of the iteration: the name of a set in `muonfx.polar`, such as
            "keller"; the set itself; or a triple (a, b, c) for each step.
        steps: the number of steps; None is the number of steps of the set.
        method: "standard", or "gram", which iterates on the Gram matrix of the shorter side. "auto" is the cheaper of
            the two for each shape; `muonfx.polar.explain` prints the choice and the reason. A tuple such as (2, 3) is
            the number of steps on each Gram matrix.
        dtype: the compute dtype. "auto" depends on the device, and is at least fp32 if derivatives are taken through
            the transform. Updates are returned in their own dtype.
        products: how symmetric matrix products are computed: "batched" or "blocks". "auto" depends on the shape and
            the device, and uses quack-kernels on a GPU where it is installed.
        view: a `MatrixView`, which divides each parameter into matrices. For fused query, key and value weights:
            ``MatrixView({"*.qkv.weight": "(qkv=3 out) in -> qkv out in"})``.

    Returns:
        A transform without state. Its locality is MATRIX if the view takes matrices from the last two dims, else LEAF.

    Raises:
        ValueError: an argument is malformed; at `init` or `update`, a leaf is not a matrix or does not fit the view.

    Follows Keller Jordan's Muon; see `muonfx.polar.orthogonalize` for the iteration and its sources.

    Example:
        >>> import muonfx as mfx
        >>> u = mfx.orthogonalize().update(
        ...     {"w": torch.diag(torch.tensor([5.0, 0.5]))}, mfx.core.EmptyState()
        ... )[0]["w"]
        >>> bool((u.diagonal() - 1).abs().max() < 0.2)
        True
    """
    orthogonalizer = Orthogonalizer(coefficients, steps, method, dtype, products)
    orthogonalizer.check_options()

    def init(params: PyTree) -> EmptyState:
        Matrices(view, params)  # raises if a leaf is not a matrix
        return EmptyState()

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        workspace: polar.Workspace | None = None,
    ):
        """Orthogonalize all matrices in one call, which batches matrices of equal shape. The state is empty.

        ``workspace`` is memory that is reused between calls. None allocates new memory.
        """
        matrices = Matrices(view, updates)
        orthogonal = orthogonalizer(matrices.stacks, donate=donate.updates, workspace=workspace)
        return matrices.fill(orthogonal), state

    return init, update
