"""The plan on paper: our figures by hand and from each rank's transfers, figures of other libraries, the output."""

import dataclasses
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.models import MODELS, Kind, Model, model
from benchmarks.simulator.operations import flops
from benchmarks.simulator.peers import PEERS, matrices_of
from benchmarks.simulator.tally import OURS, Tally
from muonfx.sharding.plan.assignment import BUFFERS_PER_BUCKET


def setting(mesh: Mesh, shapes: list[tuple[int, int]], experts: int = 0) -> Setting:
    kinds = [Kind(f"matrix {i}", shape, 1, muon=True) for i, shape in enumerate(shapes)]
    kinds += [Kind("experts", (16, 48), experts, muon=True, experts=True)] if experts else []
    small = Model("small", "made up", (*kinds, Kind("embedding", (7, 3), 1, muon=False)))
    return Setting(small, mesh, "cpu", torch.float32)


MESHES = st.builds(
    lambda dp, part, ep, tp: Mesh(dp, part * ep, tp, ep),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
).filter(lambda mesh: mesh.pieces > 1)
SETTINGS = st.builds(
    setting,
    MESHES,
    st.lists(
        st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 48, 64])), min_size=1, max_size=5
    ),
    st.integers(0, 5),
)


BY_NAME = {scheme.name: scheme for scheme in (*OURS, *PEERS)}
LAYOUTS = {
    "owner": "fsdp2",
    "whole parameters": "zero-whole",
    "owner, flat cuts": "zero-flat",
    "split": "ddp",
}
PUBLISHED = {
    "gpt2-xl": 1.558e9,
    "llama-8b": 8.03e9,
    "llama-70b": 70.6e9,
    "deepseek-v3": 671.0e9,
    "gpt-1t": 1.008e12,
}


def tally_of(name: str, on: Setting) -> Tally:
    found = BY_NAME[name].tally(on)
    assert found is not None
    return found


def printed(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(arguments)) == 0
    return out.getvalue()


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
    # 63 of 64 shards of a matrix of S bytes (bf16) are sent to its owner, and as many are returned: 2 S (P - 1) / P by
    # all ranks together, 2 S (P - 1) / P^2 by a rank on average.
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
    assert len(run.shards) == 560
    assert {shard.route for shard in run.shards} == {"owner"}
    assert sum(run.sent) == sent
    assert (
        sum(on.layout("fsdp2").position(name, 5).numel for name in on.parameters)
        == (matrices + others) // ranks
    )
    # A rank sends its shards of matrices that others own, and the results of its own matrices: by hand for each.
    own = [
        sum(2 * shard.numel for shard in run.shards if shard.owner == rank) for rank in range(ranks)
    ]
    assert run.sent == [
        (2 * matrices - mine) // ranks + mine * (ranks - 1) // ranks for mine in own
    ]

    counted = tally_of("owner", on)
    assert sum(counted.sent) == sent
    assert sum(counted.flops) == pytest.approx(flops, rel=1e-12)
    assert counted.state == [kept] * ranks
    assert counted.scratch == on.intermediates + under_way
    assert sum(map(sum, counted.work.values())) == 560

    row = json.loads(
        printed("--model", "llama-70b", "--mesh", "shard=64", "--layout", "fsdp2", "--json")
    )["schemes"][0]
    assert (row["sent_mean"], row["sent_max"]) == (sent / ranks, max(run.sent))
    assert row["flops_mean"] == pytest.approx(flops / ranks, rel=1e-12)
    assert (row["state"], row["scratch"]) == (kept, on.intermediates + under_way)


# ---------------------------------------------------------------------------------------- from real assignments


def transferred(on: Setting, layout: str, **chosen: object) -> list[int]:
    """Bytes by rank, from each rank's own transfers of each shard, as a step carries them out."""
    (run,) = on.plan(layout, **chosen).runs
    sent = [0] * run.size
    for shard in run.shards:
        for rank in range(run.size) if shard.owner is not None else ():
            moves = shard.local_transfers(rank)
            if moves.sends and rank != shard.owner:
                sent[rank] += moves.numel * on.dtype.itemsize
            for box in moves.owner_boxes:
                sent[rank] += (
                    box.numel * on.dtype.itemsize * sum(other != rank for other in box.holders)
                )
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
    expected = sum(flops(on.cost(matrix.kind.shape)) for matrix in on.matrices)
    for name, copies in {**dict.fromkeys(LAYOUTS, 1), "everyone": on.mesh.ranks}.items():
        counted = tally_of(name, on)
        assert sum(counted.flops) == pytest.approx(copies * expected)
        assert sum(counted.load) == pytest.approx(copies * sum(on.loads))


@settings(max_examples=30)
@given(SETTINGS)
def test_state_is_held_once_in_a_replica_or_once_a_rank(on: Setting):
    all_state = 4 * sum(matrix.numel for matrix in on.matrices) + 2 * 4 * 21
    copies = {
        "owner": on.mesh.dp,
        "whole parameters": 1,
        "owner, flat cuts": 1,
        "split": on.mesh.ranks,
    }
    for name, often in copies.items():
        assert sum(tally_of(name, on).state) == often * all_state


