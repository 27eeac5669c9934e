"""The checks of DeepSpeed's Muon, written anew, on ours under the real DeepSpeed; called by `test_deepspeed.py`.

DeepSpeed runs most of them in fp16, which it refuses on CPUs; here they run in bf16 or fp32. Matrices get Muon and
biases AdamW, as in DeepSpeed.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engines.processes import Rank, same, serve

SIDE = 9
ROWS = 16
"""The rows of a micro-batch; more than `SIDE`, so that gradients have full rank."""
BF16 = {"bf16": {"enabled": True}}


class Net(nn.Module):
    """Square layers of an odd side: at stages 1 and 2, a boundary between ranks cuts a matrix."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))
        for name, param in self.named_parameters():
            param.requires_grad_(not name.endswith(frozen))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def _batch(model: nn.Module, at: int, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, SIDE, generator=torch.Generator().manual_seed(at))
    labels = (x @ torch.linspace(-1, 1, SIDE**2).view(SIDE, SIDE)).argmax(-1)
    return x.to(next(model.parameters()).dtype), labels


def _params(model: nn.Module, blocks: int | None = None, method: Any = "auto", **given: Any) -> dict[str, Any]:
    import muonfx as mfx

    labels = {n: "muon" if p.ndim > 1 else "adamw" for n, p in model.named_parameters() if p.requires_grad}
    part = mfx.orthogonalize(dtype=torch.float32, method=method, view=mfx.MatrixView(blocks=blocks))
    return {"lr": 0.02, "weight_decay": 0.0, "orthogonalize": part, "labels": labels, **given}


class Run:
    """An engine that `muonfx.engines.deepspeed.initialize` makes of a configuration."""

    def __init__(self, here: Rank, model: nn.Module, config: dict[str, Any], **given: Any) -> None:
        from muonfx.engines import deepspeed as ours

        self.here, self.accumulate = here, config.get("gradient_accumulation_steps", 1)
        optimizer = {"type": "muonfx.Muon", "params": _params(model, **given)}
        entries = {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0, "optimizer": optimizer}
        self.engine, wrapper, *_ = ours.initialize(model, entries | config)
        self.optimizer = wrapper if isinstance(wrapper, ours.ZeroOptimizer) else wrapper.optimizer
        assert isinstance(self.optimizer, ours.ZeroOptimizer)

    def step(self, at: int, factor: float = 1.0) -> float:
        """One step on this rank's rows of a batch; returns the loss of its last rows."""
        x, y = _batch(self.engine.module, at, ROWS * self.here.size * self.accumulate)
        loss = torch.zeros(())
        for part in range(self.accumulate):
            place = part * self.here.size + self.here.rank
            rows = slice(place * ROWS, (place + 1) * ROWS)
            loss = functional.cross_entropy(self.engine(x[rows]).float(), y[rows])
            self.engine.backward(loss * factor)
            self.engine.step()
        return loss.item()

    def params(self) -> dict[str, Tensor]:
        """Copies of the whole parameters."""
        import deepspeed

        named = dict(self.engine.module.named_parameters())
        is_cut = any(hasattr(param, "ds_id") for param in named.values())
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=is_cut):
            return {name: param.detach().float().clone() for name, param in named.items()}

    def state(self) -> dict[str, Tensor]:
        """Copies of this rank's state."""
        entries = enumerate(self.optimizer.state.values())
        return {f"{at}/{key}": value.clone() for at, entry in entries for key, value in entry.items()}


def _require_moved(before: dict[str, Tensor], run: Run, frozen: tuple[str, ...] = ()) -> None:
    for name, value in run.params().items():
        assert value.isfinite().all(), name
        assert torch.equal(before[name], value) is name.endswith(frozen), name


def trains(here: Rank, config: dict[str, Any], **given: Any) -> None:
    """All parameters change, and the momentum is finite and not zero."""
    run = Run(here, Net(), {"gradient_clipping": 1.0, **BF16, **config}, **given)
    before = run.params()
    for at in range(3):
        run.step(at)
    _require_moved(before, run)
    assert all(value.any() and value.isfinite().all() for value in run.state().values())


def matches(here: Rank, config: dict[str, Any], bound: float = 1e-4, **given: Any) -> None:
    """Two steps change the parameters as in one process that has the whole batch."""
    import muonfx as mfx

    run, alone = Run(here, Net(), config, **given), Net()
    if hasattr(run.engine.optimizer, "param_to_partition_ids"):  # stages 1 and 2: a matrix is cut
        assert any(len(ranks) > 1 for ranks in run.engine.optimizer.param_to_partition_ids[0].values())
    before = run.params()
    alone.load_state_dict(before)
    optimizer = mfx.Muon(alone, **_params(alone, **given))
    for at in range(2):
        run.step(at)
        x, y = _batch(alone, at, ROWS * here.size * run.accumulate)
        optimizer.zero_grad()
        functional.cross_entropy(alone(x), y).backward()
        optimizer.step()
    found = run.params()
    for name, param in alone.named_parameters():
        assert (found[name] - param).norm() <= bound * (param - before[name]).norm() > 0, name


def resumes(here: Rank, config: dict[str, Any]) -> None:
    """A loaded checkpoint has the bits of the state, and the continued run those of the run that did not stop."""
    run, other = (Run(here, Net(), BF16 | config) for _ in range(2))
    for at in range(2):
        run.step(at)
    run.engine.save_checkpoint(str(here.folder))
    other.engine.load_checkpoint(str(here.folder))
    assert any(value.any() for value in run.state().values())
    assert same(run.state(), other.state())
    for one in (run, other):
        one.step(2)
    assert same(run.params(), other.params())


