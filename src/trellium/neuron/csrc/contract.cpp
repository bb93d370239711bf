// The counters of the contract, and the one pass over an operator's arguments that feeds them.
//
// How: each operator is looked at once, when it first comes, and what matters in its schema is kept (which arguments shape a compiled
// program, whether it is a view, what the table says of it). Every later call costs one lock that is rarely contended, one lookup by the
// operator's address, and a 64-bit hash over dtypes, sizes and static arguments, looked up in the set of what was seen.
// Nothing is allocated on a call whose signature is known. Values are looked at only when `check_values` is set: a pass over the tensor.
//
// What makes a signature, after the vendor's public notes: the operator, the dtypes and sizes of its tensors, and integer, boolean and
// string arguments. Python's floating-point scalars do not (`x * 2.0` and `x * 3.0` share a program), except where they decide a size
// (`arange`), and neither does `out=`. Views, allocations and plain transfers compile nothing. A `_foreach_` operator stands for one program
// per tensor.

#include "contract.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cfloat>
#include <deque>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace trellium::contract {

std::atomic<bool> enabled{false};

namespace {

// As in contract.py.
enum class Verdict : uint8_t { kDevice = 0, kHost = 1, kDataDependent = 2, kUntested = 3 };

constexpr size_t kSignaturesKept = 8;  // texts an operator keeps for the report

enum class Role : uint8_t { kTensor, kTensorList, kStatic, kDtype };

struct Arg {
  uint16_t index;
  Role role;
  bool written;
};

struct Op {
  std::string name;
  Verdict verdict = Verdict::kDevice;
  bool compiles = true;
  bool per_tensor = false;  // _foreach_*
  bool copies = false;      // copy_: a transfer unless it casts
  bool indexes = false;     // a boolean index makes the size of the result depend on data
  bool multiplies = false;  // integer products are accumulated in float32
  uint16_t arguments = 0;
  std::vector<Arg> args;

  uint64_t calls = 0;
  uint64_t host_calls = 0;
  uint64_t data_dependent_calls = 0;
  uint64_t complex_calls = 0;
  uint64_t compilations = 0;
  uint64_t float64_calls = 0;
  uint64_t int64_calls = 0;
  uint64_t lost_calls = 0;
  std::vector<std::string> signatures;