@settings(max_examples=30)
@given(SETTINGS, st.integers(1, 2**22))
def test_exchanges_take_a_bucket_or_what_there_is(on: Setting, bucket: int):
    """The bytes in transit at one time are bounded by the bucket and by the total; a large matrix is sent alone."""
    on = dataclasses.replace(on, bucket=bucket, _layouts={})
    scratch = tally_of("owner", on).scratch - on.intermediates
    assert scratch <= BUFFERS_PER_BUCKET * sum(on.sizes)
    assert scratch <= max(bucket, BUFFERS_PER_BUCKET * max(on.sizes))


# ------------------------------------------------------------------------------------------------- models and meshes


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_size(name: str):
    assert model(name).numel == pytest.approx(PUBLISHED[name], rel=1e-3)


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "n_inner": None,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
}
QWEN3 |= {
    "num_attention_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3 |= {"num_key_value_heads": 8}


@pytest.mark.parametrize(("entries", "numel"), [(GPT2, 124_439_808), (QWEN3, 596_049_920)])
def test_a_config_of_hugging_face_gives_the_published_number_of_parameters(
    entries: object, numel: int, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert model(str(tmp_path / "config.json")).numel == numel


@given(SETTINGS)
def test_zero_3_computes_each_matrix_once(on: Setting):
    tally = tally_of("DeepSpeed ZeRO-3", on)
    assert sum(tally.flops) == pytest.approx(
        sum(flops(on.cost(matrix.shape)) for matrix in matrices_of(on))
    )
    assert sum(tally.load) == pytest.approx(sum(on.loads))


def test_llama_factory_gathers_on_every_rank_and_scatters_from_the_first():
    """A matrix of 256 bytes on two ranks: each sends its half to the other, and the first one half of the result."""
    assert tally_of("LLaMA-Factory v1", setting(Mesh(shard=2), [(8, 8)])).sent == [128 + 128, 128]


def test_deepspeed_zero_3_pads_rounds():
    """Matrices of 64, 256 and 64 elements on two ranks: a round is padded to 256, the next has a dummy of 64."""
    tally = tally_of("DeepSpeed ZeRO-3", setting(Mesh(shard=2), [(8, 8), (8, 32), (8, 8)]))
    assert tally.sent == [4 * (2 * (32 + 128 + 32) + 2 * (256 + 64))] * 2
    small, large, _ = setting(Mesh(), [(8, 8), (8, 32), (8, 8)]).loads
    assert tally.load == [2 * small, large]


def test_deepspeed_zero_1_computes_what_crosses_a_cut_twice():
    tally = tally_of("DeepSpeed ZeRO-1/2", setting(Mesh(shard=2), [(8, 8)] * 3))
    assert tally.load[0] == tally.load[1]
    assert sum(tally.load) == pytest.approx(4 / 3 * sum(setting(Mesh(shard=2), [(8, 8)] * 3).loads))
    assert sum(tally.state) == 4 * 4 * 64 + 2 * 4 * 21


def test_dions_batches_are_filled_up():
    """Three matrices on two ranks are two batches of two: a rank sends half a matrix, there and back, in each."""
    tally = tally_of("Dion's Muon", setting(Mesh(shard=2), [(8, 8)]))
    alike = tally_of("Dion's Muon", setting(Mesh(shard=2), [(8, 8)] * 3))
    assert alike.sent == [2 * (2 * 64 * 4 / 2)] * 2
    assert alike.load == [2 * load for load in tally.load]


@given(SETTINGS)
def test_torchtitan_computes_each_matrix_once_a_replica_and_sends_it_there_and_back(on: Setting):
    tally = BY_NAME["torchtitan's Muon"].tally(on)
    if on.mesh.shard > 1 and on.mesh.tp > 1:
        assert tally is None
        return
    assert tally is not None
    assert sum(tally.load) == pytest.approx(on.mesh.dp * sum(on.loads))
    there = [
        size * (1 - 1 / own.pieces(on.mesh))
        for own, size in zip(matrices_of(on), on.sizes, strict=True)
    ]
    assert sum(tally.sent) == pytest.approx(on.mesh.dp * 2 * sum(there))


PAGE = Path(__file__).resolve().parents[3] / "docs" / "sharding-layouts.md"
ARGUMENTS = ["--model", "llama-8b", "--mesh", "dp=2,shard=8"]


def test_our_rows_come_first_and_then_the_other_libraries() -> None:
    found = json.loads(printed(*ARGUMENTS, "--json"))["schemes"]
    assert [row["scheme"] for row in found] == [scheme.name for scheme in (*OURS, *PEERS)]


def test_the_page_shows_what_the_program_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(
        r"```text\n\$ python -m benchmarks\.simulator (.*?)\n(.*?)```", page, flags=re.S
    )
    assert blocks
    for arguments, output in blocks:
        found = printed(*arguments.split())
        assert output == found, f"run it with {arguments} and put the output into the page"
