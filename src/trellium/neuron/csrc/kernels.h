// Every CPU operator, on neuron tensors, without a copy.
#pragma once

#include <ATen/core/Tensor.h>

namespace trellium {

// Registers the operators with torch's dispatcher. Once a process, after `register_runtime`.
void register_kernels();

// The CPU tensor that is the neuron tensor.
at::Tensor host_alias(const at::Tensor& tensor);

// A neuron tensor on `storage` with the geometry of the CPU tensor `host`.
at::Tensor neuron_tensor(c10::Storage storage, const at::Tensor& host);

}  // namespace trellium