  void clear() {
    calls = host_calls = data_dependent_calls = complex_calls = compilations = float64_calls = int64_calls = lost_calls = 0;
    signatures.clear();
  }
};

struct State {
  std::mutex mutex;
  std::unordered_map<std::string, Verdict> verdicts;           // exact names, and names without overload
  std::vector<std::pair<std::string, Verdict>> prefixes;       // names that ended in '*'
  std::unordered_map<std::string, std::string> shown_as;       // the host's name of a kernel -> the device's
  std::deque<Op> ops;                                          // addresses stay
  ska::flat_hash_map<size_t, Op*> by_address;
  ska::flat_hash_set<uint64_t> seen;
  uint64_t hits = 0;
  uint64_t misses = 0;
  bool strict_host = false;
  bool check_values = false;
  bool strict_values = false;
  int64_t compilation_limit = -1;
  PyObject* tell = nullptr;  // contract.py's _told(kind, operator, signature, detail); lives as long as the process
};

State& state() {
  static State* const it = new State();  // never destroyed: operators may run while the process ends
  return *it;
}

// This thread runs operators that are not the user's: those of a value check, of a tensor's printed form, or the parts of one that is
// counted whole.
thread_local bool inside = false;

constexpr uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// ---- what is kept of an operator's schema

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

Verdict verdict_of(const State& s, const std::string& base, const std::string& full) {
  for (const std::string& key : {full, base, without_inplace_mark(base)}) {
    if (auto found = s.verdicts.find(key); found != s.verdicts.end()) {
      return found->second;
    }
  }
  size_t longest = 0;
  // An operator of the user's own has no kernel on the device unless the user wrote one.
  Verdict verdict = starts_with(base, "aten::") || starts_with(base, "c10d") || starts_with(base, "_c10d") ? Verdict::kDevice : Verdict::kHost;
  for (const auto& [prefix, value] : s.prefixes) {
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

Op examine(const State& s, const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  Op op;
  const std::string base = schema.name();
  const std::string full = schema.overload_name().empty() ? base : base + "." + schema.overload_name();
  const auto shown = s.shown_as.find(base);
  op.name = shown == s.shown_as.end() ? full : shown->second;
  op.verdict = verdict_of(s, base, full);
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

// ---- one call

struct Seen {
  uint64_t hash;
  bool float64 = false;
  bool int64 = false;
  bool complex = false;
  bool mask = false;
  bool wide_on_host = false;  // copy_ brings 64-bit values from the host
};

void see_tensor(Seen& seen, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    seen.hash = mix(seen.hash, 1);
    return;
  }
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto dtype = c10::typeMetaToScalarType(impl->dtype());
  if (impl->is_privateuseone()) {
    seen.float64 |= dtype == at::kDouble;
    seen.int64 |= dtype == at::kLong;
    seen.complex |= at::isComplexType(dtype);
    seen.mask |= dtype == at::kBool || dtype == at::kByte;
  } else {
    seen.wide_on_host |= dtype == at::kDouble || dtype == at::kLong;
  }
  const auto sizes = tensor.sizes();
  uint64_t hash = mix(seen.hash, (static_cast<uint64_t>(dtype) << 8) + sizes.size() + 2);
  for (const int64_t size : sizes) {
    hash = mix(hash, static_cast<uint64_t>(size));
  }
  seen.hash = hash;
}

void see_static(Seen& seen, const c10::IValue& value) {
  if (value.isInt()) {
    seen.hash = mix(seen.hash, static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    seen.hash = mix(seen.hash, value.toBool() ? 3 : 5);
  } else if (value.isDouble()) {
    seen.hash = mix(seen.hash, std::hash<double>{}(value.toDouble()));
  } else if (value.isNone()) {
    seen.hash = mix(seen.hash, 7);
  } else if (value.isString()) {
    seen.hash = mix(seen.hash, std::hash<std::string>{}(value.toStringRef()));
  } else if (value.isList()) {
    const auto list = value.toListRef();
    seen.hash = mix(seen.hash, list.size() + 11);
    for (const auto& element : list) {
      see_static(seen, element);
    }
  }
}

void see_dtype(Seen& seen, const c10::IValue& value) {
  if (value.isInt()) {
    const auto dtype = static_cast<at::ScalarType>(value.toInt());
    seen.float64 |= dtype == at::kDouble;
    seen.int64 |= dtype == at::kLong;
    seen.complex |= at::isComplexType(dtype);
  }
  see_static(seen, value);
}

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

std::string text_of(const c10::IValue& value, int depth = 0) {
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
      text += (i ? ", " : "") + text_of(list[i], depth + 1);
    }
    return text + "]";
  }
  return "None";
}

// The arguments that make the signature, as a user would write them: "float32[4,128], float32[128,64], dim=1".
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
      part = handle.schema().arguments()[arg.index].name() + "=" + text_of(value);
    } else {
      part = text_of(value);
    }
    text += (text.empty() ? "" : ", ") + part;
  }
  return text;
}

// ---- values, looked at only when asked for

constexpr int64_t kExactInFloat32 = int64_t{1} << 24;

struct Inside {
  const bool before = inside;
  Inside() { inside = true; }
  ~Inside() { inside = before; }
};

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

