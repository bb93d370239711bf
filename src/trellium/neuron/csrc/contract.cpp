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

#include <c10/util/flat_hash_map.h>
#include <pthread.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "contract_op.h"

namespace py = pybind11;

namespace trellium::contract {

std::atomic<bool> enabled{false};

namespace {

struct State {
  std::mutex mutex;
  Table table;
  std::deque<Op> ops;  // addresses stay
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

struct Inside {
  const bool before = inside;
  Inside() { inside = true; }
  ~Inside() { inside = before; }
};

constexpr uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
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
  s.ops.push_back(examine(s.table, handle));
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
    const std::string lost = [&] {
      const Inside aside;
      return lost_values(*op, arguments);
    }();
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
  s.table.verdicts.clear();
  s.table.prefixes.clear();
  s.table.shown_as = shown_as;
  for (const auto& [name, verdict] : table) {
    if (!name.empty() && name.back() == '*') {
      s.table.prefixes.emplace_back(name.substr(0, name.size() - 1), static_cast<Verdict>(verdict));
    } else {
      s.table.verdicts[name] = static_cast<Verdict>(verdict);
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
