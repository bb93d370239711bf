// The device's operators.
#pragma once

namespace trellium {

// Registers the operators with torch's dispatcher. Once a process, after `register_runtime`.
void register_kernels();

}  // namespace trellium
