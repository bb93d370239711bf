"""Which operators the real device would run, and how that is known.

The table is an **estimate from public documentation, not from a device**: each entry says why, and on what grade of evidence:

- `tests`: asserted by the test suite of the vendor's public beta;
- `docs`: the vendor's documentation or an error code of its compiler;
- `report`: somebody's published account of running on a chip;
- `inferred`: nothing public says that it lowers, and its kind does not.

What the table does not name is taken to run on the device; an operator outside `aten` is taken to run on the host, since it has a kernel
for the device only if its author wrote one.
"""

from __future__ import annotations

from dataclasses import dataclass

DEVICE, HOST, DATA_DEPENDENT, UNTESTED = range(4)

SOURCE = "estimated from public documentation, not from a device"


@dataclass(frozen=True)
class Rule:
    """What is known of some operators: `verdict`, the reason, and the grade of evidence for it.

    `operators`: names with or without overload; in-place forms follow their plain form; a final `*` takes all that begin so, and a
    longer name wins over a shorter one.
    """

    verdict: int
    reason: str
    evidence: str
    operators: tuple[str, ...]


def _rule(verdict: int, evidence: str, reason: str, operators: str) -> Rule:
    return Rule(verdict, reason, evidence, tuple(f"aten::{name}" for name in operators.split()))


RULES: tuple[Rule, ...] = (
    _rule(HOST, "report", "FFTs compute in complex numbers, which the device has not", "_fft_* fft_* stft istft"),
    _rule(
        HOST,
        "report",
        "the public beta has no random numbers on the device (dropout excepted); later releases may",
        "uniform normal normal_functional random bernoulli multinomial exponential cauchy log_normal geometric poisson binomial "
        "randperm rand rand_like randn randn_like randint randint_like _standard_gamma _sample_dirichlet rrelu_with_noise",
    ),
    _rule(
        HOST,
        "docs",
        "the compiler rejects a general sort (NCC_EVRF029); topk runs on the device",
        "sort msort kthvalue median nanmedian mode",
    ),
    _rule(
        HOST,
        "report",
        "the size of its result depends on data, which does not lower",
        "_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount",
    ),
    _rule(HOST, "tests", "the public beta has no kernel for it", "histogram* _histogramdd_*"),
    _rule(
        HOST,
        "inferred",
        "a matrix decomposition or solve; nothing public says that it lowers",
        "linalg_cholesky* _linalg_eigh linalg_eig _linalg_eigvals linalg_eigvals* _linalg_svd linalg_qr geqrf linalg_lu* lu_unpack "
        "linalg_ldl* linalg_inv_ex _linalg_solve_ex _linalg_det _linalg_slogdet linalg_lstsq linalg_householder_product ormqr "
        "triangular_solve linalg_solve_triangular cholesky cholesky_inverse cholesky_solve linalg_matrix_exp",
    ),
    _rule(
        HOST,
        "inferred",
        "sparse layouts; nothing public says that they are supported",
        "_sparse_* sparse_* _coalesce to_sparse* _to_sparse* to_dense _to_dense hspmm sspaddmm",
    ),
    _rule(
        HOST,
        "inferred",
        "the host's quantized kernels have no counterpart on the device",
        "quantize_per_* dequantize quantized_* _weight_int4pack_mm* _weight_int8pack_mm* _convert_weight_to_int4pack*",
    ),
    _rule(HOST, "report", "the public beta has no scaled 8-bit matrix product", "_scaled_mm*"),
    _rule(HOST, "inferred", "a loop over time on the host; nothing public says that it lowers", "_ctc_loss* ctc_loss*"),
    _rule(
        DATA_DEPENDENT,
        "tests",
        "runs on the device in eager mode, but the host waits for the size of its result, each size compiles its users again, and it "
        "cannot stand in a compiled graph",
        "nonzero nonzero_numpy masked_select repeat_interleave.Tensor",
    ),
    _rule(UNTESTED, "inferred", "nothing public says whether it lowers", "histc"),
    _rule(
        UNTESTED,
        "report",
        "not in the vendor's public test suite",
        "native_group_norm* upsample_* _upsample_* pixel_shuffle pixel_unshuffle baddbmm roll conv3d slow_conv3d* slow_conv_transpose*",
    ),
    _rule(
        DEVICE,
        "tests",
        "runs on the device in the public beta's tests",
        "topk nonzero_static cumsum flip index_select index_add index_copy scatter_add native_dropout linalg_vector_norm masked_fill "
        "_fused_rms_norm _grouped_mm",
    ),
)

# What the vendor calls a kernel that has another name on the host, so that reports read alike.
SHOWN_AS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        "aten::_scaled_dot_product_fused_attention_overrideable_backward"
    ),
}

COMPLEX_REASON = "complex numbers are not supported by the device (NCC_EVRF004)"
MASK_REASON = "a boolean index: the size of the result depends on data"
CUSTOM_REASON = "a custom operator has no kernel on the device unless its author wrote one"


def reason_for(operator: str) -> tuple[str, str]:
    """Why the table says of `operator` what it says, and on what evidence."""
    base = operator.split(".")[0]
    for name in (operator, base, base[:-1] if base.endswith("_") and not base.endswith("__") else base):
        for rule in RULES:
            if name in rule.operators:
                return rule.reason, rule.evidence
    prefixes = [
        (name, rule) for rule in RULES for name in rule.operators if name.endswith("*") and base.startswith(name[:-1])
    ]
    if prefixes:
        rule = max(prefixes, key=lambda pair: len(pair[0]))[1]
        return rule.reason, rule.evidence
    return ("", "") if base.startswith("aten::") else (CUSTOM_REASON, "inferred")
