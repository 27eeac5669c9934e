"""The code of docs/sharded-models.md: a chain on two ranks, and the file and the norm of a pipeline on four."""

import re
import zlib
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import muonfx as mfx
from tests.processes import Here, World, on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "sharded-models.md"


class Model(nn.Module):
    """An embedding, two blocks, of which each has a matrix and a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def block_with(text: str) -> str:
    """Return the block of code of the page that contains a text."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (code,) = [block for block in blocks if text in block]
    return code


def chain_of_the_page() -> str:
    """Return the block of code that defines ``my_tx``, with products in fp32."""
    code = block_with("my_tx =")
    return code.replace("view=labels.view()", "view=labels.view(), dtype=torch.float32")


def train(mesh: Any, shard: Any) -> Model:
    """Run the code of the page and two steps on the whole batch."""
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {
        "torch": torch,
        "mfx": mfx,
        "model": model,
        "mesh": mesh,
        "fully_shard": shard,
    }
    exec(chain_of_the_page(), names)
    for step in range(2):
        tokens = torch.arange(12).view(3, 4) + step
        names["optimizer"].zero_grad()
        model(tokens).square().mean().backward()
        names["optimizer"].step()
    return model


@on_ranks(2)
def test_a_chain_under_fsdp2(here: Here) -> None:
    sharded = train(here.mesh, fully_shard)
    whole = train(None, lambda module, mesh: module)
    gathered = {
        name: cast(DTensor, shard).full_tensor() for name, shard in sharded.named_parameters()
    }
    torch.testing.assert_close(gathered, dict(whole.named_parameters()), rtol=1e-5, atol=1e-6)


def losses_of_average_and_weights(mesh: Any, shard: Any) -> tuple[float, float]:
    """Train two steps, and return the loss of the average by the code of the page, and the loss of the weights."""
    torch.manual_seed(0)
    model = Model()
    for module in (*model.blocks, model):
        shard(module, mesh=mesh)
    chain = mfx.chain(mfx.Muon.transform_for(model, 0.1, adamw_lr=0.1), mfx.ema_params(0.9))
    optimizer = mfx.TransformOptimizer(model, chain)
    tokens = torch.arange(12).view(3, 4)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return model(tokens).square().mean()

    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    average = optimizer.transform_state["ema_params"].average
    if mesh is None:
        with torch.no_grad():
            loss = torch.func.functional_call(model, average, (tokens,)).square().mean()
    else:
        names: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "average": average,
            "evaluate": loss_of,
        }
        exec(block_with("param.copy_(average[name])"), names)
        loss = names["loss"]
    return float(loss), float(loss_of(model))


@on_ranks(2)
def test_an_average_is_evaluated_under_fsdp2(here: Here) -> None:
    losses = losses_of_average_and_weights(here.mesh, fully_shard)
    expected = losses_of_average_and_weights(None, lambda module, mesh: module)
    assert abs(expected[0] - expected[1]) > 0.01
    assert losses == pytest.approx(expected, rel=2e-3)  # products in bf16


@pytest.mark.parametrize(("dtype", "stated"), [(torch.bfloat16, 0.016), (torch.float32, 3e-5)])
def test_products_magnify_a_small_difference_of_gradients_as_the_page_says(
    dtype: torch.dtype, stated: float
) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(256, 32) @ torch.randn(32, 256)
    other_gradient = gradient * (1 + 1e-7 * torch.randn_like(gradient))
    update, other_update = (
        mfx.polar.orthogonalize(x, dtype=dtype) for x in (gradient, other_gradient)
    )
    difference = float((other_update - update).norm() / update.norm())
    assert stated / 2 < difference < 2 * stated


# ------------------------------------------------------------------------------------------------------------- pipeline

STAGES = {
    1: [["embedding", "blocks.0", "blocks.1", "head"]],
    2: [["embedding", "blocks.0"], ["blocks.1", "head"]],
    4: [["embedding"], ["blocks.0"], ["blocks.1"], ["head"]],
}
"""The modules of each stage, by the number of stages."""

