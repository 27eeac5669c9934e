"""Which dtype the products run in."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from muonfx.polar import compute_dtype, orthogonalize, policy
from muonfx.polar.hardware import cpu_bf16_is_faster
from muonfx.polar.policy import SUPPORTED

CPU = torch.device("cpu")


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Set what the policy is told: `bf16`, `faster`, `capability`."""
    told: dict[str, object] = {"bf16": False, "faster": False, "capability": (8, 0)}
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: told["bf16"])
    monkeypatch.setattr(policy, "cpu_bf16_is_faster", lambda: told["faster"])
    monkeypatch.setattr(policy, "cuda_capability", lambda index: told["capability"])
    return told


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_an_explicit_dtype_is_taken(dtype: torch.dtype) -> None:
    for held in SUPPORTED:
        assert compute_dtype(held, CPU, dtype) is dtype


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "meta"])
def test_float64_stays(device: str) -> None:
    assert compute_dtype(torch.float64, torch.device(device)) is torch.float64


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_wants_the_feature_and_the_speed(hardware: dict[str, object], held: torch.dtype) -> None:
    for bf16, faster in ((False, False), (False, True), (True, False), (True, True)):
        hardware.update(bf16=bf16, faster=faster)
        expected = torch.bfloat16 if bf16 and faster else torch.float32
        assert compute_dtype(held, CPU) is expected


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_cuda_wants_capability_8(
    hardware: dict[str, object], capability: tuple[int, int], expected: torch.dtype
) -> None:
    hardware["capability"] = capability
    assert compute_dtype(torch.float32, torch.device("cuda", 0)) is expected
    assert compute_dtype(torch.float16, torch.device("cuda")) is expected


def test_other_devices_use_fp32() -> None:
    assert compute_dtype(torch.bfloat16, torch.device("meta")) is torch.float32


def test_measurement_runs_outside_modes_and_maps() -> None:
    for context in ("fake", "vmap", "inference"):
        cpu_bf16_is_faster.cache_clear()
        if context == "fake":
            with FakeTensorMode():
                assert isinstance(cpu_bf16_is_faster(), bool)
        elif context == "vmap":
            torch.func.vmap(lambda x: x + float(cpu_bf16_is_faster()))(torch.ones(3))
        else:
            with torch.inference_mode():
                cpu_bf16_is_faster()
        assert cpu_bf16_is_faster.cache_info().currsize == 1


def test_auto_is_what_orthogonalize_uses(hardware: dict[str, object]) -> None:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    hardware.update(bf16=True, faster=True)
    assert torch.equal(orthogonalize(x), orthogonalize(x, dtype=torch.bfloat16))
    hardware.update(bf16=False)
    assert torch.equal(orthogonalize(x), orthogonalize(x, dtype=torch.float32))
