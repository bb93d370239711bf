// Every CPU operator, on neuron tensors, without a copy.
//
// A neuron storage's block owns a CPU storage, so a neuron tensor has an *alias*: a CPU tensor of the same geometry on that CPU storage. An
// operator runs by putting aliases in place of its neuron arguments, calling the CPU kernel, and mapping what comes back: an alias of an
// argument is that argument; a tensor on an argument's storage is a view of it; anything else is new, and its storage is given to the core.
// Arguments the schema marks as written are looked at afterwards, since `out=` and `resize_` may have grown them.
//
// It is registered operator by operator, for all that have a CPU kernel (some 1,300; 13 ms): a backend *fallback* would lose to
// CompositeExplicitAutograd kernels in the dispatch table, and structured operators would be dispatched twice. The fallback stays for custom
// operators that come later. Cost: 0.5 to 0.9 us an operator.
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
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "contract.h"
#include "cores.h"
#include "runtime.h"

namespace trellium {
namespace {

using torch::jit::Stack;
constexpr c10::DispatchKeySet kHostKeys(c10::DispatchKey::CPU);
constexpr c10::DispatchKeySet kNeuronKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_of(int core) {
  return {kNeuron, static_cast<c10::DeviceIndex>(core)};
}

bool on_neuron(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->device_type() == kNeuron;
}

void copy_geometry(c10::TensorImpl* to, const c10::TensorImpl* from) {
  to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
}

void copy_lazy_bits(c10::TensorImpl* to, const c10::TensorImpl* from) {
  const c10::DispatchKeySet keys = from->key_set();
  if (C10_UNLIKELY(keys.has_any(c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative})))) {
    to->_set_conj(keys.has(c10::DispatchKey::Conjugate));
    to->_set_neg(keys.has(c10::DispatchKey::Negative));
  }
}

Block* block_of(const at::Tensor& tensor) {
  return trellium::block_of(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  const c10::TensorImpl* source = tensor.unsafeGetTensorImpl();
  const Block* block = block_of(tensor);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(block->host), kHostKeys, source->dtype());
  copy_geometry(impl.get(), source);
  copy_lazy_bits(impl.get(), source);
  if (C10_UNLIKELY(source->is_wrapped_number())) {
    impl->set_wrapped_number(true);
  }
  return at::Tensor(std::move(impl));
}

at::Tensor neuron_tensor(c10::Storage storage, const at::Tensor& host) {
  const c10::TensorImpl* source = host.unsafeGetTensorImpl();
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), kNeuronKeys, source->dtype());
  copy_geometry(impl.get(), source);
  copy_lazy_bits(impl.get(), source);
  return at::Tensor(std::move(impl));
}

namespace {

at::Tensor neuron_view(const at::Tensor& base, const at::Tensor& host) {
  const c10::TensorImpl* source = host.unsafeGetTensorImpl();
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW,
      c10::Storage(base.storage()),
      base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative),
      source->dtype());
  copy_geometry(impl.get(), source);
  copy_lazy_bits(impl.get(), source);
  return at::Tensor(std::move(impl));
}

// ---- the boxed kernel ----

enum class Kind : uint8_t { kTensor, kTensors, kDevice, kGenerator };

struct Slot {
  uint16_t index;
  Kind kind;
  bool written;
};

// What a schema says, read once.
struct Plan {
  c10::SmallVector<Slot, 6> slots;
  size_t arguments = 0;
  size_t returns = 0;
  bool host_operands = false;  // CPU tensors of any size may stand beside neuron ones
};

// CUDA allows these a CPU operand with dimensions: a copy crosses devices, and indices may be on the host.
bool takes_host_operands(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::copy_",           "aten::_copy_from",      "aten::_copy_from_and_resize", "aten::index",
      "aten::index_put_",      "aten::_index_put_impl_", "aten::_unsafe_index",         "aten::_foreach_copy_",
      "aten::_foreach_copy",   "aten::copy",            "aten::_ctc_loss",             "aten::_unsafe_index_put",
      "aten::_pack_padded_sequence_backward",
  };
  return names.count(name) != 0;
}

