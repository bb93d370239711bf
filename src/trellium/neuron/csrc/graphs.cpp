// A compiled graph is host code: it takes CPU tensors and gives CPU tensors. This is the gate on both sides, without a copy.
//
// Going in, each neuron tensor is replaced by its alias. Coming out, a tensor that lies on an argument's storage is a view of that argument,
// and any other is given to the core. Arguments are not kept alive for that (a backward would hold every saved activation until
// its end): only who owned which host storage is remembered, weakly. Cost: about 0.3 us a tensor.
#include "graphs.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "cores.h"
#include "host_call.h"
#include "runtime.h"

namespace py = pybind11;

namespace trellium::graphs {
namespace {

using Owner = c10::weak_intrusive_ptr<c10::StorageImpl>;

Owner weakly(c10::StorageImpl* storage) {
  return Owner(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
}

py::object wrapped(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

class Passage {
 public:
  // Empties `arguments`, as the caller of a boxed function expects, and returns their aliases.
  py::list enter(py::list arguments) {
    const size_t count = arguments.size();
    py::list hosts(count);
    for (size_t i = 0; i < count; ++i) {
      py::object item = arguments[i];
      if (THPVariable_Check(item.ptr())) {
        const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
        if (tensor.device().type() == kNeuron) {
          at::Tensor host = host_alias(tensor);
          owners_.emplace_back(host.storage().unsafeGetStorageImpl(), weakly(tensor.storage().unsafeGetStorageImpl()));
          hosts[i] = wrapped(std::move(host));
          continue;
        }
      }
      hosts[i] = std::move(item);
    }
    PyList_SetSlice(arguments.ptr(), 0, static_cast<Py_ssize_t>(count), nullptr);
    return hosts;
  }

  // `cores[i]` is the core of result `i`, or -1 where the graph says that it stays on the host.
  py::list leave(const py::sequence& results, const std::vector<int>& cores) {
    py::list given(results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      py::object item = results[i];
      if (THPVariable_Check(item.ptr()) && cores.at(i) >= 0) {
        const at::Tensor& host = THPVariable_Unpack(item.ptr());
        if (host.device().is_cpu()) {
          given[i] = wrapped(give(host, cores[i]));
          continue;
        }
      }
      given[i] = std::move(item);
    }
    return given;
  }

 private:
  at::Tensor give(const at::Tensor& host, int core) {
    c10::StorageImpl* key = host.storage().unsafeGetStorageImpl();
    for (const auto& [owned, owner] : owners_) {
      if (owned == key) {
        if (c10::intrusive_ptr<c10::StorageImpl> storage = owner.lock()) {
          return neuron_tensor(c10::Storage(std::move(storage)), host);
        }
      }
    }
    c10::Storage storage = adopt_storage(core, host.storage(), host.sizes(), host.scalar_type());
    owners_.emplace_back(key, weakly(storage.unsafeGetStorageImpl()));  // results that share a storage keep sharing it
    return neuron_tensor(std::move(storage), host);
  }

  c10::SmallVector<std::pair<c10::StorageImpl*, Owner>, 16> owners_;
};

// Compiled code draws from the CPU's default generator. Called before and after it, this makes those draws the core's own.
void swap_generators(int core) {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Generator ours = host_generator(default_generator(core));
  std::scoped_lock lock(host.mutex(), ours.mutex());
  auto* a = at::check_generator<at::CPUGeneratorImpl>(host);
  auto* b = at::check_generator<at::CPUGeneratorImpl>(ours);
  const auto engine = a->engine();
  const auto next_float = a->next_float_normal_sample();
  const auto next_double = a->next_double_normal_sample();
  a->set_engine(b->engine());
  a->set_next_float_normal_sample(b->next_float_normal_sample());
  a->set_next_double_normal_sample(b->next_double_normal_sample());
  b->set_engine(engine);
  b->set_next_float_normal_sample(next_float);
  b->set_next_double_normal_sample(next_double);
}

}  // namespace

void bind(py::module_& m) {
  py::class_<Passage>(m, "Passage", "One call of a compiled graph: arguments in, results out, no copy.")
      .def(py::init<>())
      .def("enter", &Passage::enter, "the host's aliases of the arguments; empties the list it is given")
      .def("leave", &Passage::leave, "results as neuron tensors; `cores` names each one's core, -1 for the host");
  m.def("swap_generators", &swap_generators, "exchange the states of the CPU's default generator and a core's");
}

}  // namespace trellium::graphs
