"""On a CUDA device: the numbers of the CPU, state where the parameters are, and no hidden synchronization."""

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.optimizer.over_ranks import SMALL_BUCKET_ON_CUDA
from muonfx.polar import quack
from muonfx.polar.many import DEVICE_SCRATCH
from muonfx.testing import Example

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def draw(dtype: torch.dtype = torch.float32) -> Example:
    shapes = {
        "h.0.fc.weight": (48, 32),
        "h.1.fc.weight": (32, 48),
        "h.0.fc.bias": (48,),
        "wte.weight": (64, 32),
    }
    return Example.of(shapes, steps=3, dtype=dtype)


def chains() -> dict[str, mfx.Transform]:
    muon = mfx.muon_with_adamw(
        0.02,
        1e-3,
        orthogonalize=mfx.orthogonalize(dtype=torch.float32),
        mask=mfx.routing.ndim(min=2),
        labels=mfx.routing.default_labels_by_name,
    )
    return {
        "muon": muon,
        "lion": mfx.lion(1e-3, weight_decay=0.1),
        "whole": mfx.skip_nonfinite(
            mfx.chain(mfx.clip_by_global_norm(1.0), mfx.monitor("grad"), muon)
        ),
        "scheduled": mfx.chain(
            mfx.momentum(debias=True),
            mfx.scale_by_learning_rate(mfx.warmup_cosine_decay_schedule(0.1, 2, 10)),
        ),
        "numbers as tensors": mfx.as_tensors(mfx.adamw(1e-2)),
        "accumulated": mfx.accumulate(mfx.adamw(1e-2), every=2),
        "compact": mfx.chain(
            mfx.momentum(dtype=mfx.int8(64, code="dynamic", min_size=0)),
            mfx.scale_by_adam(
                mu_dtype=mfx.int8(min_size=0), nu_dtype=mfx.fp8(64, min_size=0, stochastic=True)
            ),
        ),
        "followed": mfx.chain(
            mfx.momentum(mfx.linear_schedule(0.5, 0.9, 3)),
            mfx.scale(mfx.exponential_decay(-0.1, 2, 0.5)),
        ),
        "everyday": mfx.chain(
            mfx.scale_by_rms(),
            mfx.contrib.scale_by_factored_rms(min_dim_size_to_factor=16),
        ),
        "averaged": mfx.chain(
            mfx.cautious(mfx.scale_by_adam()), mfx.scale(-0.1), mfx.ema_params(0.9)
        ),
    }


def to_gpu(tree: object) -> object:
    return mfx.tree.map(lambda x: x.cuda(), tree)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make it an error that the host waits for the device."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("name", chains())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_device_gives_the_numbers_of_the_host(name, dtype):
    tx = chains()[name]
    params, steps = draw(dtype)
    on_host, on_device = tx.init(params), tx.init(to_gpu(params))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    tolerance = 5e-2 if name == "compact" else tolerance  # a last bit may decide between two codes
    for grads in steps:
        expected, on_host = tx.update(grads, on_host, params)
        found, on_device = tx.update(to_gpu(grads), on_device, to_gpu(params))
        for key, value in expected.items():
            assert found[key].device.type == "cuda"
            torch.testing.assert_close(found[key].cpu(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", chains())
@pytest.mark.parametrize("donate", [False, True])
def test_an_update_never_waits_for_the_device(name, donate):
    tx = chains()[name]
    params, steps = draw()
    params = to_gpu(params)
    state = tx.init(params)
    grads = [to_gpu(step) for step in steps]
    _, state = tx.update(copy.deepcopy(grads[0]), state, params)  # kernels are loaded at first use
    with no_waiting():
        for step in grads[1:]:
            _, state = tx.update(step, state, params, donate=donate)


def test_the_adapter_steps_on_the_device_with_a_scaler():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)).cuda()
    optimizer = mfx.Muon(model, lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.arange(16, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_a_step_takes_at_most_one_bucket_and_the_scratch_of_one_batch():
    params = {
        f"p{index:03}": nn.Parameter(torch.randn(2048, 1024, device="cuda")) for index in range(128)
    }
    for param in params.values():
        param.grad = torch.randn_like(param)
    optimizer = mfx.TransformOptimizer(params, mfx.muon(1e-3))
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= SMALL_BUCKET_ON_CUDA + DEVICE_SCRATCH, peak / 2**20


# ---------------------------------------------------------------------------- symmetric products, by quack-kernels

with_quack = pytest.mark.skipif(
    importlib.util.find_spec("quack") is None
    or not (torch.cuda.is_available() and quack.is_capable(torch.device("cuda"))),
    reason="needs quack-kernels and a GPU of compute capability 9 or 10",
)


@with_quack
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quack_passes_its_self_test(dtype: torch.dtype):
    assert quack.failure(torch.device("cuda"), dtype) is None


@with_quack
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 2048, 2048), (3, 2048, 4096), (2, 2056, 3000), (1, 8192, 2048)], ids=str
)
def test_the_products_of_quack_are_those_of_float64(
    shape: tuple[int, int, int], dtype: torch.dtype
):
    b, n, k = shape
    wide = torch.randn(b, n, k, device="cuda").to(dtype)
    tall = wide.mT.contiguous()
    addend = torch.randn(b, n, n, device="cuda").to(dtype)
    addend = addend.triu() + addend.triu(1).mT
    for p in (wide, tall.mT):
        assert quack.relative_error(p) <= 1
        assert quack.relative_error(p, addend, alpha=0.5, beta=-1.0) <= 1
    assert quack.relative_error(addend, addend, alpha=2.0315, beta=-4.775) <= 1


