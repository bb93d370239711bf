// Every CPU operator, on neuron tensors, without a copy.
//
// A neuron storage's block owns a CPU storage, so a neuron tensor has an *alias*: a CPU tensor of the same geometry on that CPU storage. An
// operator runs by putting aliases in place of its neuron arguments, calling the CPU kernel, and mapping what comes back: an alias of an
// argument is that argument; a tensor on an argument's storage is a view of it; anything else is new, and its storage is given to the core.
// Arguments the schema marks as written are looked at afterwards, since `out=` and `resize_` may have grown them.
//
// Cost: 0.5 to 0.9 us an operator.
#include "host_call.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "contract.h"
#include "cores.h"
#include "plan.h"
#include "runtime.h"

namespace trellium {
namespace {

using torch::jit::Stack;

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
    take_arguments();
    if (core_ < 0) {
      core_ = current_core();
    }
    {
      KernelScope scope(this_thread(), core_);
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
      } else if (C10_UNLIKELY(core != core_) && plan_.placement != Placement::kAnywhere) {
        device_mismatch(op_, core_, tensor.device(), name_of(slot));
      }
      at::Tensor host = host_alias(tensor);
      operands_.push_back({std::move(tensor), host, slot.written, true});
      return host;
    }
    if (misplaced_ < 0 && !may_be_on_host(tensor, slot)) {
      misplaced_ = static_cast<int>(operands_.size());
      misplaced_slot_ = &slot;
    }
    operands_.push_back({tensor, tensor, slot.written, false});
    return tensor;
  }

  // Whether a tensor that is not a neuron one may stand beside neuron ones.
  bool may_be_on_host(const at::Tensor& tensor, const Slot& slot) const {
    const bool number = tensor.dim() == 0 && tensor.device().is_cpu() && !slot.written;
    switch (plan_.placement) {
      case Placement::kScalars:
        return number;
      case Placement::kOneDevice:
        return false;
      case Placement::kScalarValue:
        return number && slot.value;
      case Placement::kIndices:
        return slot.kind == Kind::kTensors ? tensor.device().is_cpu() : number && slot.index != 0;
      case Placement::kHost:
        return tensor.device().is_cpu() && !slot.written;
      case Placement::kAnywhere:
        return true;
    }
    return false;
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
      TORCH_CHECK(
          plan_.placement != Placement::kIndices || misplaced_ > 0,
          "indices should be either on cpu or on the same device as the indexed tensor (",
          operands_[0].original.device(),
          "), and one is on neuron:",
          core_,
          ". Move them first: .cpu().");
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

}  // namespace

c10::KernelFunction host_kernel(const c10::FunctionSchema& schema) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<HostKernel>(plan_of(schema)));
}

void host_fallback(const c10::OperatorHandle& op, Stack* stack) {
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

}  // namespace trellium
