"""The choices that follow from the built-in rates of devices."""

import torch

from muonfx.polar.policy import Facts, plan
from muonfx.polar.polynomials import polynomials


def test_halving_never_pays_on_tiles_and_the_gram_form_does():
    """8 of 1024 x 1024 took 131 ms batched and 193 by blocks; 4 of 512 x 2048 26 ms in the Gram form, 29 without."""
    facts, bf16 = Facts(tiles=True, kernels=False), torch.bfloat16
    for shape, method in {
        (512, 512): "standard",
        (1024, 1024): "standard",
        (512, 2048): "gram",
        (1024, 4096): "gram",
    }.items():
        found = plan(
            *shape, torch.float32, torch.device("cpu"), polynomials("polar_express_5"), dtype=bf16, facts=facts
        )
        assert (found.products, found.small_products, found.method) == ("batched", "batched", method), shape


def test_an_unknown_device_takes_what_loses_least():
    found = plan(
        512,
        512,
        torch.float32,
        torch.device("xpu"),
        polynomials("keller"),
        dtype=torch.float16,
        facts=Facts(False, False),
    )
    assert (found.products, found.method) == ("batched", "standard")
