"""Kernel times by kind, from made-up kernels with times added up by hand."""

import pytest

from training.profiling import IDLE, Kernel, breakdown, kind_of, lines

NAMES = {
    "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT": "GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128": "attention",
    "void cudnn::fusion::compute_dot_do_o_ragged_specialized<true, 128>(void const*)": "attention",
    "adamw_kernel": "optimizer",
    "cross_entropy_kernel": "LM head's loss",
    "void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<>": "norm",
    "cast_transpose_optimized_kernel(__nv_bfloat16 const*, __nv_fp8_e4m3*)": "cast",
    "void transformer_engine::gated_act_kernel<16, true, float>": "activation",
    "void transformer_engine::fused_rope_thd_linear_grid_backward_kernel<>": "position embedding",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<>>": "gradient norm",
    "Memset (Device)": "copies and sums",
    "something_new": "other",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_kernels_are_told_apart_by_name(name, kind):
    assert kind_of(name) == kind


def test_times_add_up_by_kind_and_gaps_are_idle():
    kernels = [
        Kernel("nvjet_a", 0, 4000),
        Kernel("adamw_kernel", 3000, 5000),  # overlaps by 1 ms
        Kernel("nvjet_b", 7000, 8000),  # 2 ms after everything ended
        Kernel("cast", 7200, 7400),  # inside another
        Kernel("nvjet_a", 8000, 10000),
    ]
    found = breakdown(reversed(kernels), steps=2)
    assert found["step_ms"] == 5.0
    assert {kind: of["ms"] for kind, of in found["kinds"].items()} == {
        "GEMM": 3.5,
        "optimizer": 1.0,
        "cast": 0.1,
        IDLE: 1.0,
    }
    assert found["kinds"]["GEMM"]["launches"] == 1.5
    assert found["kernels"][0] == {"name": "nvjet_a", "kind": "GEMM", "ms": 3.0}
    assert lines(found)[0].endswith("mean of 2: 5.00 ms") and len(lines(found)) == 5


def test_a_profile_without_kernels_is_an_error():
    with pytest.raises(ValueError, match="no kernel"):
        breakdown([], steps=1)
