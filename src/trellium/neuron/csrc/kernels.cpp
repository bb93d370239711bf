// The device's operators: which have a kernel of their own here, and the registration of all.
//
// The host's kernels (host_call.cpp) are registered operator by operator, for all that have a CPU kernel (some 1,300; 13 ms): a backend
// *fallback* would lose to CompositeExplicitAutograd kernels in the dispatch table, and structured operators would be dispatched twice. The
// fallback stays for custom operators that come later.
#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "contract.h"
#include "cores.h"
#include "host_call.h"

namespace trellium {
namespace {

using torch::jit::Stack;

constexpr const char* kDenseOnly =
    ": the emulated neuron device holds dense strided tensors only, not sparse (COO, CSR, CSC, BSR, BSC), quantized or nested ones. Keep the "
    "tensor on the CPU, or make it dense before moving it: .to_dense(), .dequantize(), .to_padded_tensor().";

void no_sparse(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(), kDenseOnly);
}

// ---- native kernels ----

// Torch's own, for compressed sparse tensors of the host: they do not go to the device.
at::Tensor copy_of_compressed(
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    bool non_blocking,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK_NOT_IMPLEMENTED(!device.has_value() || device->type() != kNeuron, "moving a ", self.layout(), " tensor to neuron", kDenseOnly);
  return at::native::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, memory_format);
}

void require_plain(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(
      !layout.has_value() || *layout == at::kStrided, "the neuron device holds dense strided tensors only, not layout ", *layout);
  TORCH_CHECK(!pin_memory.has_value() || !*pin_memory, "Only dense CPU tensors can be pinned");
}

int core_of(std::optional<at::Device> device) {
  return checked_core(device.has_value() ? device->index() : static_cast<c10::DeviceIndex>(-1));
}

at::Tensor new_tensor(int core, at::IntArrayRef size, at::IntArrayRef stride, size_t nbytes, c10::ScalarType dtype) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      static_cast<int64_t>(nbytes),
      allocate_block(core, nbytes, size, dtype),
      allocator(),
      /*resizable=*/true);
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), kNeuronKeys, c10::scalarTypeToTypeMeta(dtype));
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else if (size.size() != 1 || size[0] != 0) {
    impl->set_sizes_contiguous(size);
  }
  at::Tensor tensor(std::move(impl));
  if (C10_UNLIKELY(at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory())) {
    at::Tensor host = host_alias(tensor);
    at::native::fill_empty_deterministic_(host);
  }
  return tensor;
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype_opt,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  require_plain(layout, pin_memory);
  at::detail::check_size_nonnegative(size);
  const at::ScalarType dtype = c10::dtype_or_default(dtype_opt);
  const size_t nbytes = at::detail::computeStorageNbytesContiguous(size, c10::elementSize(dtype));
  at::Tensor tensor = new_tensor(core_of(device), size, {}, nbytes, dtype);
  if (C10_UNLIKELY(memory_format.has_value() && *memory_format != at::MemoryFormat::Contiguous)) {
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*memory_format);
  }
  return tensor;
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype_opt,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  require_plain(layout, pin_memory);
  at::detail::check_size_nonnegative(size);
  const at::ScalarType dtype = c10::dtype_or_default(dtype_opt);
  const size_t nbytes = at::detail::computeStorageNbytes(size, stride, c10::elementSize(dtype));
  static constexpr int64_t none = 0;
  // A zero-dimensional tensor's stride list is empty, and may have no address.
  return new_tensor(
      core_of(device), size, stride.empty() ? at::IntArrayRef(&none, size_t{0}) : stride, nbytes, dtype);
}

void take_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  if (impl->numel() > 0) {
    const size_t needed = at::detail::computeStorageNbytes(
        impl->sizes(), impl->strides(), impl->itemsize(), static_cast<size_t>(offset));
    if (needed > impl->unsafe_storage().nbytes()) {
      resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
    }
  }
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  const c10::Storage storage = impl->unsafe_storage();
  const c10::SmallVector<int64_t, 5> sizes(impl->sizes()), strides(impl->strides());
  const int64_t storage_offset = impl->storage_offset();
  try {
    take_storage(self, std::move(source), offset, size, stride);
  } catch (...) {  // the storage could not grow: the tensor is what it was
    impl->set_storage_keep_dtype(storage);
    impl->set_sizes_and_strides(sizes, strides, storage_offset);
    throw;
  }
  return self;
}

at::Tensor& set_to_whole_storage(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_to_storage(self, std::move(source), 0, length, {});
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) {
    return self;
  }
  return set_to_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  const c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  at::Storage nothing(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      0,
      allocate_block(impl->device().index(), 0, {0}, self.scalar_type()),
      allocator(),
      /*resizable=*/true));
  return set_to_storage(self, std::move(nothing), 0, {0}, {});
}

void record_stream(at::Tensor&, at::Stream) {}  // work has ended when its call returns

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  destination.copy_(self, non_blocking);
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  destination.copy_(self);
  return destination;
}

