"""Twenty correct uses: type checkers find nothing wrong with them, and they run."""

import torch
from torch import Tensor, nn

import muonfx as mfx


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


@mfx.leafwise
def sign(momentum: mfx.ScalarOrSchedule = 0.9) -> mfx.StateAndStep:
    weight = 1 - mfx.core.checks.in_unit_interval("momentum", momentum)

    def step(update: mfx.Leaf, state: mfx.PyTree) -> tuple[mfx.Leaf, mfx.PyTree]:
        average = state["average"].lerp(update, weight)
        return average.sign(), {"average": average}

    return {"average": mfx.Slot()}, step


@mfx.matrixwise
def center_rows(*, view: mfx.MatrixView = mfx.MatrixView()) -> mfx.StateAndMatrixStep:  # noqa: B008
    def step(matrices: Tensor, state: mfx.PyTree) -> tuple[Tensor, mfx.PyTree]:
        return matrices - matrices.mean(-1, keepdim=True), state

    return mfx.core.EmptyState(), step


@mfx.transform(locality=mfx.Locality.ELEMENT)
def sign_descent(rate: float = 0.1, *, flip: bool = False) -> mfx.InitAndUpdate:
    factor = rate if flip else -rate

    def init(params: mfx.PyTree) -> mfx.core.EmptyState:
        return mfx.core.EmptyState()

    def update(
        updates: mfx.PyTree, state: mfx.core.EmptyState, params: mfx.PyTree = None
    ) -> tuple[mfx.PyTree, mfx.PyTree]:
        return mfx.tree.map(lambda u: factor * u.sign(), updates), state

    return init, update


@mfx.schedule
def inverse_sqrt(rate: float) -> mfx.ScheduleFunction:
    return lambda count: rate / (count + 1).sqrt()


def numbers_tensors_and_schedules() -> list[mfx.Transform]:
    return [
        mfx.momentum(0.95),
        mfx.momentum(torch.tensor(0.95)),
        mfx.momentum(mfx.linear_schedule(0.85, 0.95, 300), nesterov=False),
        mfx.scale_by_learning_rate(inverse_sqrt(0.1)),
        mfx.adamw(1e-3, b1=mfx.linear_schedule(0.85, 0.9, 300), mask=None),
    ]


def dtypes() -> list[mfx.Transform]:
    return [
        mfx.momentum(dtype=torch.bfloat16),
        mfx.momentum(dtype=None),
        mfx.momentum(dtype=mfx.int8(block=256, code="dynamic")),
        mfx.scale_by_adam(0.9, 0.95, mu_dtype="auto", nu_dtype=mfx.fp8(format="e5m2")),
    ]


def names_of_rules_and_sets() -> list[mfx.Transform]:
    return [
        mfx.orthogonalize(coefficients="keller", method="gram", products="auto"),
        mfx.orthogonalize(coefficients=((3.4445, -4.775, 2.0315),), steps=3, dtype=torch.float32),
        mfx.orthogonalize(
            steps=3, view=mfx.MatrixView({"*.weight": "(part=2 out) in -> part out in"})
        ),
        mfx.scale_by_shape("spectral"),
        mfx.monitor("updates", ("norm", "orthogonality_error")),
        center_rows(),
    ]


def chains() -> mfx.Transform:
    return mfx.chain(
        mfx.clip_by_global_norm(1.0),
        ("rate", mfx.scale(-0.1)),
        sign(momentum=0.5),
        sign_descent(flip=True),
    )


def routes(model: nn.Module) -> mfx.Transform:
    matrices = mfx.chain(mfx.momentum(), mfx.orthogonalize(), mfx.scale_by_shape())
    return mfx.chain(
        mfx.partition({"muon": matrices, "adamw": mfx.scale_by_adam()}, mfx.default_labels(model)),
        mfx.masked(mfx.add_decayed_weights(0.1), mfx.routing.ndim(min=2)),
        mfx.scale_by_learning_rate(
            mfx.warmup_cosine_decay_schedule(1e-2, warmup_steps=5, total_steps=20)
        ),
    )


def a_step_keeps_the_type_of_its_parameters(
    tx: mfx.Transform, params: dict[str, Tensor]
) -> dict[str, Tensor]:
    state = tx.init(params)
    grads = mfx.tree.map(torch.ones_like, params)
    updates, state = tx.update(grads, state, params, donate=mfx.Donation(updates=True))
    params = mfx.apply_updates(params, updates)
    return mfx.apply_updates(params, mfx.tree.map(torch.zeros_like, grads), donate=True)


def a_named_tuple_of_parameters_stays_one() -> Tensor:
    pair = mfx.apply_updates((torch.ones(2), torch.ones(3)), (torch.ones(2), None))
    return pair[0]


def schedules() -> float:
    rate: float = inverse_sqrt(2.0)(3)
    at: Tensor = mfx.cosine_decay_schedule(1.0, 10, end=0.1)(torch.tensor(5))
    return (
        rate
        + float(at)
        + mfx.join_schedules([mfx.linear_schedule(0.0, 1.0, 5), mfx.constant_schedule(1.0)], [5])(2)
    )


def torch_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    muon = mfx.Muon(model, lr=1e-2, weight_decay=0.1, lr_scaling="spectral", betas=(0.9, 0.99))
    mine = mfx.TransformOptimizer(
        model, mfx.chain(mfx.momentum(), mfx.scale(-0.1)), donate_grads=True
    )
    torch.optim.lr_scheduler.CosineAnnealingLR(muon, T_max=20)
    return [muon, mine, mfx.Muon(model, torch.tensor(1e-2), adamw_lr=torch.tensor(1e-3))]


def losses_of_steps(model: nn.Module) -> float:
    optimizer = mfx.Muon(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4)).square().sum()
        loss.backward()
        return loss

    loss: Tensor = optimizer.step(closure)
    state: mfx.transforms.MomentumState = mfx.tree.get(
        optimizer.transform_state, mfx.transforms.MomentumState
    )
    measured: dict[str, float] = mfx.diagnose(optimizer).metrics()
    size: int = mfx.summary(optimizer).nbytes
    return loss.item() + len(state.trace) + len(measured) + size


def values() -> str:
    tx = mfx.momentum(0.9)
    other = tx.replace(decay=0.5)
    locality: mfx.Locality = other.locality
    return f"{other.name} {tx.fingerprint} {locality.name} {tx == other}"


def sharding(params: dict[str, Tensor]) -> mfx.Transform:
    layout = mfx.sharding.zero(params, 1, partition="flat")
    whole: dict[str, Tensor] = layout.gather(layout.shard(params))
    whole = mfx.apply_updates(whole, whole)
    away = mfx.sharding.offload(mfx.momentum(), "cpu")
    return mfx.sharding.sharded(away, layout, replicas="split")


def iterations(matrix: Tensor) -> Tensor:
    mfx.polar.explain((64, 64), coefficients="polar_express_5")
    return mfx.polar.orthogonalize(matrix, coefficients="quintic", steps=3, method="standard")


def main() -> None:
    """Run them all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = named(model)
    for tx in [*numbers_tensors_and_schedules(), *dtypes(), chains(), routes(model)]:
        a_step_keeps_the_type_of_its_parameters(tx, dict(params))
    for tx in names_of_rules_and_sets():
        a_step_keeps_the_type_of_its_parameters(tx, {"0.weight": params["0.weight"]})
    a_named_tuple_of_parameters_stays_one()
    schedules()
    torch_optimizers(model)
    losses_of_steps(model)
    values()
    sharding(params)
    iterations(params["0.weight"])