@with_quack
def test_a_product_of_quack_never_waits_once_it_is_compiled():
    p = torch.randn(2, 2048, 2560, device="cuda", dtype=torch.bfloat16)
    expected, out = (p.new_empty(2, 2048, 2048) for _ in range(2))
    quack.symmetric_matmul(p, out=expected)
    with no_waiting():
        quack.symmetric_matmul(p, out=out)
    assert torch.equal(out, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quack.symmetric_matmul(p, out=out)
    p.mul_(2)
    graph.replay()
    assert torch.equal(out, 4 * expected)


@with_quack
def test_large_matrices_are_multiplied_by_quack():
    plan = mfx.polar.explain((2048, 4096), "cuda")
    assert (plan.products, plan.small_products) == ("quack", "quack"), plan


@with_quack
def test_a_compiled_step_multiplies_by_quack():
    x = torch.randn(2, 2048, 4096, device="cuda")
    exact = mfx.polar.orthogonalize(x.double(), method="standard")
    compiled = torch.compile(mfx.polar.orthogonalize, fullgraph=True)
    with torch.profiler.profile() as profile:
        result = compiled(x)
    calls = [
        event.count for event in profile.key_averages() if event.key == "muonfx::symmetric_matmul"
    ]
    assert sum(calls) > 0
    assert (result - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize(
    "shape", [(3, 1024, 1024), (2048, 4096), (4096, 1000), (64, 512, 512), (1000, 1001)], ids=str
)
@pytest.mark.parametrize("products", ["batched", "auto"])
@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
def test_every_way_to_orthogonalize_gives_the_polynomial(
    shape: tuple[int, ...], products: str, method: str
):
    x = torch.randn(shape, device="cuda")
    exact = mfx.polar.orthogonalize(x.double(), method="standard")
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.03), (torch.float16, 0.01)):
        found = mfx.polar.orthogonalize(x, method=method, products=products, dtype=dtype)
        assert (found - exact).norm() < bound * exact.norm(), dtype
        scaled = mfx.polar.orthogonalize(x * 2.0**60, method=method, products=products, dtype=dtype)
        assert torch.equal(scaled, found), dtype


def test_orthogonalize_never_waits_for_the_device():
    x = torch.randn(2, 1024, 2048, device="cuda")
    mfx.polar.orthogonalize(x)  # compiles, and tests quack-kernels
    with no_waiting():
        mfx.polar.orthogonalize(x)


# ----------------------------------------------------------------------------------------------------- offloaded states


@pytest.fixture(params=["memory", "disk"])
def home(request, tmp_path) -> str:
    """Where the state is stored, as `offload` takes it."""
    return "cpu" if request.param == "memory" else str(tmp_path)