Tensors = dict[str, torch.Tensor]


def blocks_of_pipeline() -> list[str]:
    """Return the blocks of code in the section on pipelines: the file, the keys of a tied embedding, and the norm."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Pipeline\n")[1].split("\n## ")[0]
    file, tied, norm = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [file, tied, norm]


def stage_of(stages: int, index: int, seed: int) -> nn.Module:
    """Return a model that has only the modules of one stage, under their names in the whole model."""
    torch.manual_seed(seed)
    model = Model()
    stage = nn.Module()
    for name in STAGES[stages][index]:
        parent = stage
        *path, last = name.split(".")
        for level in path:
            if not hasattr(parent, level):
                parent.add_module(level, nn.Module())
            parent = parent.get_submodule(level)
        parent.add_module(last, model.get_submodule(name))
    return stage


def set_gradients(stage: nn.Module, step: int) -> None:
    """Set the gradient of each parameter to random numbers that depend on its name and on the step."""
    for name, param in stage.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{step} {name}".encode()))
        gradient = torch.randn(param.shape, generator=generator)
        if isinstance(param, DTensor):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements)
        param.grad = gradient


def take_steps(stage: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(stage, step)
        optimizer.step()


def run_of_page(stage: nn.Module, code: str, **names: Any) -> dict[str, Any]:
    """Run code of the page for a stage. Return the names that it has defined."""
    known = {"torch": torch, "mfx": mfx, "dcp": dcp, "stage": stage, **vars(state_dicts), **names}
    exec(code, known)
    return known


def whole_values(stage: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the parameters and the state of a stage by name, as whole tensors."""
    named: dict[str, Any] = dict(stage.named_parameters())
    for name, param in stage.named_parameters():
        for key, value in optimizer.state[param].items():
            named[f"{name} {key}"] = value
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in named.items()
    }


def saved_and_continued(
    stage: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Tensors, Tensors]:
    """Return copies of the values of a stage after two steps, and after a third one."""
    saved = {name: value.detach().clone() for name, value in whole_values(stage, optimizer).items()}
    take_steps(stage, optimizer, range(2, 3))
    return saved, {
        name: value.detach().clone() for name, value in whole_values(stage, optimizer).items()
    }


