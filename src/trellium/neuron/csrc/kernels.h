// Every CPU operator, on neuron tensors, without a copy.
#pragma once

namespace trellium {

// Registers the operators with torch's dispatcher. Once a process, after `register_runtime`.
void register_kernels();

}  // namespace trellium