@pytest.mark.parametrize("name", chains())
@pytest.mark.parametrize("donate", [False, True])
def test_an_offloaded_state_gives_the_same_bits(name, home, donate):
    tx = chains()[name]
    params, steps = draw()
    params = to_gpu(params)
    away = mfx.sharding.offload(tx, home, bucket_bytes=1 << 26)
    here, there = tx.init(params), away.init(params)
    for grads in steps:
        grads = to_gpu(grads)
        expected, here = tx.update(grads, here, params)
        found, there = away.update(grads, there, params, donate=mfx.Donation(False, donate))
        for key, value in expected.items():
            assert found[key].device.type == "cuda"
            assert torch.equal(found[key], value), key
        pairs = zip(
            mfx.tree.names(here), mfx.tree.leaves(here), mfx.tree.leaves(there), strict=True
        )
        for key, value, kept in pairs:
            assert torch.equal(kept.cpu(), value.cpu()), key


def test_offloaded_leaves_lie_in_host_memory(home):
    params = to_gpu(draw()[0])
    tx = mfx.sharding.offload(mfx.scale_by_adam(), home)
    state = tx.init(params)
    for _ in range(2):
        assert {leaf.device.type for leaf in state.mu.values()} == {"cpu"}
        assert state.count.device.type == "cuda"
        if home == "cpu":
            assert all(leaf.is_pinned() for leaf in state.mu.values())
        _, state = tx.update(params, state, params)


def test_many_small_buckets_give_the_same_bits(home):
    # Rooms are used again while copies are under way: a race would show in some step.
    shapes = {f"p{i:02}": (257 + 64 * (i % 5), 129 + i) for i in range(24)}
    params = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    tx = mfx.chain(mfx.scale_by_adam(), mfx.momentum(), mfx.scale(0.1))
    away = mfx.sharding.offload(tx, home, bucket_bytes=1 << 18)
    here, there = tx.init(params), away.init(params)
    for _ in range(20):
        grads = {name: torch.randn_like(leaf) for name, leaf in params.items()}
        expected, here = tx.update(grads, here, params, donate=mfx.Donation(False, True))
        found, there = away.update(grads, there, params, donate=mfx.Donation(False, True))
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
    for value, kept in zip(mfx.tree.leaves(here), mfx.tree.leaves(there), strict=True):
        assert torch.equal(kept.cpu(), value.cpu())


def test_the_device_holds_two_buckets_of_the_state(home):
    # 4 MiB each; 256 MiB of state
    params = {f"p{i:02}": torch.randn(1 << 20, device="cuda") for i in range(32)}
    tx = mfx.sharding.offload(mfx.scale_by_adam(), home, bucket_bytes=16 << 20)
    state = tx.init(params)
    grads = {name: torch.randn_like(leaf) for name, leaf in params.items()}
    _, state = tx.update(grads, state, params, donate=mfx.Donation(False, True))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    updates, state = tx.update(grads, state, params, donate=mfx.Donation(False, True))
    peak = torch.cuda.max_memory_allocated() - held
    # The updates, 128 MiB; two rooms of 16 MiB; what Adam takes for one bucket's arithmetic.
    assert peak <= (128 + 2 * 16 + 48) << 20, peak / 2**20
    del updates
    assert torch.cuda.memory_allocated() - held <= 1 << 20


def test_the_state_of_the_torch_optimizer_follows_a_model_that_is_moved():
    params, steps = draw()
    model = nn.ParameterDict(
        {name.replace(".", "_"): nn.Parameter(value) for name, value in params.items()}
    )
    twin = copy.deepcopy(model).cuda()
    moved, other = (
        mfx.TransformOptimizer(m, mfx.lion(1e-3, weight_decay=0.1)) for m in (model, twin)
    )
    for step, grads in enumerate(steps):
        for m, optimizer in ((model, moved), (twin, other)):
            for name, grad in grads.items():
                param = m[name.replace(".", "_")]
                param.grad = grad.to(param.device)
            optimizer.step()
        if step == 0:
            model.cuda()
    for name, param in model.items():
        assert {leaf.device.type for leaf in moved.state[param].values()} == {"cuda"}
        torch.testing.assert_close(param, twin[name])