def sharded_stage(stages: int, seed: int) -> tuple[nn.Module, DeviceMesh]:
    """Return the stage of this rank, of four ranks, under FSDP2 with the other ranks of the stage."""
    mesh = init_device_mesh("cpu", (stages, 4 // stages), mesh_dim_names=("pp", "dp"))
    stage = stage_of(stages, mesh["pp"].get_local_rank(), seed)
    fully_shard(stage, mesh=mesh["dp"])
    return stage, mesh


def save_stages(here: Here, path: Path, stages: int) -> tuple[Tensors, Tensors]:
    stage, _ = sharded_stage(stages, seed=0)
    building, saving, _ = parts_of_file_block()
    building, state = building.rsplit("\n\n", 1)
    names = run_of_page(stage, building)
    take_steps(stage, names["optimizer"], range(2))
    run_of_page(stage, state + saving, optimizer=names["optimizer"], path=path)
    return saved_and_continued(stage, names["optimizer"])


def load_stages(here: Here | None, path: Path, stages: int) -> tuple[Tensors, Tensors]:
    stage = stage_of(1, 0, seed=1)
    if here is not None:
        stage, _ = sharded_stage(stages, seed=1)
    building, _, loading = parts_of_file_block()
    names = run_of_page(stage, building + loading, path=path)
    return saved_and_continued(stage, names["optimizer"])


def parts_of_file_block() -> tuple[str, str, str]:
    """Return the code of the page that builds the optimizer and its state dict, that saves, and that loads."""
    file, _, _ = blocks_of_pipeline()
    building, saving, loading = re.split(r"(^dcp\.save.*\n)", file, flags=re.MULTILINE)
    return building, saving, loading


def merged(results: list[tuple[Tensors, Tensors]]) -> tuple[Tensors, Tensors]:
    """Return the values of all stages, at the save and one step later."""
    saved: Tensors = {}
    continued: Tensors = {}
    for of_rank in results:
        saved |= of_rank[0]
        continued |= of_rank[1]
    return saved, continued


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*assuming the intent")
def test_a_pipeline_is_saved_to_one_file_and_loads_into_other_stages(
    world: World, tmp_path: Path
) -> None:
    saved, continued = merged(world.check(4, save_stages, path=tmp_path, stages=2))
    one_process = load_stages(None, path=tmp_path, stages=1)
    for loaded in (
        merged(world.check(4, load_stages, path=tmp_path, stages=4)),
        merged(world.check(4, load_stages, path=tmp_path, stages=1)),
        one_process,
    ):
        torch.testing.assert_close(loaded[0], saved, rtol=0, atol=0)
        torch.testing.assert_close(loaded[1], continued, rtol=1e-5, atol=1e-6)


def load_tied_stages(here: Here, path: Path) -> tuple[Tensors, Tensors]:
    stage, mesh = sharded_stage(2, seed=1)
    building, _, loading = parts_of_file_block()
    if mesh["pp"].get_local_rank() == 1:
        _, tied, _ = blocks_of_pipeline()
        tied = tied.replace(".output.weight", ".head.weight").replace(
            ".tok_embeddings.weight", ".embedding.weight"
        )
        loading = re.sub(r"^dcp\.load.*\n", lambda _: tied, loading, flags=re.MULTILINE)
    names = run_of_page(stage, building + loading, path=path)
    return saved_and_continued(stage, names["optimizer"])


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*assuming the intent")
def test_a_tied_embedding_in_a_file_of_one_process_loads_into_two_stages(
    world: World, tmp_path: Path
) -> None:
    whole = stage_of(1, 0, seed=0)
    whole.head.weight = whole.embedding.weight  # type: ignore[union-attr]
    building, saving, _ = parts_of_file_block()
    building, state = building.rsplit("\n\n", 1)
    optimizer = run_of_page(whole, building)["optimizer"]
    take_steps(whole, optimizer, range(2))
    run_of_page(whole, state + saving, optimizer=optimizer, path=tmp_path)
    saved = whole_values(whole, optimizer)
    loaded, _ = merged(world.check(4, load_tied_stages, path=tmp_path))
    for name, value in loaded.items():
        assert torch.equal(value, saved[name.replace("head.weight", "embedding.weight")]), name


@on_ranks(4)
def test_one_norm_of_all_stages_clips_and_skips(here: Here) -> None:
    stage, mesh = sharded_stage(2, seed=0)
    tx = mfx.chain(
        mfx.monitor("grad", ("norm",)), mfx.Muon.transform_for(stage, 3e-4, adamw_lr=1.2e-3)
    )
    optimizer = mfx.TransformOptimizer(stage, tx)
    whole = stage_of(1, 0, seed=0)
    set_gradients(whole, 0)
    set_gradients(stage, 0)
    _, _, code = blocks_of_pipeline()

    norm = run_of_page(stage, code, mesh=mesh, optimizer=optimizer)["norm"]
    torch.testing.assert_close(
        norm, torch.nn.utils.get_total_norm([param.grad for param in whole.parameters()])
    )

    # The chain itself sees the gradients of one stage, here after they were clipped to a norm of 1.
    squares = [None, None]
    dist.all_gather_object(
        squares, float(mfx.metrics(optimizer)["grad/norm"]) ** 2, group=mesh["pp"].get_group()
    )
    assert all(square < 0.9 for square in squares)
    assert sum(squares) == pytest.approx(1.0, rel=1e-5)

    set_gradients(stage, 1)
    if here.rank == 3:
        first = next(stage.parameters())
        first.grad.to_local().fill_(float("nan"))
    before = whole_values(stage, optimizer)
    before = {name: value.detach().clone() for name, value in before.items()}
    run_of_page(stage, code, mesh=mesh, optimizer=optimizer)
    torch.testing.assert_close(whole_values(stage, optimizer), before, rtol=0, atol=0)
