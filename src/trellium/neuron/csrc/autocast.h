// `torch.autocast("neuron")`.
#pragma once

namespace trellium {

// Registers the autocast kernels with torch's dispatcher. Once a process.
void register_autocast();

}  // namespace trellium
