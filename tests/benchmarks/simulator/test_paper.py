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
from benchmarks.simulator.models import MODELS, from_shapes, model
from benchmarks.simulator.report import Cluster, rows
from benchmarks.simulator.tally import OURS, Tally
from muonfx.sharding.plan.assignment import BUFFERS_PER_BUCKET
from tests.benchmarks.simulator.pretended import SETTINGS, setting

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

    arguments = ("--model", "llama-70b", "--mesh", "shard=64", "--layout", "fsdp2")
    row = json.loads(printed(*arguments, "--json"))["schemes"][0]
    assert (row["sent_mean"], row["sent_max"]) == (sent / ranks, max(run.sent))
    assert row["flops_mean"] == pytest.approx(flops / ranks, rel=1e-12)
    assert (row["state"], row["scratch"]) == (kept, on.intermediates + under_way)
    line = next(line for line in printed(*arguments).splitlines() if line.startswith("  owner  "))
    assert line.split("fsdp2")[1].split("  ")[-1]
    assert f"{kept / 1e9:.2f} GB" in line
    assert f"{max(run.sent) / 1e9:.2f} GB" in line


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


def test_an_expert_lies_on_the_mesh_of_its_part():
    on = setting(Mesh(dp=2, shard=4, ep=2), [(16, 48)], experts=4)
    layout = on.layout("fsdp2")
    held = [layout.pieces[name].taking_part for name, own in on.parameters.items() if own.kind.experts]
    assert held == [(0, 1, 4, 5), (2, 3, 6, 7)] * 2
    owners = [share.owner for share in on.plan("fsdp2").runs[0].shares if "experts" in share.name]
    assert all(owner in ranks for owner, ranks in zip(owners, held, strict=True))


# ------------------------------------------------------------------------------------------------- models and meshes


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_size(name: str):
    assert model(name).numel == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=2,dp=2", "pp=2", "dp=two", "shard=6,ep=4", "dp=-1"])
def test_a_wrong_mesh_is_named(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="mesh: found"):
        Mesh.parse(text)
    with pytest.raises(SystemExit):
        main(["--model", "gpt2-xl", f"--mesh={text}"])
    assert "mesh: found" in capsys.readouterr().err


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[dict[str, object], float]] = {
    # sizes as published with the models
    "Llama-3-8B": (LLAMA_8B, 8_030_261_248),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "n_inner": None},
        124_439_808,
    ),
    "Qwen2.5-0.5B": (
        LLAMA_8B
        | {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        494_032_768,
    ),
    "Qwen3-0.6B": (
        LLAMA_8B
        | {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
        596_049_920,
    ),
    "Mixtral-8x7B": (
        LLAMA_8B | {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000},
        46_702_792_704,
    ),
}


def config(folder: Path, entries: object) -> str:
    path = folder / "config.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return str(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_hugging_face_gives_the_published_number_of_parameters(name: str, tmp_path: Path):
    entries, numel = CONFIGS[name]
    (tmp_path / name).mkdir()
    found = model(config(tmp_path / name, entries))
    assert (found.name, found.numel) == (name, numel)
    assert f"{name}: " in printed("--model", found.source, "--mesh", "shard=2")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("{", "is no JSON"),
        ([], "is list, expected an object"),
        ({"model_type": "bert"}, "has the model_type 'bert', expected one of gpt2, llama"),
        (LLAMA_8B | {"hidden_size": -1}, "hidden_size is -1, expected an int from 1"),
        (LLAMA_8B | {"vocab_size": None}, "vocab_size is None"),
        (LLAMA_8B | {"num_attention_heads": 31}, "hidden_size 4096 is no multiple of num_attention_heads 31"),
    ],
)
def test_a_wrong_config_is_named(entries: object, said: str, tmp_path: Path):
    with pytest.raises(ValueError, match=said):
        model(config(tmp_path, entries))


def test_shapes_are_a_model():
    found = from_shapes({"a": (512, 512), "b": (512,), "c": (512, 512), "d": (4, 3, 2)})
    assert [(kind.shape, kind.repeats, kind.muon) for kind in found.kinds] == [
        ((512, 512), 2, True),
        ((512,), 1, False),
        ((4, 3, 2), 1, False),
    ]
    rows = json.loads(printed("--shapes", "512x512*2,512,4x3x2", "--mesh", "shard=2", "--json"))
    assert (rows["parameters"], rows["matrices"]) == (found.numel, 2)


POINTS = st.lists(st.tuples(st.integers(1, 4096), st.floats(1.0, 1e15)), min_size=1, unique_by=lambda point: point[0])


@given(POINTS.map(sorted), st.integers(1, 8192))
def test_a_rate_lies_between_its_neighbours_and_is_theirs_at_the_points(points: list[tuple[int, float]], side: int):
    cluster = Cluster(tuple(points))
    assert all(cluster.rate(at) == pytest.approx(rate) for at, rate in points)
    below = [rate for at, rate in points if at <= side][-1:] or [points[0][1]]
    above = [rate for at, rate in points if at >= side][:1] or [points[-1][1]]
    low, high = sorted([*below, *above])
    assert low * (1 - 1e-9) <= cluster.rate(side) <= high * (1 + 1e-9)


@settings(max_examples=30)
@given(SETTINGS, st.floats(0, 1), st.floats(0, 1))
def test_every_exchange_and_every_matrix_takes_its_time(on: Setting, latency: float, overhead: float):
    """By hand: a bucket goes there and back, or out to all; all ranks agree before a step."""
    plain, slow = (rows(on, Cluster(latency=x, overhead=y), OURS) for x, y in ((0, 0), (latency, overhead)))
    exchanges = {"owner": 3, "split": 2, "whole parameters": 1, "everyone": 1}
    for before, after in zip(plain, slow, strict=True):
        counted = tally_of(after.scheme, on)
        assert after.wire == pytest.approx(before.wire + latency * exchanges.get(after.scheme, counted.exchanges))
        assert after.compute <= before.compute + overhead * max(counted.weighted(lambda side, cost: 1)) + 1e-9
        if after.scheme == "everyone":
            assert after.compute == pytest.approx(before.compute + overhead * len(on.matrices))


# ------------------------------------------------------------------------------------------------------------ output


def printed(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(arguments)) == 0
    return out.getvalue()
