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


def _deepspeed_checks() -> tuple[str, ...]:
    from tests.peers.deepspeed_muon import CHECKS

    return tuple(CHECKS)


CUDA = "needs a CUDA device"
NVME = "DeepSpeed's `async_io` needs libaio"
OWN = "tests internals of DeepSpeed's own Muon"
NO_FLAG = "no such flag: there is one implementation"


def peers() -> list[Peer]:
    return [
        Peer(
            "PyTorch, `test_optim.py`",
            "torch's optimizer inputs and schedulers; the checks are re-implemented",
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
            "in a registry of timm's; the checks are re-implemented",
            ("test_optim_factory",),
            {
                "test_compiled_foreach_adam_optimizers": NO_FLAG,
                "the tests of one optimizer each (`test_sgd`, `test_adam`, ...)": "they have tuned rates for it",
            },
        ),
        Peer(
            "DeepSpeed, `tests/unit/ops/muon` and `test_muon_without_zero_optimizer.py`",
            "through `muonfx.engines.deepspeed` on DeepSpeed 0.19.8, over two processes; the checks are "
            "re-implemented, in bf16 or fp32",
            _deepspeed_checks(),
            {
                "`TestMuonConfigs` with the optimizer Adam": "not Muon",
                "test_offload_loss_scale_equivalence": "needs fp16, which DeepSpeed refuses on CPUs",
                "test_zero3_nvme_momentum_residency": NVME,
                "test_zero3_nvme_aggregate_unswapped_fragments": NVME,
                "test_zero3_nvme_mixed_fragments_numerical_equivalence": NVME,
                "test_zero3_nvme_multirank_mixed_fragments": NVME,
                "test_bounded_gather_matches_unbucketed_training": OWN,
                "test_clear_muon_allgather_buffers": OWN,
                "test_an_overflowed_gradient_does_not_enter_the_momentum": OWN,
                "test_a_finite_gradient_still_moves_the_momentum": OWN,
                "test_a_finite_tensor_still_absorbs_a_step_discarded_for_another": "a skipped step changes no state",
                "test_opt_in_is_off_by_default": OWN,
                "test_per_head_on_a_shard_is_the_shard_of_per_head": OWN,
                "test_the_whole_matrix_path_does_not_survive_the_split": OWN,
                "test_a_stale_head_count_splits_heads_in_half": OWN,
                "test_the_tags_describe_the_shard_and_not_the_model": OWN,
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