Plan plan_of(const c10::FunctionSchema& schema) {
  Plan plan;
  plan.arguments = schema.arguments().size();
  plan.returns = schema.returns().size();
  plan.host_operands = takes_host_operands(schema.name());
  for (size_t i = 0; i < plan.arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::AliasInfo* alias = argument.alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    c10::TypePtr type = argument.type();
    if (type->kind() == c10::TypeKind::OptionalType) {
      type = type->castRaw<c10::OptionalType>()->getElementType();
    }
    Kind kind;
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        kind = Kind::kTensor;
        break;
      case c10::TypeKind::DeviceObjType:
        kind = Kind::kDevice;
        break;
      case c10::TypeKind::GeneratorType:
        kind = Kind::kGenerator;
        break;
      case c10::TypeKind::ListType: {
        c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
        if (element->kind() == c10::TypeKind::OptionalType) {
          element = element->castRaw<c10::OptionalType>()->getElementType();
        }
        if (element->kind() != c10::TypeKind::TensorType) {
          continue;
        }
        kind = Kind::kTensors;
        break;
      }
      default:
        continue;
    }
    plan.slots.push_back({static_cast<uint16_t>(i), kind, written});
  }
  return plan;
}

struct Operand {
  at::Tensor original;
  at::Tensor host;  // the alias; for a CPU tensor, itself
  bool written;
  bool neuron;
};

// Says what runs on this thread to the gate before the CPU allocator.
class KernelScope {
 public:
  KernelScope(Thread& thread, int core) : thread_(thread), before_(thread.kernel_core) {
    thread.kernel_core = static_cast<int8_t>(core);
  }
  ~KernelScope() {
    thread_.kernel_core = before_;
  }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  Thread& thread_;
  int8_t before_;
};

[[noreturn]] void device_mismatch(const c10::OperatorHandle& op, int core, const c10::Device& other, const std::string& argument) {
  TORCH_CHECK(
      false,
      "Expected all tensors to be on the same device, but found at least two devices, neuron:",
      core,
      " and ",
      other,
      "! (when checking argument '",
      argument,
      "' of ",
      op.operator_name(),
      ")");
}