std::string lost_values(const Op& op, const c10::IValue* arguments) {
  const Inside guard;
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

// ---- saying it to Python

void tell(const char* kind, const std::string& name, const std::string& signature, const std::string& detail) {
  PyObject* const listener = state().tell;
  if (listener == nullptr || !Py_IsInitialized()) {
    return;
  }
  py::gil_scoped_acquire gil;
  try {
    const py::handle callback = listener;
    callback(kind, name, signature, detail);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;  // the one that crosses torch's dispatcher and its autograd threads
    raised.persist();
    throw raised;
  }
}

Op& find(State& s, const c10::OperatorHandle& handle) {
  const size_t address = std::hash<c10::OperatorHandle>{}(handle);
  if (const auto found = s.by_address.find(address); C10_LIKELY(found != s.by_address.end())) {
    return *found->second;
  }
  s.ops.push_back(examine(s, handle));
  s.by_address[address] = &s.ops.back();
  return s.ops.back();
}

void look_up(State& s, Op& op, uint64_t hash, bool& new_signature) {
  if (C10_LIKELY(!s.seen.insert(hash).second)) {
    ++s.hits;
    return;
  }
  ++s.misses;
  ++op.compilations;
  new_signature = true;
}

// copy_ compiles a cast or a broadcast; between host and device, or of like to like, it moves bytes.
bool copy_compiles(const c10::IValue* arguments, const Op& op) {
  if (op.arguments < 2 || !arguments[0].isTensor() || !arguments[1].isTensor()) {
    return false;
  }
  const at::Tensor &to = arguments[0].toTensor(), &from = arguments[1].toTensor();
  return to.defined() && from.defined() && to.is_privateuseone() && from.is_privateuseone() &&
      (to.scalar_type() != from.scalar_type() || to.sizes() != from.sizes());
}

}  // namespace

void record(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
  if (inside) {
    return;
  }
  State& s = state();
  bool on_host = false, first_on_host = false, new_signature = false, over_limit = false, look_at_values = false;
  bool strict_host = false;
  int64_t limit = -1;
  Op* op = nullptr;
  const c10::IValue* arguments = nullptr;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    op = &find(s, handle);
    arguments = stack.data() + (stack.size() - op->arguments);
    Seen seen{mix(0x51ED270B, reinterpret_cast<uintptr_t>(op))};
    const bool per_tensor = op->per_tensor && !op->args.empty() && arguments[op->args[0].index].isList();
    if (per_tensor) {  // one program a tensor of the first list; the other lists have its shapes
      const uint64_t start = seen.hash;
      for (const auto& element : arguments[op->args[0].index].toListRef()) {
        seen.hash = start;
        see_tensor(seen, element.toTensor());
        bool is_new = false;
        if (op->verdict != Verdict::kHost) {
          look_up(s, *op, seen.hash, is_new);
        }
        if (is_new && op->signatures.size() < kSignaturesKept) {
          op->signatures.push_back(text_of(element.toTensor()));
        }
        new_signature |= is_new;
      }
    }
    for (const Arg& arg : op->args) {
      if (per_tensor) {
        break;
      }
      const auto& value = arguments[arg.index];
      switch (arg.role) {
        case Role::kTensor:
          if (value.isTensor()) {
            see_tensor(seen, value.toTensor());
          } else {
            seen.hash = mix(seen.hash, 1);
          }
          break;
        case Role::kTensorList:
          if (value.isList()) {
            for (const auto& element : value.toListRef()) {
              if (element.isTensor()) {
                see_tensor(seen, element.toTensor());
              } else {
                seen.hash = mix(seen.hash, 1);
              }
            }
          }
          break;
        case Role::kDtype:
          see_dtype(seen, value);
          break;
        case Role::kStatic:
          see_static(seen, value);
          break;
      }
    }
    ++op->calls;
    op->float64_calls += seen.float64;
    op->int64_calls += seen.int64;
    op->complex_calls += seen.complex && op->compiles;
    on_host = op->verdict == Verdict::kHost || (seen.complex && op->compiles && !op->copies);
    if (on_host) {
      first_on_host = op->host_calls++ == 0;
    } else {
      op->data_dependent_calls += op->verdict == Verdict::kDataDependent || (op->indexes && seen.mask && [&] {
        for (const auto& element : arguments[1].toListRef()) {
          if (element.isTensor() && element.toTensor().defined() &&
              (element.toTensor().scalar_type() == at::kBool || element.toTensor().scalar_type() == at::kByte)) {
            return true;
          }
        }
        return false;
      }());
      if (op->compiles && !per_tensor && (!op->copies || copy_compiles(arguments, *op))) {
        look_up(s, *op, seen.hash, new_signature);
      }
    }
    limit = s.compilation_limit;
    over_limit = new_signature && limit >= 0 && static_cast<int64_t>(s.misses) > limit;
    strict_host = s.strict_host;
    look_at_values = s.check_values && (seen.float64 || seen.int64 || (op->copies && seen.wide_on_host) || op->multiplies);
    if (new_signature && !per_tensor && op->signatures.size() < kSignaturesKept) {
      op->signatures.push_back(text_of(*op, handle, arguments));
    }
  }
  if (C10_LIKELY(!(on_host && (first_on_host || strict_host)) && !over_limit && !look_at_values)) {
    return;
  }
  if (look_at_values) {
    const std::string lost = lost_values(*op, arguments);
    if (!lost.empty()) {
      bool first = false;
      {
        std::lock_guard<std::mutex> lock(s.mutex);
        first = op->lost_calls++ == 0;
      }
      if (first || s.strict_values) {
        tell("values", op->name, text_of(*op, handle, arguments), lost);
      }
    }
  }
  if (on_host && (first_on_host || strict_host)) {
    tell("host", op->name, text_of(*op, handle, arguments), op->verdict == Verdict::kHost ? "" : "complex");
  }
  if (over_limit) {
    tell("compilations", op->name, text_of(*op, handle, arguments), std::to_string(limit));
  }
}

