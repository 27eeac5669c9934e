"""The schemes of other libraries, counted as ours are; read from their code, with the versions named.

- LLaMA-Factory v1, `v1/plugins/trainer_plugins/muon_optimizer.py` at commit 7374682: `full_tensor()` of the gradient on
  every rank, momentum of the whole matrix and Newton-Schulz on every rank, and `distribute_tensor` of the result, which
  broadcasts along replicating dims of the mesh and scatters along sharding ones, from the first rank of each.
- DeepSpeed 0.19.8, `runtime/zero/stage3.py`, `_apply_muon_to_accumulated_grads` and `_muon_update_sub_group`: gradients
  and momentum are gathered by all ranks, bucket by bucket; in rounds of as many matrices as ranks, each rank does one;
  results and momentum are gathered again, padded to the largest of a round and to as many matrices as ranks. Left out:
  sub-groups, which end buckets earlier; and that it wants gradients all-reduced, not reduce-scattered, which is
  `S (N - 1) / N` more.
- DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `_get_flat_partition_unpadded`: a rank runs Newton-Schulz on every
  matrix that its partition touches, so one that crosses a boundary is done on both sides, with its momentum.
- Dion's Muon (microsoft/dion), as in torchtitan's `experiments/dion_optimizer/muon.py` at commit 175ea57: matrices of
  one shape in batches of as many as ranks, the last one filled up with zeros, each rank one of them, by all_to_all
  there and back. One sharded dim only; each replica for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from muonfx.sharding.plan.mesh import Matrix, Mesh
from muonfx.sharding.plan.schemes import (
    Ledger,
    Scheme,
    Sending,
    Setting,
    Tally,
    Wire,
    Work,
    even_state,
    everyone,
    flat,
    flat_cuts,
    gram,
    owner,
    sharded_state,
    shared_owner,
    split,
    whole,
)

__all__ = ["SCHEMES"]

REDUCE_BUCKET = 500_000_000
"""Elements of a bucket, DeepSpeed's default."""


def gather_everywhere(on: Setting) -> Tally:
    """`S (P - 1) / P` a rank to gather; the result once more by the first rank, to all replicas and pieces."""
    mesh, work, state = on.mesh, Work(on.mesh.ranks), Ledger(on.mesh.ranks)
    every = range(mesh.ranks)
    sent, replicated = Sending(mesh.ranks), Ledger(mesh.ranks)
    state.add(every, on.adam_state / mesh.pieces)
    for matrix, count in Counter(on.matrices).items():
        ranks, holders, size = matrix.pieces(mesh), matrix.holders(mesh), count * matrix.numel * on.dtype.itemsize
        for replica in range(mesh.dp):
            here = range(replica * mesh.pieces + holders.start, replica * mesh.pieces + holders.stop)
            sent.add(here, size * (ranks - 1) / ranks, ranks)
            work.add(here, matrix, count)
            state.add(here, count * matrix.numel * on.state_size)
            for first, amount in _scattered(here, mesh.tp, size):
                sent.add(first, amount, ranks)
            if replica < mesh.dp - 1:  # the last one of a ring sends nothing on
                replicated.add(here, size)
    wires = [*sent.wires(), Wire(replicated.by_rank(), mesh.ranks)]
    scratch = on.intermediates + 2 * max(on.sizes)
    # for each matrix a gather, and a broadcast or scatter along every dim of the mesh that has more than one rank
    dims = sum(size > 1 for size in (mesh.dp, mesh.shard, mesh.tp))
    return Tally(wires, *work.by_rank(), state.by_rank(), scratch, len(on.matrices) * (1 + dims))


def _scattered(ranks: range, tp: int, size: float) -> Iterator[tuple[int, float]]:
    """What ranks send when a matrix is scattered along the sharding dim and then along the tensor parallel one."""
    rows = len(ranks) // tp
    for rank in ranks[:tp]:
        yield rank, size * (rows - 1) / rows
    for rank in ranks[::tp]:
        yield rank, size / rows * (tp - 1) / tp


