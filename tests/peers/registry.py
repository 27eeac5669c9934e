"""Which checks of other projects run here, and which do not and why: docs/peers.md shows this list."""

from typing import NamedTuple

__all__ = ["Peer", "page_table", "peers"]


class Peer(NamedTuple):
    """The checks of one project."""

    name: str
    how: str
    run: tuple[str, ...]
    """The names of the checks; some stand for two or three of the project's."""
    left_out: dict[str, str]
    """Why others do not apply."""


def _torch_checks() -> tuple[str, ...]:
    from tests.peers.torch_optim import CHECKS

    return tuple(CHECKS)


CUDA = "needs a CUDA device"
NO_FLAG = "no such flag: there is one implementation"


def peers() -> list[Peer]:
    return [
        Peer(
            "PyTorch, `test_optim.py`",
            "torch's optimizer inputs and schedulers; the checks are written anew",
            _torch_checks(),
            {
                "test_optim_infos_do_not_specify_global_cliquey_kwargs": "checks torch's own table",
                "test_foreach_matches_forloop": NO_FLAG,
                "test_foreach_large_tensor": NO_FLAG,
                "test_fused_matches_forloop": NO_FLAG,
                "test_fused_large_tensor": NO_FLAG,
                "test_fused_does_not_step_if_foundinf": NO_FLAG,
                "test_fused_cpu_matches_cuda": NO_FLAG,
                "test_defaults_changed_to_foreach": NO_FLAG,
                "test_peak_memory_foreach": CUDA,
                "test_mixed_device_dtype": CUDA,
                "test_state_dict_with_cuda_params": CUDA,
                "test_forloop_goes_right_direction_multigpu": CUDA,
                "test_cpu_load_state_dict": CUDA,
                "test_complex": "complex parameters are refused",
                "test_complex_2d": "complex parameters are refused",
                "test_rosenbrock_sparse": "sparse gradients are refused",
                "test_load_nontensor_step": "a count is an integer tensor, and no other type loads",
                "test_second_order_optims_return_consistent_types": "no transform calls the closure",
            },
        ),
        Peer(
            "PyTorch, `VerifyStateDictMixin`",
            "unmodified, over two processes with `fully_shard`",
            ("_verify_msd", "_verify_osd", "_verify_osd_by_load"),
            {},
        ),
        Peer(
            "timm 1.0.31, `tests/test_optim.py`",
            "in a registry of timm's; the checks are written anew",
            ("test_optim_factory",),
            {
                "test_compiled_foreach_adam_optimizers": NO_FLAG,
                "the tests of one optimizer each (`test_sgd`, `test_adam`, ...)": "they have tuned rates for it",
            },
        ),
    ]


def page_table() -> str:
    """The tables of docs/peers.md."""
    lines = ["| project | how | checks that run | do not apply |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.how} | {len(one.run)} | {len(one.left_out)} |" for one in peers()]
    lines += ["", "| does not apply | why |", "|---|---|"]
    lines += [
        f"| {check if ' ' in check else f'`{check}`'} | {why} |"
        for one in peers()
        for check, why in one.left_out.items()
    ]
    return "\n".join(lines)
