#include "plan.h"

#include <string>
#include <unordered_map>

namespace trellium {
namespace {

Placement placement_of(const std::string& name) {
  using enum Placement;
  static const std::unordered_map<std::string, Placement> known = {
      {"aten::copy_", kAnywhere},
      {"aten::copy", kAnywhere},
      {"aten::_copy_from", kAnywhere},
      {"aten::_copy_from_and_resize", kAnywhere},
      {"aten::_foreach_copy_", kAnywhere},
      {"aten::_foreach_copy", kAnywhere},
      {"aten::_ctc_loss", kHost},
      {"aten::_ctc_loss_backward", kHost},
      {"aten::_pack_padded_sequence_backward", kHost},
      {"aten::index", kIndices},
      {"aten::index_put", kIndices},
      {"aten::index_put_", kIndices},
      {"aten::_index_put_impl_", kIndices},
      {"aten::_unsafe_index", kIndices},
      {"aten::_unsafe_index_put", kIndices},
      {"aten::_unsafe_masked_index", kIndices},
      {"aten::index_select", kOneDevice},
      {"aten::index_add", kOneDevice},
      {"aten::index_add_", kOneDevice},
      {"aten::index_copy", kOneDevice},
      {"aten::index_copy_", kOneDevice},
      {"aten::index_reduce", kOneDevice},
      {"aten::index_reduce_", kOneDevice},
      {"aten::gather", kOneDevice},
      {"aten::scatter", kOneDevice},
      {"aten::scatter_", kOneDevice},
      {"aten::scatter_add", kOneDevice},
      {"aten::scatter_add_", kOneDevice},
      {"aten::scatter_reduce", kOneDevice},
      {"aten::scatter_reduce_", kOneDevice},
      {"aten::take", kOneDevice},
      {"aten::put_", kOneDevice},
      {"aten::masked_select", kOneDevice},
      {"aten::masked_scatter", kOneDevice},
      {"aten::masked_scatter_", kOneDevice},
      {"aten::masked_fill", kScalarValue},
      {"aten::masked_fill_", kScalarValue},
      {"aten::index_fill", kScalarValue},
      {"aten::index_fill_", kScalarValue},
  };
  const auto found = known.find(name);
  return found == known.end() ? kScalars : found->second;
}

}  // namespace

Plan plan_of(const c10::FunctionSchema& schema) {
  Plan plan;
  plan.arguments = schema.arguments().size();
  plan.returns = schema.returns().size();
  plan.placement = placement_of(schema.name());
  for (size_t i = 0; i < plan.arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::AliasInfo* alias = argument.alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    c10::TypePtr type = argument.type();
    if (type->kind() == c10::TypeKind::OptionalType) {
      type = type->castRaw<c10::OptionalType>()->getElementType();
    }
    Kind kind;
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        kind = Kind::kTensor;
        break;
      case c10::TypeKind::DeviceObjType:
        kind = Kind::kDevice;
        break;
      case c10::TypeKind::GeneratorType:
        kind = Kind::kGenerator;
        break;
      case c10::TypeKind::ListType: {
        c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
        if (element->kind() == c10::TypeKind::OptionalType) {
          element = element->castRaw<c10::OptionalType>()->getElementType();
        }
        if (element->kind() != c10::TypeKind::TensorType) {
          continue;
        }
        kind = Kind::kTensors;
        break;
      }
      default:
        continue;
    }
    plan.slots.push_back({static_cast<uint16_t>(i), kind, written, argument.name() == "value"});
  }
  return plan;
}

}  // namespace trellium
