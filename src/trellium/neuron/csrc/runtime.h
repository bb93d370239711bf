// What torch asks a device's runtime for: guard, hooks, generators, streams and events, pinned memory, profiler stubs.
#pragma once

#include <ATen/core/Generator.h>

namespace trellium {

// Registers all of them with torch. Once a process, after `configure`.
void register_runtime();

// The generator a core uses when none is given.
const at::Generator& default_generator(int core);

// The CPU generator behind a neuron generator: the same seed gives the CPU's numbers.
const at::Generator& host_generator(const at::Generator& generator);

}  // namespace trellium
