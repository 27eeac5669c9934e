"""Our plan on paper: its figures by hand and from the executor's own transfers, and its output against itself."""

import dataclasses
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.models import MODELS, model
from benchmarks.simulator.tally import OURS, Tally
from muonfx.sharding.plan.assignment import BUFFERS_PER_BUCKET
from tests.benchmarks.simulator.pretended import SETTINGS

BY_NAME = {scheme.name: scheme for scheme in OURS}
LAYOUTS = {"owner": "fsdp2", "whole parameters": "zero-whole", "owner, flat cuts": "zero-flat", "split": "ddp"}
PUBLISHED = {"gpt2-xl": 1.558e9, "llama-8b": 8.03e9, "llama-70b": 70.6e9, "deepseek-v3": 671.0e9, "gpt-1t": 1.008e12}


def tally_of(name: str, on: Setting) -> Tally:
    found = BY_NAME[name].tally(on)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------- by hand


def test_llama_70b_under_fsdp2_by_hand():
    """Meta-Llama-3-70B over 64 ranks: what they send, compute and keep, from its shapes alone.

    Each of 80 layers has q and out (8192 x 8192), k and v (1024 x 8192), gate and up (28672 x 8192), and down
    (8192 x 28672). 64 divides all rows, so each rank holds a 64th of each matrix.
    """
    ranks, layers = 64, 80
    square, narrow, wide = 8192 * 8192, 1024 * 8192, 28672 * 8192
    matrices = layers * (2 * square + 2 * narrow + 3 * wide)
    assert matrices == 68_451_041_280
    # Sent: 63 of 64 pieces of a matrix of S bytes (bf16) go to its owner, and as many come back: 2 S (P - 1) / P by all
    # ranks together, 2 S (P - 1) / P^2 by a rank on average.
    sent = 2 * (2 * matrices) * (ranks - 1) // ranks
    assert sent == 269_525_975_040
    # Kept: momentum of 4 bytes for the matrices, two moments for embedding, head and 161 norms; a 64th of each.
    others = 2 * 128256 * 8192 + 161 * 8192
    kept = (4 * matrices + 2 * 4 * others) // ranks
    assert kept == 4_541_023_232
    # Computed: a square matrix takes five steps, each X X^T, a square and a product with X. Others take the Gram form:
    # X X^T and a product with X four times, and eight small products.
    flops_square = 2 * 5 * 3 * 8192**3
    flops_narrow = 2 * (8 * 1024 * narrow + 8 * 1024**3)
    flops_wide = 2 * (8 * 8192 * wide + 8 * 8192**3)
    flops = layers * (2 * flops_square + 2 * flops_narrow + 3 * flops_wide)
    # Scratch: an MLP matrix of 470 MB is larger than a sixth of 256 MiB, so each is a bucket of its own.
    under_way = 6 * 2 * wide

    on = Setting(model("llama-70b"), Mesh(shard=ranks))
    (run,) = on.plan("fsdp2").runs
    assert len(run.shares) == 560
    assert {share.route for share in run.shares} == {"owner"}
    assert sum(run.sent) == sent
    assert sum(on.layout("fsdp2").piece(name, 5).numel for name in on.parameters) == (matrices + others) // ranks
    # A rank sends its pieces of what others own, and of what it owns all other pieces: by hand for each of them.
    own = [sum(2 * share.numel for share in run.shares if share.owner == rank) for rank in range(ranks)]
    assert run.sent == [(2 * matrices - mine) // ranks + mine * (ranks - 1) // ranks for mine in own]

    counted = tally_of("owner", on)
    assert sum(counted.sent) == sent
    assert sum(counted.flops) == pytest.approx(flops, rel=1e-12)
    assert counted.state == [kept] * ranks
    assert counted.scratch == on.intermediates + under_way
    assert sum(map(sum, counted.work.values())) == 560

    row = json.loads(printed("--model", "llama-70b", "--mesh", "shard=64", "--layout", "fsdp2", "--json"))["schemes"][0]
    assert (row["sent_mean"], row["sent_max"]) == (sent / ranks, max(run.sent))
    assert row["flops_mean"] == pytest.approx(flops / ranks, rel=1e-12)
    assert (row["state"], row["scratch"]) == (kept, on.intermediates + under_way)


# ---------------------------------------------------------------------------------------- from what is really assigned


def transferred(on: Setting, layout: str, **chosen: object) -> list[int]:
    """Bytes by rank, from each rank's own transfers of each share, as the executor carries them out."""
    (run,) = on.plan(layout, **chosen).runs
    sent = [0] * run.size
    for share in run.shares:
        for rank in range(run.size) if share.owner is not None else ():
            moves = share.moves(rank)
            if moves.sends and rank != share.owner:
                sent[rank] += moves.numel * on.dtype.itemsize
            for transfer, _ in moves.transfers:
                sent[rank] += transfer.numel * on.dtype.itemsize * sum(other != rank for other in transfer.ranks)
    return sent


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=30)
@given(on=SETTINGS)
def test_bytes_are_those_of_every_transfer(name: str, on: Setting):
    chosen = {"replicas": "split"} if name == "split" else {}
    assert tally_of(name, on).sent == transferred(on, LAYOUTS[name], **chosen)


@settings(max_examples=30)
@given(SETTINGS)
def test_each_matrix_is_computed_as_often_as_the_route_says(on: Setting):
    flops = sum(on.cost(matrix.kind.shape).flops for matrix in on.matrices)
    for name, copies in {**dict.fromkeys(LAYOUTS, 1), "everyone": on.mesh.ranks}.items():
        counted = tally_of(name, on)
        assert sum(counted.flops) == pytest.approx(copies * flops)
        assert sum(counted.load) == pytest.approx(copies * sum(on.loads))


@settings(max_examples=30)
@given(SETTINGS)
def test_state_is_held_once_in_a_replica_or_once_a_rank(on: Setting):
    all_state = 4 * sum(matrix.numel for matrix in on.matrices) + 2 * 4 * 21
    copies = {"owner": on.mesh.dp, "whole parameters": 1, "owner, flat cuts": 1, "split": on.mesh.ranks}
    for name, often in copies.items():
        assert sum(tally_of(name, on).state) == often * all_state


@settings(max_examples=30)
@given(SETTINGS, st.integers(1, 2**22))
def test_exchanges_take_a_bucket_or_what_there_is(on: Setting, bucket: int):
    """All that is under way at a time is bounded by the bucket, and by what there is; one large matrix goes alone."""
    on = dataclasses.replace(on, bucket=bucket, _layouts={})
    scratch = tally_of("owner", on).scratch - on.intermediates
    assert scratch <= BUFFERS_PER_BUCKET * sum(on.sizes)
    assert scratch <= max(bucket, BUFFERS_PER_BUCKET * max(on.sizes))


# ------------------------------------------------------------------------------------------------- models and meshes


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_size(name: str):
    assert model(name).numel == pytest.approx(PUBLISHED[name], rel=1e-3)


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "n_inner": None}
QWEN3 = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3 |= {"num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 |= {"num_key_value_heads": 8}


@pytest.mark.parametrize(("entries", "numel"), [(GPT2, 124_439_808), (QWEN3, 596_049_920)])
def test_a_config_of_hugging_face_gives_the_published_number_of_parameters(entries: object, numel: int, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert model(str(tmp_path / "config.json")).numel == numel


# ------------------------------------------------------------------------------------------------------------ output


def printed(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(arguments)) == 0
    return out.getvalue()
