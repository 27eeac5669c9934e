"""`Values`: the tensors of a `leafwise` step, and the running of its recorded operations on the lists of all leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_not

import torch
from torch import Tensor

from muonfx.transforms._leaf import Leaf, Operation, Plan, has_shape_of_leaf
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew


class Values:
    """The values of a `leafwise` step, each as a list with one tensor for each leaf.

    A value is an operand of the step (the update, a tree of the state, the parameters), or the result of a recorded
    operation. It has the number of its placeholder: the update is 0, and the results follow the operands.
    """

    def __init__(self, present: Present) -> None:
        """Begin without values. `add_operand` adds the operands, and `run` the results."""
        self.present = present
        """The leaves that have a gradient."""
        self.operands: list[list[Tensor]] = []
        """The operands of the step in their own dtypes: ``[[u1, u2], [m1, m2]]`` for two leaves and a momentum."""
        self._computed: dict[int, list[Tensor]] = {}
        """The results so far, and the operands that have been read, in the compute dtype."""
        self._may_write: dict[int, bool] = {}
        """For each value, True if nothing else needs its storage, so that it may be overwritten after its last use."""
        self._remaining_uses: dict[int, int] = {}
        """For each value, how many operations and outputs still read it; empty before `run`, when nothing is known."""
        self._dtypes: list[torch.dtype] | None = None
        """The compute dtype of each leaf; None until it is needed."""

    def add_operand(self, tensors: list[Tensor], *, may_write: bool) -> None:
        """Add an operand of the step, whose number is the number of operands before it."""
        self._may_write[len(self.operands)] = may_write
        self.operands.append(tensors)

    def run(self, plan: Plan) -> None:
        """Run the operations of a plan, each on the lists of all leaves, and store their results.

        For two leaves, the plan of ``s.trace * 0.9 + u`` calls ``mul([m1, m2], 0.9)`` and then ``add`` on the two lists
        of results and updates. A result may take the storage of an operand after its last use. A result that nothing
        reads any more is freed.
        """
        self._remaining_uses = dict(plan.uses)
        with ew.unrecorded(*self.operands, plan.scalars):  # autograd records nothing, unless it must
            for number, operation in plan.operations.items():
                if number not in self._computed:  # else a sum over leaves has needed it already
                    self._compute(number, operation)
                self._count_uses(operation.operands)

    def sum_with(self, sum_over_leaves: Callable[[PyTree], Tensor]) -> Callable[[Leaf], Tensor]:
        """Return the function ``sum_over_leaves`` that a step of `leafwise` receives.

        A step calls it with a placeholder (`Leaf`), as in ``sum_over_leaves((u * u).sum())``. Placeholders only record
        operations to run later, but this number is needed at once.

        Args:
            sum_over_leaves: the function that `Transform` supplies, which sums the tensors of a tree.
        """

        def sum_of(leaf: Leaf) -> Tensor:
            """Run the operations that the placeholder needs, such as ``u * u`` and ``sum``, and return the sum."""
            _require_one_shape(leaf)
            # The step is still running: only the operations that this placeholder needs are computed. They overwrite
            # nothing, since the rest of the step may read every value.
            plan = Plan.of([leaf])
            with ew.unrecorded(*self.operands, plan.scalars):
                for number, operation in plan.operations.items():
                    if number not in self._computed:
                        self._compute(number, operation)
            return sum_over_leaves(self.present.fill(self.read(leaf)))

        return sum_of

    def read(self, leaf: Leaf) -> list[Tensor]:
        """Return the tensors of a value, one for each leaf, in the compute dtype, which is fp32 or wider.

        ``leaf`` is the placeholder of the value. Operands in bf16 are converted to fp32 when they are first read.
        """
        number = leaf.number
        if number in self._computed:  # a result, or an operand that has been read before
            return self._computed[number]
        if self._dtypes is None:
            self._dtypes = ew.wide_dtypes(self.operands)
        self._computed[number] = ew.cast(self.operands[number], self._dtypes)
        if self.was_cast(leaf):
            self._may_write[number] = True  # these are copies, not the caller's tensors
        return self._computed[number]

    def was_cast(self, operand: Leaf) -> bool:
        """Return True if an operand has been read, and converting its dtype made new tensors for all leaves."""
        number = operand.number
        if number not in self._computed:
            return False
        return all(map(is_not, self._computed[number], self.operands[number]))

    def _compute(self, number: int, operation: Operation) -> None:
        """Run one operation on the lists of all leaves, such as ``ew.add([u1, u2], [m1, m2])``; store its results.

        ``number`` is the number of the results' placeholder. They take the storage of the first operand, here ``[u1,
        u2]``, if no later operation reads this operand and the caller permits it.
        """
        lists = [self.read(operand) for operand in operation.operands]
        if operation.is_for_each:
            self._computed[number] = operation.function(*lists)
            # The result may be a view of an operand, so neither may be overwritten.
            self._may_write[number] = False
            for operand in operation.operands:
                self._may_write[operand.number] = False
            return
        first = operation.operands[0]
        reuse = self._is_free_after_this_use(first)
        self._computed[number] = operation.function(*lists, *operation.scalars, reuse=reuse)
        if reuse:
            self._may_write[first.number] = False  # its storage is the result's now
        self._may_write[number] = True

    def _is_free_after_this_use(self, leaf: Leaf) -> bool:
        """Return True if nothing needs the storage of a value after one more use, which has not been counted yet."""
        return self._may_write[leaf.number] and self._remaining_uses.get(leaf.number) == 1

    def _count_uses(self, operands: Sequence[Leaf]) -> None:
        """Count one use of each of these values, and forget results that nothing reads any more."""
        for leaf in operands:
            self._remaining_uses[leaf.number] -= 1
            # The operands of the step have no operation. `was_cast` and `take` read them again.
            if not self._remaining_uses[leaf.number] and leaf.operation is not None:
                del self._computed[leaf.number]

    def check(self, operand: Leaf, output: Leaf, beginning: str) -> None:
        """Raise an error if a value that the step returns is complex, or has another shape than its leaf.

        ``def step(u, s): return u.sum(), s`` is such an error for a leaf of shape (2,).

        Args:
            operand: the placeholder that the step received, here ``u``.
            output: the placeholder that it returned in its place, here ``u.sum()``.
            beginning: the first words of the error: "momentum: the step returns a state".
        """
        if has_shape_of_leaf(output):  # the usual case, which reads no tensor
            return
        results = self.read(output)
        leaves = self.operands[operand.number]
        for index, (result, leaf) in enumerate(zip(results, leaves, strict=True)):
            if result.is_complex() or result.shape != leaf.shape:
                raise _wrong_result(beginning, self.present.names()[index], result, leaf)

    def take(self, output: Leaf, operand: Leaf) -> list[Tensor]:
        """Return the tensors of a value that the step returns, such that no other output and no caller has them.

        `leafwise` calls this method after `run` for each changed output. For a step that returns the same value as
        update and as state, the first output gets a copy, and the last one the tensors themselves.

        Args:
            output: the placeholder of the value.
            operand: the placeholder in whose place the step returns the value. A copy is written into the tensors of
                this operand if nothing else needs them.
        """
        tensors = self.read(output)
        is_free = self._is_free_after_this_use(output)
        self._remaining_uses[output.number] -= 1
        if is_free:
            self._may_write[output.number] = False  # its storage is the output's now
            return tensors
        if self._may_write[operand.number] and not self._remaining_uses.get(operand.number):
            self._may_write[operand.number] = False
            return ew.copy(tensors, into=self.read(operand))  # without new memory
        return ew.clone(tensors)


def _require_one_shape(leaf: object) -> None:
    """Raise an error if the argument of ``sum_over_leaves`` in a step cannot be added up over all leaves.

    It must be a placeholder (`Leaf`) for a value of one shape, as in ``sum_over_leaves((u * u).sum())``. ``u * u`` has
    the shape of each leaf, so it is an error.
    """
    if not isinstance(leaf, Leaf):
        raise TypeError(f"leafwise: sum_over_leaves adds up a value of each leaf, found {leaf!r}")
    if has_shape_of_leaf(leaf):
        raise ValueError(
            "leafwise: sum_over_leaves adds up values of one shape, found a value with the shapes of the leaves: "
            "reduce it first, as in sum_over_leaves((u * u).sum())"
        )


def _wrong_result(beginning: str, name: str, result: Tensor, leaf: Tensor) -> Exception:
    """Return an error for a leaf whose new value ``result`` is complex or has another shape; see `Values.check`."""
    if result.is_complex():
        return TypeError(
            f"{beginning} of {result.dtype} for {name!r}, expected real numbers; take torch.abs or torch.real first"
        )
    return ValueError(
        f"{beginning} of shape {tuple(result.shape)} for {name!r}, expected its shape {tuple(leaf.shape)}: use "
        "muonfx.transform if intermediate results change shapes"
    )