def four_gathers(on: Setting) -> Tally:
    """Gradients and momentum to all, results and momentum to all: `4 S (N - 1) / N` a rank, and padding."""
    ranks, work, sent = on.mesh.ranks, Work(on.mesh.ranks), 0.0
    most = exchanges = 0
    for bucket in _buckets(on.matrices):
        most = max(most, sum(matrix.numel for matrix in bucket))
        sent += 2 * sum(-(-matrix.numel // ranks) for matrix in bucket) * (ranks - 1)
        exchanges += 2
        for start in range(0, len(bucket), ranks):
            exchanges += 2
            one_round = bucket[start : start + ranks]
            sent += 2 * max(matrix.numel for matrix in one_round) * (ranks - 1)
            for rank, matrix in enumerate(one_round):
                work.add(rank, matrix)
    wires = [Wire([sent * on.dtype.itemsize] * ranks, ranks)]
    # each of two gathers has its buffer and its result
    scratch = on.intermediates + 4 * most * on.dtype.itemsize
    return Tally(wires, *work.by_rank(), even_state(on), scratch, exchanges if ranks > 1 else 0)


def _buckets(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    bucket: list[Matrix] = []
    numel = 0
    for matrix in matrices:
        if bucket and numel + matrix.numel > REDUCE_BUCKET:
            yield bucket
            bucket, numel = [], 0
        bucket.append(matrix)
        numel += matrix.numel
    yield bucket


def duplicates(on: Setting) -> Tally:
    """Every rank that a matrix touches computes it, and keeps its whole momentum: nothing is sent."""
    ranks, work, state = on.mesh.ranks, Work(on.mesh.ranks), Ledger(on.mesh.ranks)
    state.add(range(ranks), on.adam_state / ranks)
    for matrix, held in zip(on.matrices, flat_cuts([m.numel for m in on.matrices], ranks), strict=True):
        for rank in held:
            work.add(rank, matrix)
            state.add(rank, matrix.numel * on.state_size)
    return Tally([Wire([0.0] * ranks, ranks)], *work.by_rank(), state.by_rank(), on.intermediates)


def batches_of_one_shape(on: Setting) -> Tally:
    """A batch of `P` matrices costs `2 S (P - 1) / P` and one Newton-Schulz a rank, however many are real."""
    mesh, work, sent = on.mesh, Work(on.mesh.pieces), Sending(on.mesh.pieces)
    largest, exchanges = max(on.sizes), 0
    for matrix, count in Counter(on.matrices).items():
        ranks = matrix.holders(mesh)
        batches = -(-count // len(ranks))
        exchanges += 2 * batches
        work.add(ranks, matrix, batches)
        size = matrix.numel * on.dtype.itemsize
        sent.add(ranks, batches * 2 * size * (len(ranks) - 1) / len(ranks), len(ranks))
    scratch = on.intermediates + 4 * largest
    return Tally(sent.wires(mesh.dp), *work.by_rank(mesh.dp), sharded_state(on), scratch, exchanges)


def _several_replicas(mesh: Mesh) -> bool:
    return mesh.dp > 1 and mesh.pieces > 1


def _cut(mesh: Mesh) -> bool:
    return mesh.pieces > 1


def _one_sharded_dim(mesh: Mesh) -> bool:
    return mesh.pieces > 1 and (mesh.tp == 1 or mesh.shard == 1)


SCHEMES = (
    Scheme(
        "owner",
        "fsdp2",
        True,
        "in each replica, one of a matrix's holders gets it, computes, sends back",
        owner,
        _cut,
    ),
    Scheme(
        "shared owner",
        "fsdp2",
        True,
        "one owner over all replicas; its results go on to the others",
        shared_owner,
        _several_replicas,
    ),
    Scheme("Gram all-reduce", "fsdp2", True, "only small Gram matrices are summed; long side must be cut", gram, _cut),
    Scheme("whole parameters", "zero-whole", True, "who keeps a matrix has all of it and computes it", whole),
    Scheme("owner, flat cuts", "zero-flat", True, "matrices across a cut go to one of their holders and back", flat),
    Scheme("split", "ddp", True, "each matrix at one rank, results to all", split),
    Scheme("everyone", "ddp", True, "all ranks compute everything", everyone),
    Scheme(
        "LLaMA-Factory v1",
        "fsdp2",
        False,
        "all ranks gather and compute everything",
        gather_everywhere,
        _cut,
    ),
    Scheme(
        "Dion's Muon",
        "fsdp2",
        False,
        "as many matrices of a shape as ranks at a time, filled up",
        batches_of_one_shape,
        _one_sharded_dim,
    ),
    Scheme("DeepSpeed ZeRO-1/2", "zero-flat", False, "all ranks that a matrix touches compute it", duplicates),
    Scheme(
        "DeepSpeed ZeRO-3",
        "zero-flat",
        False,
        "gradients, momentum, results, momentum: all to all ranks",
        four_gathers,
    ),
)
"""All of them: ours, then the peers'."""
