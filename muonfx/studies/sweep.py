"""Runs of one optimizer that train together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from muonfx import tree
from muonfx.core.apply import apply_updates
from muonfx.core.hyperparams import stack
from muonfx.core.transform import Transform
from muonfx.studies.task import Batch, Params, Task
from muonfx.tree import PyTree

T = TypeVar("T")


EvalParams = Callable[[PyTree, Params], Params]
"""Function of a state and parameters that returns the parameters to evaluate, such as an average."""


class Progress(NamedTuple):
    """Parameters and states of the runs of a sweep. With several runs, the first dim of each leaf is runs."""

    params: Params
    state: PyTree


class Sweep:
    """Runs of a task that differ in numbers of the transform and in the seed, and train together.

    Several runs are mapped by ``torch.func.vmap``; one run alone is not mapped.

    Args:
        task: parameters, batches and loss.
        transforms: the transform of each run.
        seeds: the seed of each run.
        eval_params: the parameters for validation losses; None: those that are trained.
    """

    def __init__(
        self,
        task: Task,
        transforms: Sequence[Transform],
        seeds: Sequence[int],
        eval_params: EvalParams | None = None,
    ) -> None:
        """Stack the numbers of the transforms, so that one transform has those of all runs. Raise if it cannot."""
        self.task = task
        self.eval_params = eval_params
        self.seeds = tuple(seeds)
        self.is_mapped = len(seeds) > 1
        self.tx = transforms[0]
        if self.is_mapped:
            self.tx = stack(transforms)

    def start(self) -> Progress:
        """Return the initial parameters and states. Sets the random state of torch, as `train` does."""
        params = self._for_each_run("init", self.task.init)
        # For transforms whose initial states are random.
        torch.manual_seed(_random_seed(self.seeds[0], step=-1))
        init: Callable[[Transform, Params], PyTree] = self._over_runs(
            lambda tx, params: tx.init(params)
        )
        return Progress(params, init(self.tx, params))

    def first_losses(self, start: Progress) -> Tensor:
        """Return the loss of each run on its first batch, before the first step."""
        return self._losses(self.task.loss, start.params, self._batch(0))

    def batch_averages(self, step: int) -> list[float]:
        """Return two averages of each leaf of the batches of a step, to distinguish batches.

        They are the averages of the positive elements and of the squares. Rounding hardly changes these, as sums of one
        sign. NaN and infinities, such as marks of missing targets, count as 0, since they cannot be saved.
        """
        averages: list[float] = []
        for leaf in tree.leaves(self._batch(step)):
            parts = leaf
            if leaf.is_complex():
                parts = torch.view_as_real(leaf.resolve_conj())
            wide = parts.detach().to("cpu", torch.float64)
            finite = wide.nan_to_num(nan=0, posinf=0, neginf=0)
            count = max(1, finite.numel())  # a leaf may be empty
            averages.append(finite.clamp(min=0).sum().item() / count)
            averages.append(finite.square().sum().item() / count)
        return averages

    def train(self, progress: Progress, steps: range) -> tuple[Progress, Tensor]:
        """Train all runs for some steps, and return the new progress and the mean loss of each run over these steps.

        For example, ``train(progress, range(10, 20))`` takes ten steps, on the batches 10 to 19. It sets the random
        state of torch, which the caller restores.
        """
        train_step = self._over_runs(self._train_step)  # one call takes the step of all runs
        params, state = progress
        losses: list[Tensor] = []  # on the device of the task, so that no step waits for it
        for step in steps:
            batch = self._batch(step)
            # The seed is set before each step, so that a continued run draws the numbers of one that was not
            # interrupted.
            torch.manual_seed(_random_seed(self.seeds[0], step))
            with self._attention_that_can_be_mapped():
                params, state, loss = train_step(self.tx, params, state, batch)
            losses.append(loss.reshape(-1))  # shape (runs,), also if there is one run
        means = torch.stack(losses).to(torch.float64).mean(0)
        return Progress(params, state), means.cpu()

    def validation_losses(self, progress: Progress) -> Tensor:
        """Return the loss of each run on the validation batch, of shape (runs,); NaN if there is none."""
        batch = self.task.validation
        if batch is None:
            return torch.full((len(self.seeds),), torch.nan, dtype=torch.float64)
        # `vmap` takes a batch for each run from the first dim: here the same one for all
        if self.is_mapped:
            batch = tree.map(lambda leaf: leaf.expand(len(self.seeds), *leaf.shape), batch)
        params = progress.params
        # For example, the average of the iterates in place of the last one.
        if self.eval_params is not None:
            params = self._over_runs(self._params_to_validate)(progress.state, params)
        return self._losses(self.task.validation_loss or self.task.loss, params, batch)

    def _params_to_validate(self, state: PyTree, params: Params) -> Params:
        """Return the parameters that ``eval_params`` returns for one run. Raise TypeError if they are no parameters."""
        assert self.eval_params is not None
        chosen: object = self.eval_params(state, params)
        if not isinstance(chosen, Mapping):
            raise TypeError(
                f"eval_params: found a result of type {type(chosen).__name__}, expected a dict like params"
            )
        if chosen.keys() != params.keys():
            raise TypeError(f"eval_params: found a dict of {list(chosen)}, expected {list(params)}")
        return dict(chosen)

    def _train_step(
        self, tx: Transform, params: Params, state: PyTree, batch: Batch
    ) -> tuple[PyTree, PyTree, Tensor]:
        """Take one step of one run; return parameters, state and the loss before the step."""
        grads, loss = grad_and_value(self.task.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state, loss

    def _losses(
        self, loss: Callable[[Params, Batch], Tensor], params: Params, batch: Batch
    ) -> Tensor:
        """Return the loss of each run, shape (runs,), float64. A loss with dropout is the same at each call."""
        with torch.no_grad(), torch.random.fork_rng(), self._attention_that_can_be_mapped():
            torch.manual_seed(0)
            return self._over_runs(loss)(params, batch).reshape(-1).to("cpu", torch.float64)

    def _batch(self, step: int) -> Batch:
        """Return the batches of a step: of all runs, stacked."""
        return self._for_each_run("batch", lambda seed: self.task.batch(seed, step))

    def _for_each_run(self, argument: str, make: Callable[[int], T]) -> T:
        """Return the tree that ``make`` makes for the seed; for several runs, their trees stacked along a new dim.

        ``argument`` is the name of the function in errors: "init" or "batch".
        """
        if not self.is_mapped:
            return make(self.seeds[0])
        tree_of = {seed: make(seed) for seed in set(self.seeds)}  # runs with the same seed share it
        first_seed = self.seeds[0]
        first_shapes = _shapes(tree_of[first_seed])
        for seed, tree_of_seed in tree_of.items():
            shapes = _shapes(tree_of_seed)
            if shapes != first_shapes:
                raise ValueError(
                    f"{argument}: found shapes {first_shapes} for seed {first_seed} and {shapes} for seed {seed}, "
                    "expected the same for all seeds: pass vmap=False"
                )
        trees = [tree_of[seed] for seed in self.seeds]
        return tree.map(lambda *leaves: torch.stack(leaves), *trees)

    def _over_runs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of one run as a function of all runs."""
        if not self.is_mapped:
            return function
        mapped = vmap(function, randomness="different")

        def call(*args: Any) -> Any:
            """Call the function for all runs. Raise ValueError if torch cannot map it."""
            try:
                return mapped(*args)
            except RuntimeError as error:
                if "vmap" not in str(error):  # such as a lack of memory
                    raise
                first_sentence = str(error).partition(". ")[0]
                raise ValueError(
                    f"vmap: found True, but these runs cannot train as one batch ({first_sentence}): pass vmap=False"
                ) from error

        return call

    def _attention_that_can_be_mapped(self) -> AbstractContextManager[Any]:
        """Select the implementation of attention that ``vmap`` and ``grad`` support together."""
        return sdpa_kernel(SDPBackend.MATH) if self.is_mapped else nullcontext()


def _shapes(values: PyTree) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf by its name, such as ``{"w": (4, 3)}``."""
    return {name: tuple(leaf.shape) for name, leaf in tree.named_leaves(values)}


def _random_seed(seed: int, step: int) -> int:
    """Return the seed of the random numbers that a run draws in a step, of 32 bits.

    A string is hashed. The seed itself would draw the numbers again from which the parameters were made.

    >>> _random_seed(0, 1) == _random_seed(0, 1), _random_seed(0, 1) == _random_seed(1, 0)
    (True, False)
    """
    return random.Random(f"seed {seed}, step {step}").getrandbits(32)