// One call of one operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Plan& plan, Stack* stack) : op_(op), plan_(plan), stack_(stack) {}

  void run() {
    Thread& thread = enter_thread();
    take_arguments();
    if (core_ < 0) {
      core_ = current_core();
    }
    {
      KernelScope scope(thread, core_);
      op_.redispatchBoxed(kHostKeys, stack_);
    }
    settle_written();
    give_results();
  }

 private:
  c10::IValue& argument(const Slot& slot) {
    return (*stack_)[stack_->size() - plan_.arguments + slot.index];
  }

  // The alias of a tensor argument, remembered.
  at::Tensor take(at::Tensor tensor, const Slot& slot) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (C10_LIKELY(on_neuron(tensor))) {
      const int core = tensor.unsafeGetTensorImpl()->device().index();
      if (core_ < 0) {
        core_ = core;
      } else if (C10_UNLIKELY(core != core_) && !copies()) {
        device_mismatch(op_, core_, tensor.device(), name_of(slot));
      }
      at::Tensor host = host_alias(tensor);
      operands_.push_back({std::move(tensor), host, slot.written, true});
      return host;
    }
    if (!plan_.host_operands && (tensor.dim() != 0 || !tensor.device().is_cpu() || slot.written)) {
      misplaced_ = static_cast<int>(operands_.size());
      misplaced_slot_ = &slot;
    }
    operands_.push_back({tensor, tensor, slot.written, false});
    return tensor;
  }

  bool copies() const {
    return plan_.host_operands;
  }

  std::string name_of(const Slot& slot) const {
    return op_.schema().arguments()[slot.index].name();
  }

  void take_arguments() {
    bool neuron_generator = false;
    bool neuron_device = false;
    for (const Slot& slot : plan_.slots) {
      c10::IValue& value = argument(slot);
      switch (slot.kind) {
        case Kind::kTensor:
          if (value.isTensor()) {
            value = take(std::move(value).toTensor(), slot);
          }
          break;
        case Kind::kTensors:
          take_list(value, slot);
          break;
        case Kind::kDevice:
          if (value.isDevice()) {
            const c10::Device device = value.toDevice();
            if (device.type() == kNeuron) {
              neuron_device = true;
              const int core = checked_core(device.index());
              if (core_ < 0) {
                core_ = core;
              }
              value = c10::Device(c10::kCPU);
            } else {
              to_host_ = true;
            }
          }
          break;
        case Kind::kGenerator:
          break;
      }
    }
    const bool neuron_tensors = core_ >= 0;
    // After the others: which core's default generator is meant is known only now.
    for (const Slot& slot : plan_.slots) {
      if (slot.kind != Kind::kGenerator) {
        continue;
      }
      c10::IValue& value = argument(slot);
      if (value.isNone()) {
        if (neuron_tensors) {
          value = host_generator(default_generator(core_));
        }
      } else {
        const at::Generator generator = value.toGenerator();
        const bool ours = generator.device().type() == kNeuron;
        TORCH_CHECK(
            ours == neuron_tensors,
            "Expected a '",
            neuron_tensors ? "neuron" : "cpu",
            "' device type for generator but found '",
            ours ? "neuron" : c10::DeviceTypeName(generator.device().type(), true),
            "'");
        neuron_generator = true;
        value = host_generator(generator);
      }
    }
    if (C10_UNLIKELY(misplaced_ >= 0) && (core_ >= 0 || neuron_device || neuron_generator)) {
      device_mismatch(
          op_, core_ < 0 ? current_core() : core_, operands_[static_cast<size_t>(misplaced_)].original.device(), name_of(*misplaced_slot_));
    }
  }

  void take_list(c10::IValue& value, const Slot& slot) {
    if (value.isTensorList()) {
      const c10::List<at::Tensor> given = value.toTensorList();
      c10::List<at::Tensor> hosts;
      hosts.reserve(given.size());
      for (size_t i = 0; i < given.size(); ++i) {
        hosts.push_back(take(given.get(i), slot));
      }
      value = std::move(hosts);
    } else if (value.isList()) {
      const c10::List<c10::IValue> given = value.toList();
      c10::List<std::optional<at::Tensor>> hosts;
      hosts.reserve(given.size());
      for (size_t i = 0; i < given.size(); ++i) {
        const c10::IValue element = given.get(i);
        if (element.isTensor()) {
          hosts.push_back(take(element.toTensor(), slot));
        } else {
          hosts.push_back(std::nullopt);
        }
      }
      value = std::move(hosts);
    }
  }

  // `out=`, `resize_` and their like may have moved, grown or reshaped what they wrote.
  void settle_written() {
    for (const Operand& operand : operands_) {
      if (!operand.written || !operand.neuron) {
        continue;
      }
      c10::TensorImpl* neuron = operand.original.unsafeGetTensorImpl();
      const c10::TensorImpl* host = operand.host.unsafeGetTensorImpl();
      c10::StorageImpl* storage = neuron->unsafe_storage().unsafeGetStorageImpl();
      Block* block = trellium::block_of(storage);
      if (C10_UNLIKELY(host->unsafe_storage().unsafeGetStorageImpl() != block->host.get())) {
        neuron->set_storage_keep_dtype(new_storage(operand.host));
      } else if (C10_UNLIKELY(
                     block->host->nbytes() != block->nbytes || block->host->data_ptr().get() != storage->data_ptr().get())) {
        refresh_storage(storage, block);
        block->describe(host->sizes(), operand.host.scalar_type());
      }
      if (C10_UNLIKELY(
              host->sizes() != neuron->sizes() || host->strides() != neuron->strides() ||
              host->storage_offset() != neuron->storage_offset())) {
        copy_geometry(neuron, host);
      }
      // A kernel may leave its result conjugated or negated lazily, or resolve what was.
      constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
      if (C10_UNLIKELY((host->key_set() & lazy) != (neuron->key_set() & lazy))) {
        neuron->_set_conj(host->key_set().has(c10::DispatchKey::Conjugate));
        neuron->_set_neg(host->key_set().has(c10::DispatchKey::Negative));
      }
    }
  }

  void give_results() {
    const size_t first = stack_->size() - plan_.returns;
    for (size_t i = first; i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        value = give(std::move(value).toTensor());
      } else if (value.isTensorList()) {
        const c10::List<at::Tensor> hosts = value.toTensorList();
        c10::List<at::Tensor> results;
        results.reserve(hosts.size());
        for (size_t j = 0; j < hosts.size(); ++j) {
          results.push_back(give(hosts.get(j)));
        }
        value = std::move(results);
      }
    }
  }

  at::Tensor give(at::Tensor host) {
    if (!host.defined() || !host.device().is_cpu()) {
      return host;
    }
    for (const Operand& operand : operands_) {
      if (operand.host.is_same(host)) {
        return operand.original;
      }
    }
    if (to_host_) {
      return host;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        host.layout() == c10::kStrided && !host.is_quantized() && !host.is_nested(),
        op_.operator_name(),
        " gives a tensor that is ",
        host.is_quantized() ? "quantized" : host.is_nested() ? "nested" : "sparse or opaque",
        " (layout ",
        host.layout(),
        "), and the emulated neuron device holds dense strided tensors only. Move the operand to the CPU first, or stay dense.");
    const c10::Storage& storage = host.storage();
    // Only one owner: certainly new. That saves the search, which would be quadratic for long lists.
    if (storage.use_count() > 1) {
      for (const Operand& operand : operands_) {
        if (operand.host.has_storage() && operand.host.storage().is_alias_of(storage)) {
          return operand.neuron ? neuron_view(operand.original, host) : host;
        }
      }
    }
    return neuron_tensor(new_storage(host), host);
  }

  // The neuron storage for a CPU storage that is new here; results that share one keep sharing it.
  c10::Storage new_storage(const at::Tensor& host) {
    const c10::Storage& storage = host.storage();
    for (const auto& [from, to] : adopted_) {
      if (from == storage.unsafeGetStorageImpl()) {
        return to;
      }
    }
    c10::Storage result = adopt_storage(core_, storage, host.sizes(), host.scalar_type());
    if (storage.use_count() > 2) {  // this result and the block own it; somebody else does too
      adopted_.emplace_back(storage.unsafeGetStorageImpl(), result);
    }
    return result;
  }

  const c10::OperatorHandle& op_;
  const Plan& plan_;
  Stack* stack_;
  int core_ = -1;
  bool to_host_ = false;
  int misplaced_ = -1;
  const Slot* misplaced_slot_ = nullptr;
  c10::SmallVector<Operand, 6> operands_;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 1> adopted_;
};

