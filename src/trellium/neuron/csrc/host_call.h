// Every CPU operator, on neuron tensors, without a copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include "cores.h"

namespace trellium {

// What a host tensor and a neuron tensor are made with.
inline constexpr c10::DispatchKeySet kHostKeys(c10::DispatchKey::CPU);
inline constexpr c10::DispatchKeySet kNeuronKeys(c10::DispatchKey::PrivateUse1);

inline bool on_neuron(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->device_type() == kNeuron;
}

// The CPU tensor that is the neuron tensor.
at::Tensor host_alias(const at::Tensor& tensor);

// A neuron tensor on `storage` with the geometry of the CPU tensor `host`.
at::Tensor neuron_tensor(c10::Storage storage, const at::Tensor& host);

// The kernel that runs an operator on the host.
c10::KernelFunction host_kernel(const c10::FunctionSchema& schema);

// The same for custom operators that were defined after this module was loaded.
void host_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace trellium
