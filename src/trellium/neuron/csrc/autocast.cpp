// `torch.autocast("neuron")`: the operator lists torch keeps for accelerators (ATen/autocast_mode.h), which are CUDA's, as the vendor
// documents. Boxed, so that one function a policy serves them all: including ATen's header and instantiating a wrapper for each of 110
// operators would be a fifth of the build. Cost: about 0.5 us an operator, only under autocast.
#include "autocast.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <vector>

#include "cores.h"

// From ATen/autocast_mode.h.
namespace at::autocast {
C10_IMPORT Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
C10_IMPORT at::ScalarType get_autocast_dtype(c10::DeviceType device_type);
}  // namespace at::autocast

namespace trellium {
namespace {

using torch::jit::Stack;

// Floating-point tensors of the device that are not float64: what autocast may cast.
bool eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNeuron && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
}

template <typename Visit>
void each_tensor(const c10::OperatorHandle& op, Stack* stack, Visit&& visit) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = visit(value.toTensor());
    } else if (value.isTensorList()) {
      const c10::List<at::Tensor> given = value.toTensorList();
      c10::List<at::Tensor> result;
      result.reserve(given.size());
      for (size_t j = 0; j < given.size(); ++j) {
        result.push_back(visit(given.get(j)));
      }
      value = std::move(result);
    }
  }
}

void cast_all(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  each_tensor(op, stack, [dtype](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kNeuron); });
}

using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;
constexpr c10::DispatchKey kAutocast = c10::DispatchKey::AutocastPrivateUse1;

// Matrix products and convolutions: in the low type.
void lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  const NoAutocast guard(kAutocast);
  settle_autocast();
  cast_all(op, stack, at::autocast::get_autocast_dtype(kNeuron));
  op.callBoxed(stack);
}

// What loses too much in the low type: in float32.
void float32(const c10::OperatorHandle& op, Stack* stack) {
  const NoAutocast guard(kAutocast);
  cast_all(op, stack, at::kFloat);
  op.callBoxed(stack);
}

// Reductions that can accumulate and return float32 from low operands: told to, unless the caller chose a type.
void float32_result(const c10::OperatorHandle& op, Stack* stack) {
  const NoAutocast guard(kAutocast);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  if ((*stack)[first].isTensor() && eligible((*stack)[first].toTensor())) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone()) {
        (*stack)[first + i] = at::kFloat;
      }
    }
  }
  op.callBoxed(stack);
}

// Several operands that must have one type: the widest among them.
void promote(const c10::OperatorHandle& op, Stack* stack) {
  const NoAutocast guard(kAutocast);
  settle_autocast();
  at::ScalarType widest = at::autocast::get_autocast_dtype(kNeuron);
  each_tensor(op, stack, [&widest](const at::Tensor& tensor) {
    if (eligible(tensor)) {
      widest = c10::promoteTypes(widest, tensor.scalar_type());
    }
    return tensor;
  });
  cast_all(op, stack, widest);
  op.callBoxed(stack);
}

// `norm` has its own form that takes the result's type.
void norm(const c10::OperatorHandle& op, Stack* stack) {
  const NoAutocast guard(kAutocast);
  const size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor self = (*stack)[first].toTensor();
  if (!eligible(self)) {
    op.callBoxed(stack);
    return;
  }
  const bool whole = op.operator_name().overload_name == "Scalar";
  static const c10::OperatorHandle with_dtype = c10::Dispatcher::singleton().findSchemaOrThrow("aten::norm", "ScalarOpt_dtype");
  static const c10::OperatorHandle with_dim_dtype =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::norm", "ScalarOpt_dim_dtype");
  stack->emplace_back(at::kFloat);
  (whole ? with_dtype : with_dim_dtype).callBoxed(stack);
}

void unsafe(const c10::OperatorHandle&, Stack*) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: a probability rounded to bfloat16 may be 0 "
      "or 1. Combine the two last layers with binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe.");
}

constexpr const char* kLowerPrecision[] = {
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear",
    "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
};

constexpr const char* kFloat32[] = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist",
    "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
};

constexpr const char* kFloat32Result[] = {
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
};

constexpr const char* kPromote[] = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add",
};

template <void (*Function)(const c10::OperatorHandle&, Stack*), size_t N>
void add(torch::Library& library, const char* const (&names)[N]) {
  for (const char* name : names) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<Function>());
  }
}

}  // namespace

void register_autocast() {
  // Leaked: they live as long as the process.
  auto* all = new torch::Library(torch::Library::IMPL, "_", kAutocast, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFallthrough());
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", kAutocast, __FILE__, __LINE__);
  add<&lower_precision>(*aten, kLowerPrecision);
  add<&float32>(*aten, kFloat32);
  add<&float32_result>(*aten, kFloat32Result);
  add<&promote>(*aten, kPromote);
  aten->impl("norm.Scalar", torch::CppFunction::makeFromBoxedFunction<&norm>());
  aten->impl("norm.ScalarOpt_dim", torch::CppFunction::makeFromBoxedFunction<&norm>());
  aten->impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&unsafe>());
}

}  // namespace trellium
