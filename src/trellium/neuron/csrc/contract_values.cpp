// Values that 64 bits hold and 32 do not. These run operators of the device's own; the caller sees to it that they are not counted.
#include <ATen/ATen.h>

#include <cfloat>
#include <sstream>

#include "contract_op.h"

namespace trellium::contract {
namespace {

constexpr int64_t kExactInFloat32 = int64_t{1} << 24;

std::string lost_in(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return {};
  }
  if (tensor.scalar_type() == at::kLong) {
    const auto [low, high] = at::aminmax(tensor);
    const int64_t least = low.item<int64_t>(), most = high.item<int64_t>();
    if (least < INT32_MIN || most > INT32_MAX) {
      return "int64 values from " + std::to_string(least) + " to " + std::to_string(most) + " do not fit int32, which the device computes in";
    }
  } else if (tensor.scalar_type() == at::kDouble) {
    const auto magnitude = at::where(at::isfinite(tensor), tensor.abs(), at::zeros({}, tensor.options()));
    const double most = magnitude.max().item<double>();
    if (most > static_cast<double>(FLT_MAX)) {
      std::ostringstream out;
      out << "float64 values of magnitude " << most << " overflow float32, which the device computes in";
      return out.str();
    }
  }
  return {};
}

std::string inexact_product(const std::vector<at::Tensor>& integers) {
  if (integers.size() < 2) {
    return {};
  }
  const auto& left = integers[integers.size() - 2];
  const auto& right = integers[integers.size() - 1];
  if (left.numel() == 0 || right.numel() == 0) {
    return {};
  }
  const double bound = left.to(at::kDouble).abs().max().item<double>() * right.to(at::kDouble).abs().max().item<double>() *
      static_cast<double>(left.size(-1));
  if (bound >= static_cast<double>(kExactInFloat32)) {
    return "an integer product that may reach 2^24 or more is not exact in float32, in which the device accumulates it";
  }
  return {};
}

}  // namespace

std::string lost_values(const Op& op, const c10::IValue* arguments) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> integers;
  for (const Arg& arg : op.args) {
    const auto& value = arguments[arg.index];
    const auto look = [&](const at::Tensor& tensor) -> std::string {
      if (!tensor.defined() || !(tensor.is_privateuseone() || (op.copies && tensor.is_cpu() && tensor.dim() > 0))) {
        return {};
      }
      if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
        integers.push_back(tensor);
      }
      return arg.written ? std::string() : lost_in(tensor);  // what is about to be written may hold anything
    };
    if (value.isTensor()) {
      if (auto lost = look(value.toTensor()); !lost.empty()) {
        return lost;
      }
    } else if (arg.role == Role::kTensorList && value.isList()) {
      for (const auto& element : value.toListRef()) {
        if (element.isTensor()) {
          if (auto lost = look(element.toTensor()); !lost.empty()) {
            return lost;
          }
        }
      }
    }
  }
  return op.multiplies ? inexact_product(integers) : std::string();
}

}  // namespace trellium::contract