void run_on_host(const c10::OperatorHandle& op, const Plan& plan, Stack* stack) {
  if (C10_UNLIKELY(in_bad_fork())) {
    refuse_fork();
  }
  if (C10_UNLIKELY(contract::enabled.load(std::memory_order_relaxed))) {
    contract::record(op, *stack);
  }
  Call(op, plan, stack).run();
}

class HostKernel final : public c10::OperatorKernel {
 public:
  explicit HostKernel(Plan plan) : plan_(std::move(plan)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    run_on_host(op, plan_, stack);
  }

 private:
  Plan plan_;
};

// Custom operators that were defined after this module was loaded.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  static std::mutex mutex;
  static auto* plans = new std::unordered_map<std::string, std::unique_ptr<Plan>>();
  const Plan* plan = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Plan>& known = (*plans)[c10::toString(op.schema())];
    if (!known) {
      known = std::make_unique<Plan>(plan_of(op.schema()));
    }
    plan = known.get();
  }
  run_on_host(op, *plan, stack);
}

void no_sparse(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      op.operator_name(),
      ": the emulated neuron device holds dense strided tensors only, not sparse, quantized or nested ones. Keep the tensor on the CPU, or "
      "make it dense before moving it: .to_dense(), .dequantize(), .to_padded_tensor().");
}

// ---- native kernels ----

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
  enter_thread();
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
  enter_thread();
  require_plain(layout, pin_memory);
  at::detail::check_size_nonnegative(size);
  const at::ScalarType dtype = c10::dtype_or_default(dtype_opt);
  const size_t nbytes = at::detail::computeStorageNbytes(size, stride, c10::elementSize(dtype));
  static constexpr int64_t none = 0;
  // A zero-dimensional tensor's stride list is empty, and may have no address.
  return new_tensor(
      core_of(device), size, stride.empty() ? at::IntArrayRef(&none, size_t{0}) : stride, nbytes, dtype);
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  enter_thread();
  at::native::checkSetStorage(self, source, offset, size, stride);
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
  copy_geometry(impl.get(), source);
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
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<HostKernel>(plan_of(op->schema()))),
        std::nullopt,
        nullptr,
        "trellium neuron: CPU kernel on an alias"));
  }
  into_fallback(c10::DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const c10::DispatchKey key :
       {c10::DispatchKey::SparsePrivateUse1,
        c10::DispatchKey::SparseCsrPrivateUse1,
        c10::DispatchKey::QuantizedPrivateUse1,
        c10::DispatchKey::NestedTensorPrivateUse1}) {
    into_fallback(key, torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
  }
}

}  // namespace trellium