def survives(here: Rank, config: dict[str, Any]) -> None:
    """A step that is skipped for an infinite gradient leaves all state as it was, and training goes on."""
    run = Run(here, Net(), config)
    run.step(0)
    before, state = run.params(), run.state()
    run.step(1, factor=torch.inf if here.rank else 1.0)
    assert run.engine.skipped_steps == 1
    assert same(run.state(), state)
    assert same(run.params(), before)
    run.step(2)
    _require_moved(before, run)
    assert all(value.isfinite().all() for value in run.state().values())


def divides(here: Rank, frozen: tuple[str, ...], wanted: dict[str, float], **given: Any) -> None:
    """The groups have these labels and rates, and all parameters change but the frozen ones."""
    run = Run(here, Net(frozen), {"zero_optimization": {"stage": 2}}, **given)
    assert {group["label"]: group["lr"] for group in run.optimizer.param_groups} == wanted
    before = run.params()
    run.step(0)
    _require_moved(before, run, frozen)


def learns(here: Rank, config: dict[str, Any], blocks: int | None) -> None:
    """The loss falls."""
    run = Run(here, Net(), BF16 | config, blocks=blocks, lr=0.05)
    losses = [run.step(0) for _ in range(6)]
    assert losses[-1] < 0.9 * losses[0], losses


def _zero(stage: int, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}, "gradient_accumulation_steps": accumulate}


OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
STAGES = [_zero(stage) for stage in (1, 2, 3)]
OFFLOADED = [_zero(stage, **OFFLOAD) for stage in (1, 2, 3)]
WHOLE = [_zero(stage, reduce_scatter=False) for stage in (1, 2)]
SCATTERED = [
    _zero(1, reduce_scatter=True),
    _zero(2, reduce_scatter=True),
    _zero(2, 2, reduce_scatter=True, overlap_comm=True),
    _zero(2, 2, reduce_scatter=True, use_multi_rank_bucket_allreduce=False),
    _zero(2, reduce_scatter=True, reduce_bucket_size=50),
    _zero(2, reduce_scatter=True, contiguous_gradients=False),
    _zero(2, 2, reduce_scatter=True, **OFFLOAD),
    _zero(1, 2, reduce_scatter=False, **OFFLOAD),
]
FP32_SUMS = _zero(2) | {"data_types": {"grad_accum_dtype": "fp32"}}
BOTH = {"muon": 0.02, "adamw": 0.02}
METHODS = ("gram", "standard")
CHECKS: dict[str, list[partial[None]]] = {
    "test (TestMuonConfigs)": [partial(trains, config=c, lr=lr) for c in STAGES + OFFLOADED for lr in (0.01, 0.05)],
    "test_ns_method_training": [partial(trains, config=c, method=m) for c in WHOLE for m in METHODS],
    "test_ns_method_stage3": [partial(trains, config=STAGES[2], method=m) for m in METHODS],
    "test_muon_with_optimizer_offload": [partial(matches, config=c) for c in OFFLOADED],
    "test_update_matches_full_gradient_reference": [
        *(partial(matches, config=c, method=m) for c in WHOLE for m in METHODS),
        *(partial(matches, config=c, method="gram") for c in SCATTERED),
    ],
    "test_resumes_with_its_momentum": [partial(resumes, config=c) for c in STAGES],
    "test_bf16_with_fp32_accumulation_trains": [partial(trains, config=FP32_SUMS)],
    "test_training_recovers_from_the_initial_overflow": [partial(survives, config=c) for c in STAGES[:2]],
    "test_muon_with_all_trainable_params": [partial(divides, frozen=(), wanted=BOTH)],
    "test_muon_with_partial_trainable_params_same_optimizer": [
        partial(divides, frozen=("bias",), wanted={"muon": 0.02}),
        partial(divides, frozen=("weight",), wanted={"adamw": 0.02}),
    ],
    "test_muon_with_mixed_trainable_params": [partial(divides, frozen=("0.weight", "0.bias"), wanted=BOTH)],
    "test_muon_adam_learning_rate_overrides": [
        partial(divides, frozen=(), wanted={"muon": 0.04, "adamw": 0.001}, lr=0.04, adamw_lr=0.001)
    ],
    "test_newton_schulz_runs_at_stage_zero": [
        partial(matches, config=_zero(0)),
        partial(matches, config=_zero(0) | BF16, lr=0.1, bound=0.3),  # the parameters are rounded to bf16
    ],
    "test_the_default_config_runs_muon": [partial(matches, config={})],
    "test_newton_schulz_runs_on_the_supported_stages": [partial(matches, config=c) for c in STAGES],
    "test_tags_reach_the_optimizer": [partial(matches, config=c, blocks=3) for c in STAGES],
    "test_training_makes_progress_either_way": [
        partial(learns, config=c, blocks=blocks) for c in STAGES for blocks in (None, 3)
    ],
}
CASES = {f"{check}, {at}": run for check, runs in CHECKS.items() for at, run in enumerate(runs)}


def _carried_out(_: str, check: partial[None], here: Rank) -> dict[str, Any]:
    check(here)
    return {}


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    serve(CASES, _carried_out)
