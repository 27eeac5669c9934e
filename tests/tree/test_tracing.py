"""What is asked of torch without its public names is what its public names say."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from muonfx.tree.tracing import called_once, is_traced


def answer() -> int:
    return 42


def test_a_tracer_calls_it_once_and_keeps_the_answer():
    calls: list[int] = []

    @called_once
    def counted() -> int:
        calls.append(answer())
        return calls[-1]

    compiled = torch.compile(lambda x: x + counted(), backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(())).item() for _ in range(3)] == [42.0] * 3
    assert len(calls) == 1


def test_operators_that_are_recorded_are_noticed():
    seen: list[bool] = []
    make_fx(lambda x: (seen.append(is_traced()), x.neg())[1])(torch.zeros(1))
    assert seen == [True]
    assert not is_traced()
