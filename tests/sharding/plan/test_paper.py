"""The planner on paper: its figures against counting every message of a small run, and its output against itself."""

import io
import itertools
import json
import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.sharding.plan import peers, schemes
from muonfx.sharding.plan.__main__ import main
from muonfx.sharding.plan.balance import assign
from muonfx.sharding.plan.mesh import Mesh, matrices
from muonfx.sharding.plan.models import MODELS, Kind, Model, from_shapes, model
from muonfx.sharding.plan.peers import SCHEMES
from muonfx.sharding.plan.plan import AT_A_TIME
from muonfx.sharding.plan.report import WIDTH, Machine, rows
from muonfx.sharding.plan.schemes import Ledger, Setting, Tally, flat_cuts

DOCS = Path(__file__).resolve().parents[3] / "docs"
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
PUBLISHED = {"gpt2-xl": 1.558e9, "llama-8b": 8.03e9, "llama-70b": 70.6e9, "deepseek-v3": 671.0e9, "gpt-1t": 1.008e12}


# --------------------------------------------------------------------------------------- a run, message by message


class Run:
    """Ranks that hold named blocks of bytes and send them to each other; what is not held cannot be sent."""

    def __init__(self, ranks: int):
        self.sent = [0.0] * ranks
        self.held: list[set[object]] = [set() for _ in range(ranks)]

    def send(self, source: int, target: int, block: object, size: float) -> None:
        assert block in self.held[source], f"rank {source} does not hold {block}"
        if source != target:
            self.sent[source] += size
            self.held[target].add(block)

    def ring(self, ranks: Iterable[int], first: int, block: object, size: float) -> None:
        order = list(ranks)
        at = order.index(first)
        order = order[at:] + order[:at]
        for source, target in itertools.pairwise(order):
            self.send(source, target, block, size)


def setting(mesh: Mesh, shapes: list[tuple[int, int]], experts: int = 0) -> Setting:
    kinds = [Kind(f"matrix {i}", shape, 1, muon=True) for i, shape in enumerate(shapes)]
    kinds += [Kind("experts", (16, 48), experts, muon=True, experts=True)] if experts else []
    small = Model("small", "made up", (*kinds, Kind("embedding", (7, 3), 1, muon=False)))
    return Setting(small, mesh, matrices(small, mesh, "cpu", torch.float32), "cpu", torch.float32)


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
    st.lists(st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 48, 64])), min_size=1, max_size=5),
    st.integers(0, 5),
)


def owner(on: Setting) -> Run:
    mesh, run = on.mesh, Run(on.mesh.ranks)
    holders = [matrix.holders(mesh) for matrix in on.matrices]
    owners = assign(on.loads, holders, mesh.pieces)
    for replica in range(mesh.dp):
        for i, (ranks, own, size) in enumerate(zip(holders, owners, on.sizes, strict=True)):
            first = replica * mesh.pieces
            _there_and_back(run, i, [first + rank for rank in ranks], first + own, size)
    return run


def _there_and_back(run: Run, i: int, ranks: list[int], own: int, size: float) -> None:
    for rank in ranks:
        run.held[rank].add(("piece", i, rank))
        run.send(rank, own, ("piece", i, rank), size / len(ranks))
    assert all(("piece", i, rank) in run.held[own] for rank in ranks)
    for at, rank in enumerate(ranks):
        run.held[own].add(("done", i, at))
        run.send(own, rank, ("done", i, at), size / len(ranks))


def shared_owner(on: Setting) -> Run:
    mesh, run = on.mesh, Run(on.mesh.ranks)
    firsts = [replica * mesh.pieces for replica in range(mesh.dp)]
    groups = [[first + rank for first in firsts for rank in matrix.holders(mesh)] for matrix in on.matrices]
    owners = assign(on.loads, groups, mesh.ranks)
    for i, (matrix, own, size) in enumerate(zip(on.matrices, owners, on.sizes, strict=True)):
        first, holders = own // mesh.pieces * mesh.pieces, matrix.holders(mesh)
        _there_and_back(run, i, [first + rank for rank in holders], own, size)
        for at, rank in enumerate(holders):
            run.ring([start + rank for start in firsts], first + rank, ("done", i, at), size / len(holders))
            assert all(("done", i, at) in run.held[start + rank] for start in firsts)
    return run


