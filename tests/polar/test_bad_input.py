"""What is refused at the door, and in which words."""

from typing import Any

import pytest
import torch

from muonfx.polar import explain, orthogonalize, orthogonalize_many, polar_factor

GOOD = torch.eye(3)
BAD = [
    (torch.ones(3), ValueError, r"found shape \(3,\), expected \(\.\.\., m, n\)"),
    (torch.ones(()), ValueError, r"found shape \(\)"),
    (torch.ones(3, 3, dtype=torch.int64), TypeError, "found dtype torch.int64"),
    (torch.ones(3, 3, dtype=torch.bool), TypeError, "found dtype torch.bool"),
    (torch.ones(3, 3, dtype=torch.complex64), TypeError, "found dtype torch.complex64"),
    (torch.ones(3, 3).to(torch.float8_e4m3fn), TypeError, ".*expected one of torch.float64"),
    ([[1.0]], TypeError, "found list"),
    (None, TypeError, "found NoneType"),
    (torch.eye(2).to_sparse(), TypeError, r"found layout torch\.sparse_coo"),
]


@pytest.mark.parametrize(("x", "error", "words"), BAD)
def test_what_is_not_a_floating_matrix_is_refused(x, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match="x: " + words):
        orthogonalize(x)
    with pytest.raises(error, match=r"xs\[1\]: " + words):
        orthogonalize_many([GOOD, x])
    with pytest.raises(error, match="x: " + words):
        polar_factor(x)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": 0}, ValueError, "steps: found 0, expected at least 1"),
        ({"steps": -2}, ValueError, "steps: found -2"),
        ({"steps": 2.0}, TypeError, "steps: found 2.0"),
        ({"steps": True}, TypeError, "steps: found True"),
        ({"steps": 0, "coefficients": torch.ones(2, 3)}, ValueError, "steps: found 0"),
        ({"dtype": "bfloat16"}, ValueError, "dtype: found 'bfloat16', expected 'auto' or a torch.dtype"),
        ({"dtype": torch.int8}, TypeError, "dtype: found torch.int8"),
        ({"dtype": torch.complex64}, TypeError, "dtype: found torch.complex64"),
        ({"dtype": None}, TypeError, "dtype: found None"),
        ({"method": "fast"}, ValueError, "method: found 'fast', expected 'auto', 'standard' or 'gram'"),
        ({"method": None}, ValueError, "method: found None"),
        ({"method": "gram", "coefficients": torch.ones(2, 3)}, ValueError, "method: found 'gram' with a tensor"),
        ({"products": "cublas"}, ValueError, "products: found 'cublas'"),
        ({"products": "triton", "dtype": torch.float64}, ValueError, "products: found 'triton' for float64"),
        ({"max_scratch_bytes": 0}, ValueError, "max_scratch_bytes: found 0"),
    ],
)
@pytest.mark.parametrize("x", [GOOD, torch.ones(0, 3)])
def test_malformed_options_are_refused(x: torch.Tensor, options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        orthogonalize(x, **options)
    with pytest.raises(error, match=words):
        orthogonalize_many([x], **options)


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (torch.ones(4, 3), ValueError, r"out: found shape \(4, 3\)"),
        (torch.ones(3, 3).double(), TypeError, "out: found dtype torch.float64"),
        (torch.ones(1).expand(3, 3), ValueError, "out: found an expanded tensor"),
        ([GOOD], TypeError, "out: found list"),
        (torch.ones(3, 3, requires_grad=True), RuntimeError, "out: found under autograd"),
    ],
)
def test_an_out_that_cannot_take_the_result_is_refused(out: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        orthogonalize(GOOD, out=out)
    assert torch.equal(GOOD, torch.eye(3))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: orthogonalize_many([GOOD], out=[GOOD, GOOD]), ValueError, "out: found 2 tensors for 1 inputs"),
        (lambda: orthogonalize_many([GOOD], out=[GOOD], donate=True), ValueError, "out: found together with donate"),
        (lambda: orthogonalize_many([], method="bogus"), ValueError, "method: found 'bogus'"),
        *((lambda rtol=rtol: polar_factor(GOOD, rtol=rtol), ValueError, "rtol") for rtol in (-0.1, 1.0, float("nan"))),
        *(
            (lambda shape=shape: explain(shape), TypeError, r"shape must be \(rows, columns\)")
            for shape in ((32,), (2, 3, 4), (4.0, 4), 128, torch.ones(2, 2))
        ),
    ],
)
def test_other_malformed_arguments_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
