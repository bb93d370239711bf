// What a run asked of the device, and what the real one would have made of it.
//
// The device's boxed kernel calls `record` before every operator while `enabled` is set. Everything is counted per process.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <pybind11/pybind11.h>

#include <atomic>

namespace trellium::contract {

// Whether operators are recorded at all: one relaxed load for the device when they are not.
extern std::atomic<bool> enabled;

// Count one call. `stack` is what it stands on before the call: the operator's arguments last, tensors still the device's own.
// Raises what Python's side of the contract raises, when `strict` is on.
void record(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// For a kernel of the device's own that is made of other operators: while one lives, the operator it stands for is counted, once, and the
// operators this thread runs inside are not. Costs one load when nothing is recorded.
//
//     static const c10::OperatorHandle op = contract::operator_named("aten::native_dropout");
//     const contract::Whole whole(op, {input, p, train});
class Whole {
 public:
  Whole(const c10::OperatorHandle& op, std::initializer_list<c10::IValue> arguments);
  ~Whole();
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;

 private:
  bool outermost_ = false;
};

c10::OperatorHandle operator_named(const char* name, const char* overload = "");

void bind(pybind11::module_& m);

}  // namespace trellium::contract