def split(on: Setting) -> Run:
    run = Run(on.mesh.ranks)
    for i, (own, size) in enumerate(zip(assign(on.loads, None, on.mesh.ranks), on.sizes, strict=True)):
        run.held[own].add(i)
        run.ring(range(on.mesh.ranks), own, i, size)
    assert all(len(held) == len(on.matrices) for held in run.held)
    return run


def flat(on: Setting) -> Run:
    run = Run(on.mesh.ranks)
    numels = [matrix.numel for matrix in on.matrices]
    each = -(-sum(numels) // on.mesh.ranks)
    at = 0
    held: list[dict[int, int]] = []
    for numel in numels:  # element by element
        mine: dict[int, int] = {}
        for element in range(at, at + numel):
            mine[element // each] = mine.get(element // each, 0) + 1
        held.append(mine)
        at += numel
    assert flat_cuts(numels, on.mesh.ranks) == held
    for i, (mine, own) in enumerate(zip(held, assign(on.loads, [tuple(m) for m in held], len(run.sent)), strict=True)):
        for rank, count in mine.items():
            run.held[rank].add((i, rank))
            run.send(rank, own, (i, rank), count * 4)
            run.held[own].add((i, rank, "done"))
            run.send(own, rank, (i, rank, "done"), count * 4)
    return run


def gram(on: Setting) -> Run:
    """A ring all_reduce passes a P-th of n (n + 1) / 2 numbers on P - 1 times to be added to, and as often the sums."""
    mesh, run = on.mesh, Run(on.mesh.ranks)
    for matrix in on.matrices:
        n, ranks = min(matrix.shape), matrix.pieces(mesh)
        stages = 3  # five steps: two, one, two
        for replica in range(mesh.dp):
            for rank in matrix.holders(mesh):
                for _ in range(stages * 2 * (ranks - 1)):
                    run.sent[replica * mesh.pieces + rank] += n * (n + 1) / 2 * 4 / ranks
    return run


def everywhere(on: Setting) -> Run:
    """Rings of all_gather; then the first rank's result along replicas, sharding and tensor parallel dims."""
    mesh, run = on.mesh, Run(on.mesh.ranks)
    for i, (matrix, size) in enumerate(zip(on.matrices, on.sizes, strict=True)):
        holders = matrix.holders(mesh)
        piece = size / len(holders)
        for replica in range(mesh.dp):
            ranks = [replica * mesh.pieces + rank for rank in holders]
            for rank in ranks:
                run.held[rank].add((i, rank))
            # each rank gives its piece to its neighbour, and so on
            for rank in ranks:
                run.ring(ranks, rank, (i, rank), piece)
            assert all((i, rank) in run.held[other] for rank in ranks for other in ranks)
        for rank in holders:  # broadcast along replicas
            run.held[rank].add((i, "done", rank))
            run.ring(range(rank, mesh.ranks, mesh.pieces), rank, (i, "done", rank), size)
        rows = len(holders) // mesh.tp
        for replica in range(mesh.dp):
            grid = [[replica * mesh.pieces + holders[s * mesh.tp + t] for t in range(mesh.tp)] for s in range(rows)]
            for t in range(mesh.tp):  # scatter along the sharding dim
                run.sent[grid[0][t]] += (rows - 1) * size / rows
            for s in range(rows):  # and along the tensor parallel one
                run.sent[grid[s][0]] += (mesh.tp - 1) * piece
    return run


RUNS: dict[str, Callable[[Setting], Run]] = {
    "owner": owner,
    "shared owner": shared_owner,
    "split": split,
    "owner, flat cuts": flat,
    "Gram all-reduce": gram,
    "LLaMA-Factory v1": everywhere,
}


@pytest.mark.parametrize("name", RUNS)
@given(on=SETTINGS)
def test_bytes_are_those_of_every_message(name: str, on: Setting):
    scheme = BY_NAME[name]
    if scheme.fits(on.mesh):
        assert scheme.tally(on).sent == pytest.approx(RUNS[name](on).sent, abs=1e-6)


@given(SETTINGS)
def test_the_owner_route_sends_what_its_formula_says(on: Setting):
    want = sum(
        2 * size * (p - 1) / p * on.mesh.dp
        for matrix, size in zip(on.matrices, on.sizes, strict=True)
        for p in [matrix.pieces(on.mesh)]
    )
    assert sum(BY_NAME["owner"].tally(on).sent) == pytest.approx(want)


def _copies(on: Setting) -> dict[str, int]:
    once = dict.fromkeys(("shared owner", "whole parameters", "owner, flat cuts", "split", "DeepSpeed ZeRO-3"), 1)
    return {**once, "owner": on.mesh.dp, "everyone": on.mesh.ranks}


@given(SETTINGS)
def test_each_matrix_is_computed_as_often_as_the_scheme_says(on: Setting):
    for name, copies in _copies(on).items():
        if BY_NAME[name].fits(on.mesh):
            tally = BY_NAME[name].tally(on)
            assert sum(tally.flops) == pytest.approx(copies * sum(matrix.cost.flops for matrix in on.matrices))
            assert sum(tally.load) == pytest.approx(copies * sum(on.loads))


@given(SETTINGS)
def test_state_is_held_once_in_a_replica_or_once_a_rank(on: Setting):
    all_state = 4 * sum(matrix.numel for matrix in on.matrices) + 2 * 4 * 21
    copies = {"owner": on.mesh.dp, "whole parameters": 1, "owner, flat cuts": 1, "split": on.mesh.ranks}
    for name, often in copies.items():
        assert sum(BY_NAME[name].tally(on).state) == pytest.approx(often * all_state)


def one(name: str, mesh: Mesh, shapes: list[tuple[int, int]]) -> Tally:
    return BY_NAME[name].tally(setting(mesh, shapes))


def test_deepspeed_zero_3_pads_rounds():
    """Matrices of 64, 256 and 64 elements on two ranks: a round is padded to 256, the next has a dummy of 64."""
    tally = one("DeepSpeed ZeRO-3", Mesh(shard=2), [(8, 8), (8, 32), (8, 8)])
    assert tally.sent == [4 * (2 * (32 + 128 + 32) + 2 * (256 + 64))] * 2
    small, large, _ = setting(Mesh(), [(8, 8), (8, 32), (8, 8)]).loads
    assert tally.load == [2 * small, large]


def test_deepspeed_zero_1_computes_what_crosses_a_cut_twice():
    tally = one("DeepSpeed ZeRO-1/2", Mesh(shard=2), [(8, 8)] * 3)
    assert tally.load[0] == tally.load[1]
    assert sum(tally.load) == pytest.approx(4 / 3 * sum(setting(Mesh(shard=2), [(8, 8)] * 3).loads))
    assert sum(tally.state) == 4 * 4 * 64 + 2 * 4 * 21


def test_dions_batches_are_filled_up():
    """Three matrices on two ranks are two batches of two: a rank sends half a matrix, there and back, in each."""
    tally = one("Dion's Muon", Mesh(shard=2), [(8, 8)])
    alike = one("Dion's Muon", Mesh(shard=2), [(8, 8)] * 3)
    assert alike.sent == [2 * (2 * 64 * 4 / 2)] * 2
    assert alike.load == [2 * load for load in tally.load]


def test_whole_parameters_send_nothing():
    assert one("whole parameters", Mesh(dp=2, shard=2), [(8, 8)] * 3).sent == [0.0] * 4


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


def test_a_wrong_model_is_named():
    with pytest.raises(ValueError, match="model: found 'gpt-5', expected one of gpt2-xl"):
        model("gpt-5")


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


def test_a_config_is_what_the_model_of_the_same_sizes_is(tmp_path: Path):
    assert model(config(tmp_path, LLAMA_8B)).kinds == model("llama-8b").kinds
    latent = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert model(config(tmp_path, latent)).kinds == model("deepseek-v3").kinds


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("{", "is no JSON"),
        ([], "is list, expected an object"),
        ({"model_type": "bert"}, "has the model_type 'bert', expected one of gpt2, llama"),
        (LLAMA_8B | {"hidden_size": -1}, "hidden_size is -1, expected an int from 1"),
        (LLAMA_8B | {"hidden_size": 4096.0}, "hidden_size is 4096.0"),
        (LLAMA_8B | {"num_hidden_layers": 10**30}, "num_hidden_layers is 1"),
        (LLAMA_8B | {"vocab_size": None}, "vocab_size is None"),
        (LLAMA_8B | {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        (LLAMA_8B | {"num_attention_heads": 31}, "hidden_size 4096 is no multiple of num_attention_heads 31"),
    ],
)
def test_a_wrong_config_is_named(entries: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = config(tmp_path, entries)
    with pytest.raises(ValueError, match=said):
        model(path)
    with pytest.raises(SystemExit):
        main(["--model", path, "--mesh", "shard=2"])
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "absent.json"), "--mesh", "shard=2"])
    assert "absent.json" in capsys.readouterr().err


