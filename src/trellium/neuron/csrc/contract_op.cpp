#include "contract_op.h"

#include <ATen/core/jit_type.h>

#include <sstream>

namespace trellium::contract {
namespace {

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

std::string without_inplace_mark(const std::string& base) {
  return !base.empty() && base.back() == '_' && !(base.size() > 1 && base[base.size() - 2] == '_') ? base.substr(0, base.size() - 1) : base;
}

bool is_one_of(const std::string& base, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (base == name) {
      return true;
    }
  }
  return false;
}

Verdict verdict_of(const Table& table, const std::string& base, const std::string& full) {
  for (const std::string& key : {full, base, without_inplace_mark(base)}) {
    if (auto found = table.verdicts.find(key); found != table.verdicts.end()) {
      return found->second;
    }
  }
  size_t longest = 0;
  // An operator of the user's own has no kernel on the device unless the user wrote one.
  Verdict verdict = starts_with(base, "aten::") || starts_with(base, "c10d") || starts_with(base, "_c10d") ? Verdict::kDevice : Verdict::kHost;
  for (const auto& [prefix, value] : table.prefixes) {
    if (prefix.size() > longest && starts_with(base, prefix.c_str())) {
      longest = prefix.size();
      verdict = value;
    }
  }
  return verdict;
}

bool is_kind(const c10::TypePtr& type, c10::TypeKind kind) {
  if (type->kind() == kind) {
    return true;
  }
  if (auto optional = type->cast<c10::OptionalType>()) {
    return is_kind(optional->getElementType(), kind);
  }
  return false;
}

bool is_list_of_tensors(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) {
    return is_list_of_tensors(optional->getElementType());
  }
  auto list = type->cast<c10::ListType>();
  return list && is_kind(list->getElementType(), c10::TypeKind::TensorType);
}

}  // namespace

Op examine(const Table& table, const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  Op op;
  const std::string base = schema.name();
  const std::string full = schema.overload_name().empty() ? base : base + "." + schema.overload_name();
  const auto shown = table.shown_as.find(base);
  op.name = shown == table.shown_as.end() ? full : shown->second;
  op.verdict = verdict_of(table, base, full);
  op.arguments = static_cast<uint16_t>(schema.arguments().size());
  op.per_tensor = starts_with(base, "aten::_foreach_");
  op.copies = is_one_of(base, {"aten::copy_", "aten::copy", "aten::_copy_from", "aten::_to_copy"});
  op.indexes = is_one_of(base, {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"});
  op.multiplies = is_one_of(base, {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::dot", "aten::addmv"});
  op.compiles = !is_one_of(
      base,
      {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::resize_", "aten::set_",
       "aten::_resize_output_", "aten::_local_scalar_dense", "aten::item", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory",
       "aten::lift_fresh", "aten::_has_compatible_shallow_copy_type", "aten::_fused_sdp_choice", "aten::_efficientzerotensor"});
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) {
      op.compiles = false;  // a view
    }
  }
  const bool scalars_decide_a_size = is_one_of(base, {"aten::arange", "aten::linspace", "aten::logspace", "aten::range"});
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.is_out() || argument.name() == "non_blocking" || argument.name() == "pin_memory") {
      continue;
    }
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    const auto& type = argument.real_type();
    const auto add = [&](Role role) { op.args.push_back({static_cast<uint16_t>(i), role, written}); };
    if (is_kind(type, c10::TypeKind::TensorType)) {
      add(Role::kTensor);
    } else if (is_list_of_tensors(type)) {
      add(Role::kTensorList);
    } else if (is_kind(type, c10::TypeKind::ScalarTypeType)) {
      add(Role::kDtype);
    } else if (
        is_kind(type, c10::TypeKind::NumberType) || is_kind(type, c10::TypeKind::FloatType) || is_kind(type, c10::TypeKind::ComplexType)) {
      if (scalars_decide_a_size) {
        add(Role::kStatic);
      }
    } else if (
        is_kind(type, c10::TypeKind::IntType) || is_kind(type, c10::TypeKind::SymIntType) || is_kind(type, c10::TypeKind::BoolType) ||
        is_kind(type, c10::TypeKind::StringType) || is_kind(type, c10::TypeKind::ListType)) {
      add(Role::kStatic);
    }
  }
  return op;
}

// ---- words

std::string text_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "None";
  }
  std::ostringstream out;
  out << c10::getDtypeNames(tensor.scalar_type()).first << "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    out << (i ? "," : "") << tensor.sizes()[i];
  }
  out << "]";
  return out.str();
}

namespace {

std::string words_of(const c10::IValue& value, int depth = 0) {
  if (value.isTensor()) {
    return text_of(value.toTensor());
  }
  if (value.isInt()) {
    return std::to_string(value.toInt());
  }
  if (value.isBool()) {
    return value.toBool() ? "True" : "False";
  }
  if (value.isDouble()) {
    std::ostringstream out;
    out << value.toDouble();
    return out.str();
  }
  if (value.isString()) {
    return "'" + value.toStringRef() + "'";
  }
  if (value.isList() && depth < 2) {
    std::string text = "[";
    const auto list = value.toListRef();
    for (size_t i = 0; i < list.size(); ++i) {
      if (i == 6) {
        text += ", ... " + std::to_string(list.size()) + " in all";
        break;
      }
      text += (i ? ", " : "") + words_of(list[i], depth + 1);
    }
    return text + "]";
  }
  return "None";
}

}  // namespace

std::string text_of(const Op& op, const c10::OperatorHandle& handle, const c10::IValue* arguments) {
  std::string text;
  for (const Arg& arg : op.args) {
    const auto& value = arguments[arg.index];
    if (value.isNone()) {
      continue;
    }
    std::string part;
    if (arg.role == Role::kDtype) {
      part = "dtype=" + std::string(value.isInt() ? c10::getDtypeNames(static_cast<at::ScalarType>(value.toInt())).first : "None");
    } else if (arg.role == Role::kStatic) {
      part = handle.schema().arguments()[arg.index].name() + "=" + words_of(value);
    } else {
      part = words_of(value);
    }
    text += (text.empty() ? "" : ", ") + part;
  }
  return text;
}

}  // namespace trellium::contract