// A zero tensor without memory, which autograd makes, cannot be aliased.
at::Tensor zero_tensor(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::zeros(size, dtype, layout, device, pin_memory);
}

// Parameters keep their identity in `Module.to("neuron")` only if torch thinks the two tensor types interchangeable; without it tied
// weights come apart, silently.
bool compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto plain = [](const at::Tensor& tensor) {
    const c10::DispatchKeySet keys = tensor.key_set();
    return keys.has(c10::DispatchKey::Dense) &&
        keys.has_any(c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::PrivateUse1Bit})) &&
        !keys.has(c10::DispatchKey::Python);
  };
  return plain(self) && plain(from);
}

// CUDA counts integers; the CPU kernel refuses them. Mixture-of-experts models count the tokens of each expert this way.
at::Tensor count_bins(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  static const c10::OperatorHandle whole_op = contract::operator_named("aten::histc");
  const contract::Whole whole(whole_op, {self, bins, min, max});
  if (!c10::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    const at::Tensor counted = at::histc(host_alias(self), bins, min, max);
    at::Tensor result = at::empty(counted.sizes(), self.options());
    host_alias(result).copy_(counted);
    return result;
  }
  TORCH_CHECK(bins > 0, "bins must be > 0");
  at::Tensor result = at::zeros({bins}, self.options());
  if (self.numel() == 0) {
    return result;
  }
  const at::Tensor values = host_alias(self).to(at::kLong).contiguous();
  const int64_t* value = values.const_data_ptr<int64_t>();
  int64_t low = min.to<int64_t>();
  int64_t high = max.to<int64_t>();
  if (low == high) {
    const auto [smallest, largest] = std::minmax_element(value, value + values.numel());
    low = *smallest;
    high = *largest;
  }
  if (low == high) {
    low -= 1;
    high += 1;
  }
  TORCH_CHECK(low < high, "max must be larger than min");
  at::Tensor counts = at::zeros({bins}, at::TensorOptions().dtype(at::kLong));
  auto* count = counts.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (value[i] >= low && value[i] <= high) {
      const auto bin = static_cast<int64_t>(static_cast<__int128>(value[i] - low) * bins / (high - low));
      ++count[std::min(bin, bins - 1)];
    }
  }
  host_alias(result).copy_(counts);
  return result;
}

at::Tensor& count_bins_out(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max, at::Tensor& out) {
  const at::Tensor result = count_bins(self, bins, min, max);
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

// A CPU tensor with a tensor's geometry, for questions that read no element.
at::Tensor without_memory(const at::Tensor& tensor) {
  const c10::TensorImpl* source = tensor.unsafeGetTensorImpl();
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(nothing), kHostKeys, source->dtype());
  impl->set_sizes_and_strides(source->sizes(), source->strides(), source->storage_offset());
  return at::Tensor(std::move(impl));
}

int64_t fused_sdp_choice(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  // The choice also depends on whether gradients will be wanted, which an alias does not know.
  const auto alias = [](const at::Tensor& tensor) {
    // While a graph is traced, tensors have a geometry and no memory.
    at::Tensor host = tensor.storage().device_type() == kNeuron ? host_alias(tensor) : without_memory(tensor);
    if (tensor.requires_grad()) {
      host.set_requires_grad(true);
    }
    return host;
  };
  for (const at::Tensor* tensor : {&query, &key, &value}) {
    if (tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      return static_cast<int64_t>(at::SDPBackend::math);  // traced with symbols, which no graph for this device may have
    }
  }
  std::optional<at::Tensor> host_mask;
  if (mask.has_value() && mask->defined()) {
    host_mask = on_neuron(*mask) ? alias(*mask) : *mask;
  }
  return at::native::_fused_sdp_choice_cpp(alias(query), alias(key), alias(value), host_mask, dropout, causal, scale, grouped);
}

// Dropout as the CPU does it, operation by operation, so that the same seed drops and scales the same numbers to the last bit. Torch's own
// `dropout` would choose `native_dropout` here because the device is not the CPU.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  static const c10::OperatorHandle whole_op = contract::operator_named("aten::native_dropout");
  const contract::Whole whole(whole_op, {input, p, train});
  at::Tensor noise = at::empty_like(input);
  noise.bernoulli_(1 - p);
  noise.div_(1 - p);
  return input.mul(noise);
}

// Has no generator argument, so the CPU kernel would draw from the CPU's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  static const c10::OperatorHandle whole_op = contract::operator_named("aten::native_dropout");
  const contract::Whole whole(whole_op, {input, p, train});
  if (input.numel() == 0) {
    return {input, at::empty_like(input, input.options().dtype(at::kBool))};
  }
  if (train.has_value() && !*train) {
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  }
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (p == 1) {
    mask.fill_(false);
    return {at::zeros(input.sizes(), input.options()), mask};
  }
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(1.0 / (1 - p)), mask};
}

