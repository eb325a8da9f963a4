from __future__ import annotations

import csv
import gzip
import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from profiler_core.families import Family, classify, collective, opaque_operator

# name -> family, library, precision, tensor core. Real names: of traces, and of the symbols of cuBLAS 13, cuDNN 9 and
# NCCL 2.28.
KNOWN = {
    # cuBLAS
    "ampere_sgemm_128x64_nn": ("gemm", "cublas", "fp32", False),
    "volta_sgemm_32x32_sliced1x4_tn": ("gemm", "cublas", "fp32", False),
    "ampere_dgemm_128x64_lower_nt": ("gemm", "cublas", "fp64", False),
    "ampere_sgemm_fp16_128x64_lower_tn": ("gemm", "cublas", "fp32", False),  # 16 bits in memory only
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn": ("gemm", "cublas", "bf16", True),
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn": ("gemm", "cublas", "fp16", True),
    "volta_h884gemm_64x64_ldg8_nn": ("gemm", "cublas", "fp16", True),
    "volta_igemm_int8_128x128_ldg4_tn": ("gemm", "cublas", "int8", False),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize256x64x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_split_k_"
    "kernel__5x_cublas": ("gemm", "cublas", "fp32", False),
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x256x32_stage4_warpsize2x4x1_tensor16x8x8_aligna4_alignc4_execute"
    "_kernel__5x_cublas": ("gemm", "cublas", "tf32", True),
    "sm80_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize32x32x16_stage5_warpsize2x2x1_tensor8x8x4": (
        "gemm", "xmma", "fp64", True
    ),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_"
    "cublas": ("gemm", "cublas", "bf16", True),
    "sm90_xmma_gemm_e4m3f16_e4m3f32_f32_tn_n_tilesize64x64x128_cgasize1x1x1_warpgroupsize1x1x1_bias_f16_aligna4_alignc4"
    "_gelu_execute_split_k_kernel__5x_cublas": ("gemm", "cublas", "fp8", True),
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT": ("gemm", "cublas", "fp16", True),
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN": ("gemm", "cublas", "bf16", True),
    "nvjet_sm100_tst_64x8_64x16_2x4_h_bz_splitK_TNT": ("gemm", "cublas", "bf16", True),
    "nvjet_sm103_tst_8x64_64x16_4x1_v_bz_TNN": ("gemm", "cublas", "bf16", True),
    "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT": ("gemm", "cublas", "fp8", True),
    "nvjet_sss_tf32_128x256_TNT": ("gemm", "cublas", "tf32", True),
    "nvjet_xyz_128x256_64x4_TNT": ("gemm", "cublas", "", None),  # letters that nobody has explained
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false, false, cublasGemvParams<"
    "cublasGemvTensorStridedBatched<float const> > >(cublasGemvParams<float>, float, float)": (
        "gemv", "cublas", "", None
    ),
    "enable_if<!T7, void>::type kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 0, 1, 1, 0, 7, 0, "
    "cublasGemvParamsEx<c>>": ("gemv", "cublas", "", None),
    "void gemmk1_kernel<float, 256, 5, false, false, false, false, cublasGemvTensorStridedBatched<__half const> >": (
        "gemm", "cublas", "", None
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true>()": ("gemm", "cublas", "", None),
    # CUTLASS
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(cutlass_80_tensorop_"
    "bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8::Params)": ("gemm", "cutlass", "bf16", True),
    "void Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(Params)": (
        "gemm", "cutlass", "bf16", True
    ),
    "_ZN7cutlass7Kernel2I66cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8EEvNT_6ParamsE": (
        "gemm", "cutlass", "bf16", True
    ),
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(P)": ("gemm", "cutlass", "fp32", False),
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nt_align4>(P)": ("gemm", "cutlass", "tf32", True),
    "cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_void_f16_128x128x64_2x1x1_0_tnn_align8": (
        "gemm", "cutlass", "fp16", True
    ),
    "cutlass3x_sm100_tensorop_s128x128x8tf32gemm_f32_f32_f32_f32_f32_128x128x32_0_nnn_align4_2sm": (
        "gemm", "cutlass", "tf32", True
    ),
    "cutlass3x_sm100_tensorop_s256x128x16_9xbf16gemm_f32_f32_f32_f32_f32_256x128x32_0_ntn_align4_2sm": (
        "gemm", "cutlass", "bf16x9", True
    ),
    "cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_128x64x16_1x1x1_3_tnn_align1_bias_f32_relu": (
        "gemm", "cutlass", "fp32", False
    ),
    "cutlass3x_sm100_bstensorop_s128x128x64gemm_block_scaled_ue4m3xe2m1_ue4m3xe2m1_f32_bf16_bf16_128x128x256_0_tnn": (
        "gemm", "cutlass", "fp4", True
    ),
    # cuDNN
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_execute_"
    "segment_k_off_kernel__5x_cudnn": ("convolution", "cudnn", "bf16", True),
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1_g1_"
    "tensor16x8x8_alignc4_execute_kernel_cudnn": ("convolution", "cudnn", "tf32", True),
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>(P)": (
        "convolution", "cudnn", "bf16", True
    ),
    "cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1": ("convolution", "cudnn", "fp32", False),
    "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_exp_interior_nhwc_tn_v1": ("convolution", "cudnn", "fp16", True),
    "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false>(P)": (
        "convolution", "cudnn", "fp32", None
    ),
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(P)": (
        "layout", "cudnn", "", None
    ),
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1, true>(P)": ("normalization", "cudnn", "", None),
    # wgmma_f16 is what cuDNN says of both 16-bit formats
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": (
        "attention", "cudnn", "", True
    ),
    "void RNN_blockPersist_fp_LSTM<float, float, float, 128>(RnnParams)": ("rnn", "cudnn", "fp32", None),
    "void RNN_blockPersist_fp_LSTM_HMMA<__half, __half, float, 128>(RnnParams)": ("rnn", "cudnn", "fp16", True),
    "void RNN_blockPersist_bp_GRU_FMA<float, float, float, 64>(RnnParams)": ("rnn", "cudnn", "fp32", False),
    "void elemWiseRNNcell<float, float, float, (cudnnRNNMode_t)2, (cudnnRNNBiasMode_t)2>(int)": (
        "rnn", "cudnn", "fp32", None
    ),
    "_Z19LSTM_elementWise_fpIfffL18cudnnRNNBiasMode_t2EEviiiiPKT_S3_S3_S3_": ("rnn", "cudnn", "", None),
    "void persistRNN_addBias<float, float>(int)": ("rnn", "cudnn", "fp32", None),
    # Attention
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t> >(pytorch_flash::Flash_fwd_params)": ("attention", "flash_attention", "bf16", True),
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80, true, "
    "64, 64, 64, true, true>::Params)": ("attention", "memory_efficient_attention", "fp32", None),
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(P)": ("attention", "memory_efficient_attention", "bf16", True),
    "attn_fwd": ("attention", "", "", None),
    # Collectives
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("collective", "nccl", "bf16", None),
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": ("collective", "nccl", "fp32", None),
    "_Z42ncclDevKernel_AllReduce_Sum_f8e4m3_RING_LL24ncclDevKernelArgsStorageILm4096EE": (
        "collective", "nccl", "fp8", None
    ),
    # AMD
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x32x256_MI16x16x1_SN_LDSB1": ("gemm", "tensile", "bf16", True),
    "Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN": ("gemm", "tensile", "fp32", True),
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x64x8_wt64x16x4": ("convolution", "miopen", "", None),
    "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28Gridwise": (
        "convolution", "composable_kernel", "", None
    ),
    "void rocprim::ROCPRIM_400200_NS::detail::trampoline_kernel<int>(P)": ("sort", "rocprim", "", None),
    # Others
    "void cusparse::csrmm_v3_kernel<std::integral_constant<bool, false>, int>(P)": ("sparse", "cusparse", "", None),
    "void regular_fft<32u, (EPT)16>(kernel_arguments_t<unsigned int>)": ("fft", "cufft", "", None),
    "void cub::CUB_200101_750_800_NS::DeviceRadixSortOnesweepKernel<int>(P)": ("sort", "cub", "", None),
    "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256E": ("normalization", "aiter", "", None),
}  # fmt: skip
TRANSPARENT = {
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, at::detail::Array<char*, 1> >": (
        "pointwise", "aten"
    ),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int)": (
        "normalization", "aten"
    ),
    "void at::native::<unnamed>::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(P)": ("layout", "aten"),
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE": ("pointwise", "aten"),
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&)"
    "::{lambda()#1}>(int)": ("pointwise", "aten"),
    "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 1, false>(P)": (
        "softmax", "aten"
    ),
    "triton_poi_fused_addmm_gelu_view_2": ("pointwise", "inductor"),
    "triton_red_fused_add_mean_mul_pow_rsqrt_0": ("reduction", "inductor"),
    "triton_per_fused_native_layer_norm_0": ("reduction", "inductor"),
    "triton_tem_fused_mm_3": ("other", "inductor"),
    "graph_0_cpp_fused_add_mul_4": ("pointwise", "inductor"),
    "cpp_fused_add_0": ("pointwise", "inductor"),
    "Memcpy DtoD (Device -> Device)": ("memcpy", ""),
    "[CUDA memcpy HtoD]": ("memcpy", ""),
    "Memset (Device)": ("memset", ""),
    "aten::add": ("operator", "aten"),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_library_kernel_is_known_by_its_name(name: str) -> None:
    assert classify(name) == Family(*KNOWN[name], True)


