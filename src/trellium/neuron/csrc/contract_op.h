// What is kept of an operator that was counted, and what is read from its schema and its arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trellium::contract {

// As in contract_rules.py.
enum class Verdict : uint8_t { kDevice = 0, kHost = 1, kDataDependent = 2, kUntested = 3 };

inline constexpr size_t kSignaturesKept = 8;  // texts an operator keeps for the report

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

// What Python's side says of operators, by name.
struct Table {
  std::unordered_map<std::string, Verdict> verdicts;      // exact names, and names without overload
  std::vector<std::pair<std::string, Verdict>> prefixes;  // names that ended in '*'
  std::unordered_map<std::string, std::string> shown_as;  // the host's name of a kernel -> the device's
};

Op examine(const Table& table, const c10::OperatorHandle& handle);

// "float32[4,128]".
std::string text_of(const at::Tensor& tensor);
// The arguments that make the signature, as a user would write them: "float32[4,128], float32[128,64], dim=1".
std::string text_of(const Op& op, const c10::OperatorHandle& handle, const c10::IValue* arguments);

// How values among the arguments would not survive 32 bits; empty if all do. A pass over every 64-bit operand.
std::string lost_values(const Op& op, const c10::IValue* arguments);

}  // namespace trellium::contract
