// What an operator's schema says of the tensors it takes, read once an operator.
#pragma once

#include <ATen/core/function_schema.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace trellium {

enum class Kind : uint8_t { kTensor, kTensors, kDevice, kGenerator };

struct Slot {
  uint16_t index;
  Kind kind;
  bool written;
  bool value;  // named so: what is filled in
};

// Where the tensors beside neuron ones may be; CUDA's rules.
enum class Placement : uint8_t {
  kScalars,      // on the same core; a CPU tensor without dimensions counts as a number
  kOneDevice,    // on the same core, all of them: they are indices, masks or what is indexed
  kScalarValue,  // the same, but `value` may be a number on the host
  kIndices,      // what is indexed decides: the tensors of the list may be on the host instead, the rest as kScalars
  kHost,         // on the same core or on the host: lengths
  kAnywhere,     // a copy crosses devices
};

// What a schema says, read once.
struct Plan {
  c10::SmallVector<Slot, 6> slots;
  size_t arguments = 0;
  size_t returns = 0;
  Placement placement = Placement::kScalars;
};

Plan plan_of(const c10::FunctionSchema& schema);

}  // namespace trellium