def test_shapes_are_a_model():
    found = from_shapes({"a": (512, 512), "b": (512,), "c": (512, 512), "d": (4, 3, 2)})
    assert [(kind.shape, kind.repeats, kind.muon) for kind in found.kinds] == [
        ((512, 512), 2, True),
        ((512,), 1, False),
        ((4, 3, 2), 1, False),
    ]
    rows = json.loads(printed("--shapes", "512x512*2,512,4x3x2", "--mesh", "shard=2", "--json"))
    assert (rows["parameters"], rows["matrices"]) == (found.numel, 2)


@pytest.mark.parametrize("shapes", [[(0, 4)], [(-1, 4)], [(4, 10**30)], [(True, 4)], [(4.0, 4)], [(4,)], []])
def test_wrong_shapes_are_named(shapes: list[tuple[int, ...]]):
    with pytest.raises(ValueError, match=r"expected ints from 1|no matrix"):
        from_shapes(shapes)


@pytest.mark.parametrize("text", ["", "4x", "4x-4", "4x4*0", "4x4*10000000", "9" * 40 + "x2", "4*4*4", "axb"])
def test_wrong_shapes_on_the_command_line_are_named(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([f"--shapes={text}", "--mesh", "shard=2"])
    assert "shapes: " in capsys.readouterr().err


def test_an_absurd_mesh_or_bucket_is_refused(capsys: pytest.CaptureFixture[str]):
    for wrong in (["--mesh", "dp=999999999"], ["--mesh", f"dp={'9' * 5000}"], ["--mesh", "dp=1", "--bucket", "9" * 99]):
        with pytest.raises(SystemExit):
            main(["--model", "gpt2-xl", *wrong])
        assert "expected" in capsys.readouterr().err


@given(SETTINGS, st.integers(1, 2**22))
def test_exchanges_take_a_bucket_or_what_there_is(on: Setting, bucket: int):
    """All that is under way at a time is bounded by the bucket, by what there is, and by nothing less than a matrix."""
    on = on._replace(bucket=bucket)
    scratch = on.exchanged - on.intermediates
    assert scratch <= AT_A_TIME * sum(on.sizes)
    assert scratch <= max(bucket, AT_A_TIME * max(on.sizes))
    assert scratch >= min(bucket - AT_A_TIME, AT_A_TIME * max(on.sizes))


def test_entries_for_many_ranks_make_no_ledger_each():
    """A ledger has a place for every rank: with one an entry, 100,000 ranks would take minutes."""
    made = []

    class Counting(Ledger):
        def __init__(self, ranks: int) -> None:
            made.append(ranks)
            super().__init__(ranks)

    mesh = Mesh(shard=1000)
    small = setting(mesh, [(16, 48)] * 3 + [(32, 64)] * 3)
    with pytest.MonkeyPatch.context() as patch:
        for module in (schemes, peers):
            patch.setattr(module, "Ledger", Counting)
        for scheme in SCHEMES:
            if scheme.fits(mesh):
                scheme.tally(small)
    assert len(made) <= 10 * len(SCHEMES)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--bandwidth", "300"],
        ["--bandwidth", "0,1"],
        ["--bandwidth", "nan,1"],
        ["--flops", "-1"],
        ["--flops", "inf"],
        ["--flops", "512:1,128:2"],
        ["--flops", "0:1"],
        ["--flops", "128:x"],
        ["--flops", ""],
        ["--latency", "-1"],
        ["--overhead", "nan"],
        ["--node", "0"],
    ],
)
def test_wrong_rates_are_named(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--model", "gpt2-xl", "--mesh", "shard=8", *wrong])
    assert "found" in capsys.readouterr().err


POINTS = st.lists(st.tuples(st.integers(1, 4096), st.floats(1.0, 1e15)), min_size=1, unique_by=lambda point: point[0])


@given(POINTS.map(sorted), st.integers(1, 8192))
def test_a_rate_lies_between_its_neighbours_and_is_theirs_at_the_points(points: list[tuple[int, float]], side: int):
    machine = Machine(tuple(points))
    assert all(machine.rate(at) == pytest.approx(rate) for at, rate in points)
    below = [rate for at, rate in points if at <= side][-1:] or [points[0][1]]
    above = [rate for at, rate in points if at >= side][:1] or [points[-1][1]]
    low, high = sorted([*below, *above])
    assert low * (1 - 1e-9) <= machine.rate(side) <= high * (1 + 1e-9)


@given(SETTINGS, st.floats(0, 1), st.floats(0, 1))
def test_every_exchange_and_every_matrix_takes_its_time(on: Setting, latency: float, overhead: float):
    """Ours by hand: what a bucket takes there and back, the agreement before a step, and the matrices of a rank."""
    plain, slow = (rows(on, Machine(latency=x, overhead=y), SCHEMES) for x, y in ((0, 0), (latency, overhead)))
    exchanges = {"owner": 3, "split": 2, "whole parameters": 1, "everyone": 1}
    for before, after in zip(plain, slow, strict=True):
        tally = BY_NAME[after.scheme].tally(on)
        assert sum(map(sum, tally.sides.values())) == pytest.approx(sum(tally.load))
        assert after.wire == pytest.approx(before.wire + latency * exchanges.get(after.scheme, tally.exchanges))
        assert after.compute <= before.compute + overhead * max(tally.matrices) + 1e-9
        if after.scheme == "everyone":
            assert after.compute == pytest.approx(before.compute + overhead * len(on.matrices))


def test_small_matrices_run_at_their_own_rate():
    def compute(*more: str) -> float:
        found = json.loads(printed("--model", "gpt2-xl", "--mesh", "dp=1", "--json", "--layout", "ddp", *more))
        return found["schemes"][-1]["compute"]

    assert compute("--flops", "1600:200") == pytest.approx(2 * compute())
    assert compute("--flops", "800:100,3200:300") == pytest.approx(2 * compute())  # 1600 is halfway: 200
    assert compute("--overhead", "1000") == pytest.approx(compute() + 192e-3)


# ------------------------------------------------------------------------------------------------------------ output


def printed(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(arguments)) == 0
    return out.getvalue()


@pytest.mark.parametrize("mesh", ["dp=64,shard=8,tp=8", "dp=2,shard=64,ep=64", "dp=8", "shard=512", "dp=1"])
@pytest.mark.parametrize("name", MODELS)
def test_a_table_fits_a_page(name: str, mesh: str):
    lines = printed("--model", name, "--mesh", mesh).splitlines()
    assert max(map(len, lines)) <= WIDTH
    (heading,) = (line for line in lines if line.startswith("scheme "))
    rows = [line for line in lines if re.match(r"  .{19}(fsdp2|zero|ddp)", line)]
    assert rows
    assert all(len(line) == len(heading) for line in rows)


def test_json_has_the_figures_of_the_table():
    arguments = ("--model", "llama-8b", "--mesh", "dp=2,shard=8")
    found = json.loads(printed(*arguments, "--json"))
    owner = next(scheme for scheme in found["schemes"] if scheme["scheme"] == "owner")
    matrices_bytes = 2 * (8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096)
    assert owner["sent_mean"] == pytest.approx(2 * matrices_bytes * 7 / 64)
    assert owner["step"] == pytest.approx(owner["compute"] + owner["wire"])
    assert f"{owner['sent_max'] / 1e9:.2f} GB" in printed(*arguments)


def test_a_layout_picks_its_schemes():
    rows = json.loads(printed("--model", "gpt2-xl", "--mesh", "dp=2,shard=2", "--layout", "hsdp", "--json"))["schemes"]
    assert {row["layout"] for row in rows} == {"fsdp2"}
    assert "Not on this mesh: owner, shared owner" in printed("--model", "gpt2-xl", "--mesh", "dp=8")


def test_groups_within_a_node_are_faster():
    def wire(*more: str) -> float:
        found = json.loads(printed("--model", "llama-8b", "--mesh", "shard=8", "--json", "--layout", "fsdp2", *more))
        return found["schemes"][0]["wire"]

    assert wire("--node", "4") == pytest.approx(7.5 * wire())
    assert wire("--bandwidth", "600,1") == pytest.approx(wire() / 2)


def test_the_page_shows_what_the_program_prints():
    """Each block that begins with the command holds its output."""
    page = (DOCS / "sharding-on-paper.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n\$ python -m muonfx\.sharding\.plan (.*?)\n(.*?)```", page, flags=re.S)
    assert blocks
    for arguments, output in blocks:
        assert output == printed(*arguments.split()), f"run it with {arguments} and put the output into the page"
