"""The laws for optimizers that need several ranks, and the processes that check them."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from muonfx.testing.optimizers.law import (
    OPTIMIZER_LAWS,
    Build,
    OptimizerLaw,
    Outcome,
    optimizer_law,
    outcome_of,
)
from muonfx.testing.optimizers.runs import (
    STEPS,
    Run,
    Values,
    load_by_dcp,
    require_close,
    require_equal,
    require_same_end,
    resumed_run,
    seeded,
)

RANKS = 2
SECONDS = 180
"""The time after which ranks that have not finished are ended, and the law is reported as broken."""
TOLERANCE = 1e-3
"""The largest difference of a sharded update from the whole one, relative to its norm: sums have another order."""


# ------------------------------------------------------------------------------------------------------------ the laws

law_of_ranks = partial(optimizer_law, needs_ranks=True)


@law_of_ranks
def ddp_gives_the_update_of_one_process(build: Build) -> None:
    """A model in DistributedDataParallel is updated as in one process."""
    model = seeded()
    wrapped = DistributedDataParallel(model)
    _require_the_update_of_one_process(build, wrapped.module)


@law_of_ranks
def fsdp2_gives_the_update_of_one_process(build: Build) -> None:
    """A model that fully_shard has sharded is updated as in one process."""
    _require_the_update_of_one_process(build, _sharded_model())


@law_of_ranks
def tensor_parallel_gives_the_update_of_one_process(build: Build) -> None:
    """A model under tensor parallelism (parallelize_module) is updated as in one process."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(),
    }
    model = parallelize_module(seeded(), _mesh(), plan)
    _require_the_update_of_one_process(build, model)


@law_of_ranks
def dcp_resumes_a_sharded_run(build: Build) -> None:
    """A run under FSDP2 that torch.distributed.checkpoint resumes ends in the bits of the uninterrupted run."""
    stopped = Run(build, _sharded_model()).steps(STEPS)
    resumed = resumed_run(build, stopped, _sharded_model())
    load_by_dcp(resumed, stopped, _shared_folder())
    require_same_end(resumed, stopped)


def _require_the_update_of_one_process(build: Build, model: nn.Module) -> None:
    """Run an optimizer on a parallel model and on a whole one with the same gradients, and compare the updates.

    Each rank runs this function. ``model`` is parallel over all ranks, and each rank has a whole model of its own.
    """
    whole = Run(build)
    start = whole.values()
    parallel = Run(build, model)
    whole.steps(STEPS)
    parallel.steps(STEPS)
    values = parallel.values()  # the shards of all ranks joined
    _require_equal_on_ranks(values)
    require_close(values, whole.values(), start, TOLERANCE, f"on {RANKS} ranks")


def _require_equal_on_ranks(values: Values) -> None:
    """Raise `Breach` unless this rank's whole parameters have the bits of the parameters of rank 0."""
    for name, value in values.items():
        value_of_rank_0 = value.clone()
        dist.broadcast(value_of_rank_0, src=0)
        require_equal(
            {name: value},
            {name: value_of_rank_0},
            f"on rank {dist.get_rank()}, compared with rank 0",
        )


def _sharded_model() -> nn.Module:
    model = seeded()
    fully_shard(model, mesh=_mesh())
    return model


def _shared_folder() -> str:
    """Return the path of a new folder, the same one on all ranks."""
    folder: list[str] = [tempfile.mkdtemp(prefix="muonfx-")]
    dist.broadcast_object_list(folder, src=0)
    return folder[0]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


# ------------------------------------------------------------------------------------------------------- the processes


def outcome_on_ranks(law: OptimizerLaw, build: Build) -> Outcome:
    """Check a law in new processes, and return the outcome of the rank on which it failed first, if any."""
    try:
        pickle.dumps(build)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # such as of a lambda
        text = "other processes cannot import the function that builds the optimizer: define it in a module"
        return Outcome(reason_left_out=f"{text} ({error})")
    for outcome in _outcomes_of_ranks(law, build):
        if outcome != Outcome():  # an outcome without texts means that the law holds
            return outcome
    return Outcome()


def _outcomes_of_ranks(law: OptimizerLaw, build: Build) -> list[Outcome]:
    """Check a law in a new process for each rank, and return the outcome of each, in the order in which they ended.

    So the cause is first: a later rank may only have lost the connection to it.
    """
    # A new interpreter: one that is forked would inherit the threads of torch in an unknown state.
    context = get_context("spawn")
    queue = context.SimpleQueue()  # each process puts (rank, outcome) into it
    with tempfile.TemporaryDirectory() as folder:  # where the processes find each other
        processes: list[BaseProcess] = []
        for rank in range(RANKS):
            process = context.Process(
                target=_run_rank, args=(rank, law.name, build, folder, queue), daemon=True
            )
            process.start()
            processes.append(process)
        have_finished = _join_or_kill(processes)
    reason = "ended without a result"
    if not have_finished:
        reason = f"has not finished within {SECONDS} s"
    outcomes: dict[int, Outcome] = {}
    while not queue.empty():
        rank, outcome = queue.get()
        outcomes[rank] = outcome
    for rank in range(RANKS):
        outcomes.setdefault(rank, Outcome(failure=f"rank {rank} {reason}"))
    return list(outcomes.values())


def _join_or_kill(processes: list[BaseProcess]) -> bool:
    """Wait until all processes have ended, and return True; after `SECONDS` kill them, and return False.

    A rank may wait forever for another one that has raised an error.
    """
    deadline = time.monotonic() + SECONDS  # for all together
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    have_finished = not any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()  # has no effect on a process that has ended
        process.join()
    return have_finished


def _run_rank(
    rank: int, law_name: str, build: Build, folder: str, outcomes: SimpleQueue[tuple[int, Outcome]]
) -> None:
    """Join the process group as one of its ranks, check a law, and send the outcome. The process ends here.

    ``folder`` is empty and common to all ranks, so that they can find each other by a file in it.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        # A rank whose peer has raised an error does not wait for long.
        timeout=timedelta(seconds=SECONDS / 3),
    )
    outcome = outcome_of(OPTIMIZER_LAWS[law_name], build)
    outcomes.put((rank, outcome))
    if outcome == Outcome():
        dist.destroy_process_group()
    # Some versions of torch abort when an interpreter ends that has used fully_shard with gloo.
    os._exit(0)