@pytest.mark.parametrize("name", TRANSPARENT)
def test_what_the_graph_sees_into_is_not_opaque(name: str) -> None:
    assert classify(name) == Family(*TRANSPARENT[name], "", None, False)


@pytest.mark.parametrize(
    "name",
    [
        "add_kernel",
        "my_lstm_kernel",
        "memcpyish_kernel",
        "fused_gemm_softmax(float*)",
        "rotary_embedding_kernel<float>",
        "void my::conv_kernel<at::Half>(int)",
        "_Z9my_kernelPf",
        "",
        "\ud800",
        "(",
        "_Z",
        "_ZN99999x",
        "x" * 6000,
    ],
)
def test_a_kernel_of_no_library_is_custom_and_nothing_is_guessed_of_it(name: str) -> None:
    assert classify(name) == Family("custom", "", "", None, True)


def test_the_collective_is_in_the_name() -> None:
    assert (
        collective("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "ReduceScatter"
    )
    assert collective("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)") == "SendRecv"
    assert collective("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)") == "AllReduce"
    assert collective("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)") == "AllGather"
    assert collective("_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE") == "SendRecv"
    assert collective("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)") == ""
    assert collective("ampere_sgemm_128x64_nn") == ""


def test_operators_that_hide_a_library() -> None:
    hidden = {
        "aten::_cudnn_rnn": "cudnn",
        "aten::_thnn_fused_lstm_cell": "",
        "aten::cudnn_convolution": "cudnn",
        "aten::miopen_batch_norm": "miopen",
        "aten::mkldnn_rnn_layer": "onednn",
        "aten::mkldnn_convolution": "onednn",
        "mkldnn::_linear_pointwise": "onednn",
        "mkl::_mkl_linear": "mkl",
        "aten::_flash_attention_forward": "flash_attention",
        "aten::_scaled_dot_product_efficient_attention_backward": "memory_efficient_attention",
        "c10d::allreduce_": "collective",
        "_c10d_functional::all_reduce": "collective",
        "nccl:all_reduce": "nccl",
        "gloo:all_reduce": "collective",
        "record_param_comms": "collective",
        "aten::mm": "",
        "aten::add": "",
        "my::op": "",
    }
    assert {name: opaque_operator(name) for name in hidden} == hidden
    assert classify("mkldnn::_linear_pointwise") == Family("operator", "onednn", "", None, True)


def _kernel_names(shared: Path) -> Counter[str]:
    """Every kernel of the recorded files, by name: how often it ran."""
    names: Counter[str] = Counter()
    for path in sorted([*shared.glob("corpus/kineto/*"), *shared.glob("captures/*/kineto*")]):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(text)
        events = data if isinstance(data, list) else data.get("traceEvents", [])
        names.update(
            e["name"] for e in events if str(e.get("cat", "")).lower() in ("kernel", "gpu_memcpy", "gpu_memset")
        )
    for path in sorted([*shared.glob("corpus/nsys/*.sqlite"), *shared.glob("captures/*/*.sqlite")]):
        base = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
        names.update(
            row[0]
            for row in base.execute(
                "SELECT s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName"
            )
        )
        base.close()
    for path in sorted([*shared.glob("corpus/ncu/*.csv"), *shared.glob("captures/*/*.csv")]):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        start = next((i for i, row in enumerate(rows) if "Kernel Name" in row), len(rows))
        for row in rows[start + 1 :]:
            if len(row) > rows[start].index("Kernel Name") and row[0]:
                names[row[rows[start].index("Kernel Name")]] += 1
    return names


def test_kernels_of_the_recorded_files_are_classified(shared: Path) -> None:
    names = _kernel_names(shared)
    assert sum(names.values()) > 25_000
    custom = {name for name in names if classify(name).family == "custom"}
    assert sum(names[name] for name in custom) < 0.005 * sum(names.values())
    # The custom ones are just those: SGLang's and vLLM's own, and the placeholder of a documentation example.
    words = ("rotary_embedding", "store_kvcache", "flashinfer_kv_indices", "resolve_future", "clamp_position", "Kernel")
    assert [name for name in custom if not any(word in name for word in words)] == []
    assert len(custom) == len(words)
    native = [name for name in names if "at::native" in name]
    assert native and {classify(name).library for name in native} == {"aten"}


def test_every_gemm_of_the_recorded_files_has_its_precision(shared: Path) -> None:
    for name in _kernel_names(shared):
        found = classify(name)
        if found.library in ("cublas", "cutlass", "tensile") and found.family == "gemm":
            helper = any(word in name for word in ("splitKreduce", "epilogue::", "gemmk1", "gemm_nn_128x128"))
            assert (found.precision == "") == helper, name
