#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <chrono>
#include <map>
#include <mutex>

#include "cores.h"

namespace trellium {
namespace {

c10::Device device_of(int core) {
  return {kNeuron, static_cast<c10::DeviceIndex>(core)};
}

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- generators ----

class NeuronGenerator final : public c10::GeneratorImpl {
 public:
  NeuronGenerator(int core, at::Generator host)
      : GeneratorImpl(device_of(core), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host_(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "a neuron generator has no offset: its numbers are those of the CPU's Mersenne twister");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "a neuron generator has no offset: its numbers are those of the CPU's Mersenne twister");
  }
  uint64_t current_seed() const override {
    return host_.current_seed();
  }
  uint64_t seed() override {
    return host_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }
  const at::Generator& host() const {
    return host_;
  }

 private:
  NeuronGenerator* clone_impl() const override {
    return new NeuronGenerator(device().index(), host_.clone());
  }
  at::Generator host_;
};

std::vector<at::Generator>& default_generators() {
  static auto* instance = [] {
    auto* all = new std::vector<at::Generator>();
    for (int core = 0; core < core_count(); ++core) {
      // As the CPU's own default generator: unseeded means a seed nobody chose.
      all->push_back(at::make_generator<NeuronGenerator>(
          core, at::detail::createCPUGenerator(c10::detail::getNonDeterministicRandom())));
    }
    return all;
  }();
  return *instance;
}

// ---- streams and events ----
// Every operator has finished when it returns, so a stream is only a name and an event only a time.

struct Event {
  int64_t recorded_at = 0;
};

std::atomic<c10::StreamId> last_stream{0};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kNeuron;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_of(exchange_core(device.index()));
  }
  c10::Device getDevice() const override {
    return device_of(current_core());
  }
  void setDevice(c10::Device device) const override {
    exchange_core(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < core_count()) {
      this_thread().core = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    keep_autograd_on_this_thread();
    const int core = checked_core(device.index());
    return c10::Stream(c10::Stream::UNSAFE, device_of(core), this_thread().stream[static_cast<size_t>(core)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device_of(checked_core(device.index())), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device_of(checked_core(device.index())), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int core = checked_core(stream.device_index());
    auto& slot = this_thread().stream[static_cast<size_t>(core)];
    const c10::Stream before(c10::Stream::UNSAFE, device_of(core), slot);
    slot = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream) const override {
    return nullptr;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index, const c10::EventFlag) const override {
    TORCH_CHECK(
        index == -1 || index == stream.device_index(),
        "Event device neuron:",
        static_cast<int>(index),
        " does not match the recording stream's device neuron:",
        static_cast<int>(stream.device_index()));
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->recorded_at = nanoseconds();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    return static_cast<double>(static_cast<Event*>(end)->recorded_at - static_cast<Event*>(start)->recorded_at) / 1e6;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    // The autograd engine starts one thread a device at the first backward, and then refuses a backward after a fork. A process that
    // never used the device must not pay for it, nor lose fork. No neuron node runs on those threads (keep_autograd_on_this_thread), so
    // nothing is missing where the device is used later.
    return in_use() ? static_cast<c10::DeviceIndex>(core_count()) : 0;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }
};

// ---- pinned host memory ----
// Ordinary host memory that remembers it was asked for as pinned.

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto owner = std::make_unique<c10::DataPtr>(c10::GetDefaultCPUAllocator()->allocate(nbytes));
    void* memory = owner->mutable_get();
    if (memory != nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      ranges_[static_cast<const char*>(memory)] = nbytes;
      bytes_.increase(nbytes);
      blocks_.increase(1);
    }
    return {memory, owner.release(), &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    at::HostStats stats;
    stats.allocations = stats.active_requests = blocks_;
    stats.allocated_bytes = stats.active_bytes = bytes_;
    return stats;
  }
  void reset_accumulated_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes_.reset_accumulated();
    blocks_.reset_accumulated();
  }
  void reset_peak_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes_.reset_peak();
    blocks_.reset_peak();
  }
  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto above = ranges_.upper_bound(static_cast<const char*>(pointer));
    if (above == ranges_.begin()) {
      return false;
    }
    --above;
    return static_cast<const char*>(pointer) < above->first + above->second;
  }
  static PinnedMemory& instance() {
    static auto* memory = new PinnedMemory();
    return *memory;
  }

 private:
  static void release(void* context) {
    auto* owner = static_cast<c10::DataPtr*>(context);
    if (owner->get() != nullptr) {
      PinnedMemory& self = instance();
      std::lock_guard<std::mutex> lock(self.mutex_);
      auto found = self.ranges_.find(static_cast<const char*>(owner->get()));
      self.bytes_.decrease(found->second);
      self.blocks_.decrease(1);
      self.ranges_.erase(found);
    }
    delete owner;
  }
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
  c10::CachingAllocator::Stat bytes_, blocks_;
};

// ---- hooks ----

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return core_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex core) const override {
    return core_used(checked_core(core));
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(core_count());
  }
  void setCurrentDevice(c10::DeviceIndex core) const override {
    exchange_core(core);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_core());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex core) const override {
    return static_cast<c10::DeviceIndex>(exchange_core(core));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex core) const override {
    return static_cast<c10::DeviceIndex>(exchange_core(core));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex core) const override {
    return default_generator(checked_core(core));
  }
  at::Generator getNewGenerator(c10::DeviceIndex core) const override {
    return at::make_generator<NeuronGenerator>(checked_core(core), at::detail::createCPUGenerator());
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const int core = core_of_pointer(pointer);
    TORCH_CHECK(core >= 0, "no emulated neuron core holds the address ", pointer);
    return device_of(core);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return PinnedMemory::instance().holds(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedMemory::instance();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

// ---- profiler ----

class ProfilerClock final : public torch::profiler::impl::ProfilerStubs {
 public:
  void record(c10::DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    const int64_t now = nanoseconds();
    if (device != nullptr) {
      *device = static_cast<c10::DeviceIndex>(current_core());
    }
    if (cpu_ns != nullptr) {
      *cpu_ns = now;
    }
    *event = std::make_shared<Event>(Event{now});
  }
  float elapsed(
      const torch::profiler::impl::ProfilerVoidEventStub* start,
      const torch::profiler::impl::ProfilerVoidEventStub* end) const override {
    // Microseconds, as torch's other stubs.
    return static_cast<float>(
        static_cast<double>(
            static_cast<const Event*>(end->get())->recorded_at - static_cast<const Event*>(start->get())->recorded_at) /
        1e3);
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override {
    return true;
  }
  void onEachDevice(std::function<void(int)> visit) const override {
    for (int core = 0; core < core_count(); ++core) {
      visit(core);
    }
  }
  void synchronize() const override {}
};

}  // namespace

const at::Generator& default_generator(int core) {
  return default_generators()[static_cast<size_t>(core)];
}

const at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<const NeuronGenerator*>(generator.unsafeGetGeneratorImpl())->host();
}

void register_runtime() {
  // Leaked on purpose: torch keeps the pointers for the life of the process.
  c10::impl::registerDeviceGuard(kNeuron, new Guard());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  at::setHostAllocator(kNeuron, &PinnedMemory::instance());
  torch::profiler::impl::registerPrivateUse1Methods(new ProfilerClock());
}

}  // namespace trellium
