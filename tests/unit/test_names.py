from __future__ import annotations

import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from profiler_core.names import base_name, canonical, same_kernel, short_name

# The same kernel as torch.profiler (the compiler's demangler) and as nsys and ncu (NVIDIA's) print it.
SPELLINGS = [
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
        "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)",
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, std::array<char *, "
        "(unsigned long)1>>(int, T2, T3)",
        "at::native::vectorized_elementwise_kernel<4,at::native::FillFunctor<float>,std::array<char*,1>>",
        "at::native::vectorized_elementwise_kernel",
    ),
    (
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<F<float> >"
        "(at::TensorIteratorBase&, F<float> const&)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast"
        "<F<float> >(at::TensorIteratorBase&, F<float> const&)::{lambda(int)#1})",
        "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<F<float>>"
        "(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)",
        "at::native::elementwise_kernel<128,2,at::native::gpu_kernel_impl_nocast<F<float>>()::{lambda(int)#1}>",
        "at::native::elementwise_kernel",
    ),
    (
        "void k<at::native::rsqrt_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}::operator()() const::"
        "{lambda(float)#1}>(int)",
        "void k<at::native::rsqrt_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 2)]::operator ()() "
        "const::[lambda(float) (instance 1)]>(int)",
        "k<at::native::rsqrt_kernel_cuda()::{lambda()#2}::operator()() const::{lambda(float)#1}>",
        "k",
    ),
    (
        "void at::native::(anonymous namespace)::layer_norm_kernel<float, false>(int, float const*)",
        "void at::native::<unnamed>::layer_norm_kernel<float, (bool)0>(int, const T1 *)",
        "at::native::(anonymous namespace)::layer_norm_kernel<float,0>",
        "at::native::(anonymous namespace)::layer_norm_kernel",
    ),
    (
        "void gemv<T<__half const>, char const*, char* const, (Kind)2, -1>(int)",
        "void gemv<T<const __half>, const char *, char *const, (Kind)2, (int)-1>(T4)",
        "gemv<T<__half const>,char const*,char*const,(Kind)2,-1>",
        "gemv",
    ),
    (
        "std::enable_if<!(false), void>::type kernel<int, 7>(int)",
        "enable_if<!T7, void>::type kernel<int, (int)7>(T13)",
        "kernel<int,7>",
        "kernel",
    ),
    (
        "fmha_rf_sm80(Attention::AttentionKernel<float, true, 64>::Params)",
        "fmha_rf_sm80(Attention::AttentionKernel<float, (bool)1, (int)64>::Params)",
        "fmha_rf_sm80",
        "fmha_rf_sm80",
    ),
]


@pytest.mark.parametrize(("kineto", "nvidia", "spelling", "base"), SPELLINGS)
def test_both_demanglers_lead_to_one_spelling(kineto: str, nvidia: str, spelling: str, base: str) -> None:
    assert canonical(kineto) == canonical(nvidia) == spelling
    assert base_name(kineto) == base_name(nvidia) == base
    assert canonical(spelling) == spelling


@pytest.mark.parametrize(
    "name",
    [
        "triton_per_fused_native_layer_norm_0",
        "_ZN2at6native13reduce_kernelILi512ELi1EEEvT1_",
        "Memcpy DtoH (Device -> Pageable)",
        "[CUDA memcpy HtoD]",
        "",
    ],
)
def test_names_that_are_no_signatures_stay_as_they_are(name: str) -> None:
    assert canonical(name) == base_name(name) == name


@pytest.mark.parametrize(
    "name", ["void foo<float, (int)4", "foo<>>(int)", "operator<(int)", "[" * 4000, "<" * 4000 + ">" * 4000, "a)b"]
)
def test_names_with_unpaired_or_endless_brackets_are_kept(name: str) -> None:
    assert canonical(name) == name
    base_name(name)


def test_names_of_five_thousand_characters_are_read() -> None:
    argument = "std::integral_constant<unsigned long, (unsigned long)1>, "
    name = f"void ns::kernel<{argument * 90}(bool)1>(T1)"
    assert len(name) > 5000
    assert canonical(name) == "ns::kernel<" + "std::integral_constant<unsigned long,1>," * 90 + "1>"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("void k<1>(int)", "void k<2>(int)"),
        ("void k<float>(float)", "void k<double>(double)"),
        ("void a::k<1>(int)", "void b::k<1>(int)"),
        # Lambdas of one function are told apart by their parameters and numbers.
        ("void k<f(int)::{lambda(float)#1}>(int)", "void k<f(int)::{lambda(double)#1}>(int)"),
        ("void k<f(int)::{lambda(float)#1}>(int)", "void k<f(int)::{lambda(float)#2}>(int)"),
        ("nvjet_tst_192x192", "nvjet_tst_192x208"),
        ("elementwise_kernel", "void at::unrolled_elementwise_kernel<4>(int)"),
        ("native::k", "void other::k<1>(int)"),
    ],
)
def test_different_kernels_stay_different(a: str, b: str) -> None:
    assert not same_kernel(a, b) and not same_kernel(b, a)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("elementwise_kernel", "void at::native::elementwise_kernel<(int)128>(int)"),
        ("native::elementwise_kernel", "void at::native::elementwise_kernel<128>(int)"),
        ("at::native::elementwise_kernel", "void at::native::elementwise_kernel<128>(int)"),
        ("fmha_rf_sm80", "fmha_rf_sm80(Attention<float, true>::Params)"),
        # ncu's renaming drops every scope.
        ("void Kernel2<gemm_tn_align8>(Params)", "void cutlass::Kernel2<gemm_tn_align8>(gemm_tn_align8::Params)"),
    ],
)
def test_a_shortened_spelling_agrees_with_the_full_one(short: str, full: str) -> None:
    assert same_kernel(short, full) and same_kernel(full, short)


def test_every_name_of_the_nsys_files_is_that_of_the_compilers_demangler(shared: Path) -> None:
    """nsys keeps the mangled names too, from which the compiler's own demangler makes torch.profiler's spelling."""
    filter_command = shutil.which("c++filt")
    if filter_command is None:
        pytest.skip("needs c++filt (binutils)")
    names: dict[str, tuple[str, str]] = {}
    for file in [*shared.glob("corpus/nsys/*.sqlite"), *shared.glob("captures/*/*.sqlite")]:
        with sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True) as database:
            columns = [row[1] for row in database.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)")]
            if "mangledName" in columns:
                rows = database.execute(
                    "SELECT DISTINCT m.value, d.value, s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k "
                    "JOIN StringIds m ON m.id = k.mangledName JOIN StringIds d ON d.id = k.demangledName "
                    "JOIN StringIds s ON s.id = k.shortName"
                )
                names.update({mangled: (demangled, short) for mangled, demangled, short in rows})
    assert len(names) > 30
    printed = subprocess.run(
        [filter_command], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for compilers, (nvidias, short) in zip(printed, names.values(), strict=True):
        assert canonical(compilers) == canonical(nvidias)
        assert short_name(compilers) == short
        assert same_kernel(short, compilers)
