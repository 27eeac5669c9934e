"""Which dtype the products run in."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.polar import compute_dtype, explain, hardware, orthogonalize, policy
from muonfx.polar.policy import SUPPORTED

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The features that CPU, build and CUDA device report."""
    reported: dict[str, Any] = {"avx512": False, "amx": False, "onednn": False, "capability": (8, 0)}
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: reported["avx512"], raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: reported["amx"], raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: reported["onednn"])
    monkeypatch.setattr(policy, "cuda_capability", lambda index: reported["capability"])
    yield reported
    forget()


def forget() -> None:
    hardware.cpu_has_bf16.cache_clear()
    hardware.cpu_has_amx.cache_clear()


def test_an_explicit_dtype_is_taken_and_float64_stays() -> None:
    for held, dtype in itertools.product(SUPPORTED, SUPPORTED):
        assert compute_dtype(held, CPU, dtype) is dtype
    for device in ("cpu", "cuda", "mps", "meta"):
        assert compute_dtype(torch.float64, torch.device(device)) is torch.float64
    assert compute_dtype(torch.bfloat16, torch.device("meta")) is torch.float32


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_takes_bf16_with_instructions_and_kernels(machine: dict[str, Any], held: torch.dtype) -> None:
    for avx512, amx, onednn in itertools.product((False, True), repeat=3):
        machine.update(avx512=avx512, amx=amx, onednn=onednn)
        forget()
        assert compute_dtype(held, CPU) is (torch.bfloat16 if (avx512 or amx) and onednn else torch.float32)


def test_a_torch_without_these_queries_has_no_bf16(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for query in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, query)
    machine.update(onednn=True)
    forget()
    assert compute_dtype(torch.float32, CPU) is torch.float32


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_cuda_takes_bf16_from_capability_8(
    machine: dict[str, Any], capability: tuple[int, int], expected: torch.dtype
) -> None:
    machine["capability"] = capability
    assert compute_dtype(torch.float32, torch.device("cuda", 0)) is expected
    assert compute_dtype(torch.float16, torch.device("cuda")) is expected


def test_auto_is_what_orthogonalize_uses(machine: dict[str, Any]) -> None:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    for avx512, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        machine.update(avx512=avx512, onednn=True)
        forget()
        assert torch.equal(orthogonalize(x), orthogonalize(x, dtype=dtype))
        assert explain((8, 12)).dtype == dtype


def test_halving_never_pays_on_tiles_and_the_gram_form_does(machine: dict[str, Any]) -> None:
    """8 of 1024 x 1024 took 131 ms batched and 193 by blocks; 4 of 512 x 2048 26 ms in the Gram form, 29 without."""
    machine.update(amx=True, onednn=True)
    forget()
    shapes = {(512, 512): "standard", (1024, 1024): "standard", (512, 2048): "gram", (1024, 4096): "gram"}
    for shape, method in shapes.items():
        found = explain(shape, dtype=torch.bfloat16)
        assert (found.products, found.small_products, found.method) == ("batched", "batched", method), shape


def test_an_unknown_device_takes_what_loses_least() -> None:
    found = explain((512, 512), "xpu", coefficients="keller", dtype=torch.float16)
    assert (found.products, found.method) == ("batched", "standard")


def test_a_transform_with_kernels_is_made_anywhere_and_runs_where_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.kernels, "available", lambda device: False)
    tx = mfx.orthogonalize(products="triton")
    with pytest.raises(RuntimeError, match="products: found 'triton' on cpu"):
        tx.update({"w": torch.ones(2, 2)}, mfx.core.EmptyState())
