"""Agreement with the arithmetic of torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon

from muonfx.polar import orthogonalize

KELLER = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(16, 16), (32, 64), (64, 32), (128, 128)])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_keller_in_bf16_is_that_of_torch_muon(shape: tuple[int, int], held: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(held)
    theirs = _muon._zeropower_via_newtonschulz(x, KELLER, 5, 1e-7).double()
    ours = orthogonalize(x, coefficients="keller", dtype=torch.bfloat16).double()
    exact = orthogonalize(x.double(), coefficients="keller")
    assert (ours - theirs).abs().max() < 0.1
    assert (ours - theirs).norm() / theirs.norm() < 0.05
    # As near to the polynomial without rounding as torch's own, which rounds the norm too.
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