// Torch takes a device that is not the CPU to have fused recurrent cells, and the CPU has none. These are the cells' equations in operators
// that have gradients, so no backward of their own is needed; the workspace, which only that would read, is empty.
at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias.has_value() && bias->defined() ? gates.add(*bias) : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  const std::vector<at::Tensor> gate =
      with_bias(input_gates, input_bias).add(with_bias(hidden_gates, hidden_bias)).unsafe_chunk(4, 1);
  const at::Tensor next_cell = gate[1].sigmoid().mul(cell).add(gate[0].sigmoid().mul(gate[2].tanh()));
  return {gate[3].sigmoid().mul(next_cell.tanh()), next_cell, at::empty({0}, cell.options())};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  const std::vector<at::Tensor> input = with_bias(input_gates, input_bias).unsafe_chunk(3, 1);
  const std::vector<at::Tensor> recurrent = with_bias(hidden_gates, hidden_bias).unsafe_chunk(3, 1);
  const at::Tensor reset = recurrent[0].add(input[0]).sigmoid();
  const at::Tensor update = recurrent[1].add(input[1]).sigmoid();
  const at::Tensor candidate = input[2].add(recurrent[2].mul(reset)).tanh();
  return {hidden.sub(candidate).mul(update).add(candidate), at::empty({0}, hidden.options())};
}

// ---- registration ----

template <typename Register>
void into(const char* space, c10::DispatchKey key, Register&& add) {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>();
  libraries->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, space, key, __FILE__, __LINE__));
  add(*libraries->back());
}

void into_fallback(c10::DispatchKey key, torch::CppFunction function) {
  into("_", key, [&](torch::Library& library) { library.fallback(std::move(function)); });
}

}  // namespace

void register_kernels() {
  into("aten", c10::DispatchKey::PrivateUse1, [](torch::Library& m) {
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_to_storage));
    m.impl("set_.source_Storage", TORCH_FN(set_to_whole_storage));
    m.impl("set_.source_Tensor", TORCH_FN(set_to_tensor));
    m.impl("set_", TORCH_FN(set_to_nothing));
    m.impl("record_stream", TORCH_FN(record_stream));
    m.impl("_copy_from", TORCH_FN(copy_from));
    m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    m.impl("_efficientzerotensor", TORCH_FN(zero_tensor));
    m.impl("_has_compatible_shallow_copy_type", TORCH_FN(compatible_shallow_copy_type));
    m.impl("histc", TORCH_FN(count_bins));
    m.impl("histc.out", TORCH_FN(count_bins_out));
    m.impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
    m.impl("native_dropout", TORCH_FN(native_dropout));
  });
  // Torch would wrap neuron values and indices in a compressed sparse tensor without asking, which nothing could use.
  for (const c10::DispatchKey key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::SparseCsrPrivateUse1}) {
    into("aten", key, [](torch::Library& m) {
      for (const char* name :
           {"sparse_compressed_tensor.comp_plain_value_size", "sparse_compressed_tensor.comp_plain_value",
            "_sparse_compressed_tensor_unsafe", "_sparse_compressed_tensor_with_dims"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
      }
    });
  }
  into("aten", c10::DispatchKey::SparseCsrCPU, [](torch::Library& m) { m.impl("_to_copy", TORCH_FN(copy_of_compressed)); });
  // Made of operators that have gradients, so for autograd too.
  for (const c10::DispatchKey key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1}) {
    into("aten", key, [](torch::Library& m) {
      m.impl("dropout", TORCH_FN(dropout));
      m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
      m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
    });
  }
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&fused_sdp_choice);

  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorName> names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU);
  // Composite kernels that look at the device (some look for a kernel that only torch's own devices have), or that would loop over tensors one
  // operator at a time.
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const bool foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    if (foreach || name.name == "aten::convolution" || name.name == "aten::convolution_backward" ||
        name.name == "aten::conj_physical_" || (name.name == "aten::mode" && name.overload_name == "values") ||
        (name.name == "aten::copy_" && name.overload_name.empty())) {
      names.push_back(name);
    }
  }
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  registrations->reserve(names.size());
  for (const c10::OperatorName& name : names) {
    const std::optional<c10::OperatorHandle> op = dispatcher.findSchema(name);
    // c10d has its own kernels for this key, and the natives above stand.
    if (!op.has_value() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || name.name.rfind("c10d", 0) == 0 ||
        name.name.rfind("_c10d", 0) == 0) {
      continue;
    }
    registrations->push_back(dispatcher.registerImpl(
        name,
        c10::DispatchKey::PrivateUse1,
        host_kernel(op->schema()),
        std::nullopt,
        nullptr,
        "trellium neuron: CPU kernel on an alias"));
  }
  into_fallback(c10::DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&host_fallback>());
  for (const c10::DispatchKey key :
       {c10::DispatchKey::SparsePrivateUse1,
        c10::DispatchKey::SparseCsrPrivateUse1,
        c10::DispatchKey::QuantizedPrivateUse1,
        c10::DispatchKey::NestedTensorPrivateUse1}) {
    into_fallback(key, torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
  }
}

}  // namespace trellium
