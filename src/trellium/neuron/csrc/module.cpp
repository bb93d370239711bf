// The Python module `trellium.neuron._C`. Importing it registers nothing: `initialize` does.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

#include "autocast.h"
#include "contract.h"
#include "cores.h"
#include "graphs.h"
#include "kernels.h"
#include "runtime.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  using namespace trellium;
  m.doc() = "The emulated neuron device: storage, accounting and kernels.";
  m.def(
      "initialize",
      [](int cores, size_t bytes_per_core, std::string core_name, std::string instance) {
        configure(cores, bytes_per_core, std::move(core_name), std::move(instance));
        register_runtime();
        register_kernels();
        register_autocast();
      },
      py::arg("cores"),
      py::arg("bytes_per_core"),
      py::arg("core_name"),
      py::arg("instance"));
  m.def("device_count", &core_count);
  m.def("current_device", &current_core);
  m.def("exchange_device", &exchange_core);
  m.def("in_use", &in_use);
  m.def("settle_autocast", &settle_autocast, "make autocast mean bfloat16 on this thread, unless that was done before");
  m.def("in_bad_fork", &in_bad_fork);
  m.def("default_generator", [](int core) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(checked_core(static_cast<c10::DeviceIndex>(core)))));
  });
  m.def("capacity", &capacity);
  m.def("memory_allocated", [](int core) { return usage(core).bytes.current; });
  m.def("max_memory_allocated", [](int core) { return usage(core).bytes.peak; });
  m.def("reset_peak_memory_stats", &reset_peak);
  m.def("reset_accumulated_memory_stats", &reset_accumulated);
  m.def(
      "largest_live_tensors",
      [](int core, size_t limit) {
        py::list result;
        for (const LiveBlock& block : largest_blocks(core, limit)) {
          py::object dtype = py::none();
          if (block.described) {
            dtype = py::str(c10::toString(block.dtype));
          }
          result.append(py::make_tuple(block.nbytes, block.shape, dtype));
        }
        return result;
      },
      "(bytes, shape, scalar type or None) of the largest live tensors of a core, largest first");
  contract::bind(m);
  graphs::bind(m);
}