namespace {

void set_table(const std::vector<std::pair<std::string, int>>& table, const std::unordered_map<std::string, std::string>& shown_as) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.verdicts.clear();
  s.prefixes.clear();
  s.shown_as = shown_as;
  for (const auto& [name, verdict] : table) {
    if (!name.empty() && name.back() == '*') {
      s.prefixes.emplace_back(name.substr(0, name.size() - 1), static_cast<Verdict>(verdict));
    } else {
      s.verdicts[name] = static_cast<Verdict>(verdict);
    }
  }
}

void configure(bool on, bool strict_host, bool check_values, bool strict_values, int64_t compilation_limit) {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.strict_host = strict_host;
    s.check_values = check_values;
    s.strict_values = strict_values;
    s.compilation_limit = compilation_limit;
  }
  enabled.store(on, std::memory_order_relaxed);
}

void clear(bool signatures_too) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (Op& op : s.ops) {
    op.clear();
  }
  if (signatures_too) {
    s.seen.clear();
    s.hits = s.misses = 0;
  }
}

py::dict snapshot() {
  State& s = state();
  std::vector<Op> ops;
  uint64_t hits = 0, misses = 0;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    for (const Op& op : s.ops) {
      if (op.calls > 0) {
        ops.push_back(op);
      }
    }
    hits = s.hits;
    misses = s.misses;
  }
  py::list rows;
  for (const Op& op : ops) {
    py::dict row;
    row["name"] = op.name;
    row["verdict"] = static_cast<int>(op.verdict);
    row["calls"] = op.calls;
    row["host_calls"] = op.host_calls;
    row["data_dependent_calls"] = op.data_dependent_calls;
    row["complex_calls"] = op.complex_calls;
    row["compilations"] = op.compilations;
    row["float64_calls"] = op.float64_calls;
    row["int64_calls"] = op.int64_calls;
    row["lost_calls"] = op.lost_calls;
    row["signatures"] = op.signatures;
    rows.append(row);
  }
  py::dict result;
  result["ops"] = rows;
  result["hits"] = hits;
  result["misses"] = misses;
  return result;
}

}  // namespace

Whole::Whole(const c10::OperatorHandle& op, std::initializer_list<c10::IValue> arguments) {
  if (C10_LIKELY(inside || !enabled.load(std::memory_order_relaxed))) {
    return;
  }
  record(op, torch::jit::Stack(arguments));
  inside = outermost_ = true;
}

Whole::~Whole() {
  if (outermost_) {
    inside = false;
  }
}

c10::OperatorHandle operator_named(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

void bind(py::module_& m) {
  // A fork while another thread counts must not leave the child a lock that nobody holds the key to.
  static const int registered = pthread_atfork(
      [] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
  TORCH_CHECK(registered == 0, "pthread_atfork failed with ", registered);
  m.def("contract_set_table", &set_table);
  m.def("contract_set_listener", [](const py::object& listener) { state().tell = py::object(listener).release().ptr(); });
  m.def("contract_configure", &configure);
  m.def("contract_clear", &clear);
  m.def("contract_snapshot", &snapshot);
  m.def(
      "contract_aside",
      [](bool on) { return std::exchange(inside, on); },
      "count nothing of what this thread runs, or go on counting; returns what was so before");
}

}  // namespace trellium::contract
