#include "cores.h"

#include <c10/core/AutogradState.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>

// From headers that would include all of ATen: ATen/autocast_mode.h and ATen/native/Resize.h.
namespace at::autocast {
C10_IMPORT void set_autocast_dtype(at::DeviceType device_type, at::ScalarType dtype);
}
namespace at::native {
C10_IMPORT void resize_bytes_cpu(c10::StorageImpl* storage, size_t nbytes);
}

namespace trellium {
namespace {

struct Core {
  std::mutex mutex;
  Usage usage;
  std::atomic<bool> used{false};
  std::atomic<int64_t> held{0};  // usage.bytes.current, for those who only look
  Block live;  // the list's sentinel
  Core() {
    live.previous = live.next = &live;
  }
};

struct Process {
  int cores = 0;
  size_t bytes_per_core = 0;
  std::string core_name;
  std::string instance;
  c10::Allocator* host = nullptr;  // torch's CPU allocator, behind the gate
  std::atomic<bool> used{false};
  Core core[kMaxCores];
};

// Never destroyed: tensors may outlive every static.
Process& process() {
  static auto* instance = new Process();
  return *instance;
}

void after_fork_in_child() {
  if (process().used.load(std::memory_order_relaxed)) {
    bad_fork.store(true, std::memory_order_relaxed);
  }
}

std::string readable(size_t nbytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(nbytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  char text[64];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text;
}

std::string described(c10::IntArrayRef shape, c10::ScalarType dtype) {
  std::ostringstream text;
  text << c10::getDtypeNames(dtype).first << " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    text << (i ? ", " : "") << shape[i];
  }
  text << "]";
  return text.str();
}

// With the core's lock held.
void count(Core& core, int64_t freed, int64_t taken) {
  core.usage.bytes.decrease(static_cast<size_t>(freed));
  core.usage.bytes.increase(static_cast<size_t>(taken));
  core.held.store(core.usage.bytes.current, std::memory_order_relaxed);
}

void link(Core& core, Block* block) {
  block->next = core.live.next;
  block->previous = &core.live;
  core.live.next->previous = block;
  core.live.next = block;
}

void unlink(Block* block) {
  block->previous->next = block->next;
  block->next->previous = block->previous;
}

[[noreturn]] void out_of_memory(int index, size_t asked, const std::string& what) {
  Process& p = process();
  size_t in_use = 0;
  {
    std::lock_guard<std::mutex> lock(p.core[index].mutex);
    p.core[index].usage.ooms += 1;
    in_use = static_cast<size_t>(p.core[index].usage.bytes.current);
  }
  std::ostringstream text;
  text << "neuron:" << index << " out of memory. Tried to allocate " << readable(asked) << " (" << asked << " bytes" << what
       << "); " << readable(in_use) << " (" << in_use << " bytes) of " << readable(p.bytes_per_core) << " ("
       << p.bytes_per_core << " bytes) are in use on this emulated " << p.core_name << " of a " << p.instance << ".";
  const auto largest = largest_blocks(index, 5);
  if (!largest.empty()) {
    text << " Largest live tensors:";
    const char* separator = " ";
    for (const LiveBlock& block : largest) {
      text << separator << readable(block.nbytes);
      if (block.described) {
        text << " " << described(block.shape, block.dtype);
      }
      separator = "; ";
    }
    text << ".";
  }
  text << " A smaller batch or shorter rows, gradient checkpointing, bfloat16, or sharding over more cores need less.";
  c10::reportOutOfMemoryToProfiler(
      static_cast<int64_t>(asked), in_use, in_use, c10::Device(kNeuron, static_cast<c10::DeviceIndex>(index)));
  TORCH_CHECK_WITH(OutOfMemoryError, false, text.str());
}

[[noreturn]] void out_of_host_memory(int index, size_t asked) {
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      "neuron:",
      index,
      " out of memory. The core has room for ",
      readable(asked),
      " (",
      asked,
      " bytes), but the host that emulates it could not give them: emulated device memory is host memory. Use a smaller model or "
      "batch here, or a host with more memory.");
}

// Count `block` in, or refuse.
void admit(Block* block, c10::IntArrayRef sizes, bool has_shape) {
  Process& p = process();
  Core& core = p.core[block->core];
  if (C10_UNLIKELY(!core.used.load(std::memory_order_relaxed))) {
    core.used.store(true);
    p.used.store(true);
  }
  {
    std::lock_guard<std::mutex> lock(core.mutex);
    if (C10_LIKELY(static_cast<size_t>(core.usage.bytes.current) + block->nbytes <= p.bytes_per_core)) {
      count(core, 0, static_cast<int64_t>(block->nbytes));
      core.usage.blocks.increase(1);
      link(core, block);
      return;
    }
  }
  const size_t asked = block->nbytes;
  const int index = block->core;
  const std::string what = has_shape ? ", " + described(sizes, block->dtype) : "";
  delete block;
  out_of_memory(index, asked, what);
}

void report(void* pointer, int64_t nbytes, int index) {
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    const auto current = static_cast<size_t>(usage(index).bytes.current);
    c10::reportMemoryUsageToProfiler(
        pointer, nbytes, current, current, c10::Device(kNeuron, static_cast<c10::DeviceIndex>(index)));
  }
}

c10::DataPtr pointer_of(Block* block) {
  return {block->host->mutable_data(), block, &free_block, c10::Device(kNeuron, block->core)};
}

// Stands before torch's CPU allocator and looks only while a neuron operator runs on this thread: memory that operator asks of the host
// is memory the core would have to have. So a result too large for the core is refused before the host's memory is taken.
class HostGate final : public c10::Allocator {
 public:
  explicit HostGate(c10::Allocator* inner) : inner_(inner) {}
  c10::DataPtr allocate(size_t nbytes) override {
    const int core = this_thread().kernel_core;
    if (C10_LIKELY(core < 0)) {
      return inner_->allocate(nbytes);
    }
    check_room(core, nbytes);
    try {
      return inner_->allocate(nbytes);
    } catch (const c10::Error&) {
      out_of_host_memory(core, nbytes);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return inner_->raw_deleter();
  }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return inner_->is_simple_data_ptr(pointer);
  }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    inner_->copy_data(destination, source, count);
  }

 private:
  c10::Allocator* inner_;
};

class CoreAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return allocate_block(current_core(), nbytes, {}, c10::ScalarType::Undefined);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
  bool initialized() override {
    return core_count() > 0;
  }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Usage now = usage(checked_core(device));
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocation[all] = stats.active[all] = stats.segment[all] = now.blocks;
    stats.allocated_bytes[all] = stats.active_bytes[all] = stats.reserved_bytes[all] = stats.requested_bytes[all] = now.bytes;
    stats.num_device_alloc = now.blocks.allocated;
    stats.num_device_free = now.blocks.freed;
    stats.num_ooms = now.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset_accumulated(checked_core(device));
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak(checked_core(device));
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto current = static_cast<size_t>(usage(checked_core(device)).bytes.current);
    return {capacity() - current, capacity()};
  }
};

}  // namespace

std::atomic<bool> bad_fork{false};

void Block::describe(c10::IntArrayRef sizes, c10::ScalarType type) {
  dtype = type;
  if (sizes.size() <= kMaxDims) {
    ndim = static_cast<int8_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), shape);
  }
}

Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

void settle_autocast() {
  Thread& thread = this_thread();
  if (!thread.settled) {
    thread.settled = true;
    at::autocast::set_autocast_dtype(kNeuron, at::kBFloat16);
  }
}

void keep_autograd_on_this_thread() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

void configure(int cores, size_t bytes_per_core, std::string core_name, std::string instance) {
  Process& p = process();
  TORCH_CHECK(p.cores == 0, "the neuron device is configured once a process");
  TORCH_CHECK(cores > 0 && cores <= kMaxCores, "a process can have 1 to ", kMaxCores, " neuron cores, not ", cores);
  p.cores = cores;
  p.bytes_per_core = bytes_per_core;
  p.core_name = std::move(core_name);
  p.instance = std::move(instance);
  pthread_atfork(nullptr, nullptr, &after_fork_in_child);
  c10::SetAllocator(kNeuron, allocator());
  p.host = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new HostGate(p.host), /*priority=*/255);
}

int core_count() {
  return process().cores;
}

size_t capacity() {
  return process().bytes_per_core;
}

bool in_use() {
  return process().used.load(std::memory_order_relaxed);
}

bool in_bad_fork() {
  return bad_fork.load(std::memory_order_relaxed);
}

void refuse_fork() {
  TORCH_CHECK(
      false,
      "Cannot re-initialize neuron in forked subprocess. To use neuron with multiprocessing, you must use the 'spawn' start method: ",
      "multiprocessing.set_start_method('spawn'), or do not touch the device before forking.");
}

namespace {
// torchrun gives every process of a host its LOCAL_RANK, and accelerate takes `current_device()` for the rank's own without setting it.
int default_core() {
  static const int core = [] {
    const char* text = std::getenv("LOCAL_RANK");
    if (text == nullptr || *text == '\0') {
      return 0;
    }
    char* end = nullptr;
    const long rank = std::strtol(text, &end, 10);
    const int count = core_count();
    if (*end != '\0' || rank < 0 || count == 1) {
      return 0;  // one visible core (NEURON_RT_VISIBLE_CORES per rank) is everybody's core 0
    }
    TORCH_CHECK(
        rank < count,
        "Logical Neuron Core(s) not available: LOCAL_RANK is ",
        rank,
        ", and this host has ",
        count,
        " emulated cores. Start fewer processes, or choose a larger machine with TRELLIUM_NEURON_INSTANCE.");
    return static_cast<int>(rank);
  }();
  return core;
}
}  // namespace

int current_core() {
  Thread& thread = this_thread();
  if (C10_UNLIKELY(thread.core < 0)) {
    thread.core = static_cast<int8_t>(default_core());
  }
  return thread.core;
}

int checked_core(c10::DeviceIndex index) {
  if (index < 0) {
    return current_core();
  }
  TORCH_CHECK(
      index < core_count(), "Invalid device id: ", static_cast<int>(index), ". Valid range is 0 to ", core_count() - 1);
  return index;
}

int exchange_core(int core) {
  const int before = current_core();
  this_thread().core = static_cast<int8_t>(checked_core(static_cast<c10::DeviceIndex>(core)));
  return before;
}

void check_room(int index, size_t nbytes) {
  const Process& p = process();
  const auto held = static_cast<size_t>(p.core[index].held.load(std::memory_order_relaxed));
  if (C10_UNLIKELY(held + nbytes > p.bytes_per_core)) {
    out_of_memory(index, nbytes, ", inside an operator");
  }
}

c10::DataPtr allocate_block(int core, size_t nbytes, c10::IntArrayRef sizes, c10::ScalarType dtype) {
  if (C10_UNLIKELY(in_bad_fork())) {
    refuse_fork();
  }
  auto* block = new Block();
  block->core = static_cast<int8_t>(core);
  block->nbytes = nbytes;
  const bool has_shape = dtype != c10::ScalarType::Undefined;
  if (has_shape) {
    block->describe(sizes, dtype);
  }
  admit(block, sizes, has_shape);
  try {
    block->host = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        static_cast<int64_t>(nbytes),
        process().host->allocate(nbytes),
        c10::GetCPUAllocator(),
        /*resizable=*/true);
  } catch (const c10::Error&) {
    free_block(block);
    out_of_host_memory(core, nbytes);
  }
  report(block->host->mutable_data(), static_cast<int64_t>(nbytes), core);
  return pointer_of(block);
}

c10::Storage adopt_storage(int core, const c10::Storage& host, c10::IntArrayRef sizes, c10::ScalarType dtype) {
  auto* block = new Block();
  block->core = static_cast<int8_t>(core);
  block->nbytes = host.nbytes();
  block->describe(sizes, dtype);
  block->host = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(host.unsafeGetStorageImpl());
  admit(block, sizes, true);
  report(block->host->mutable_data(), static_cast<int64_t>(block->nbytes), core);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(block->nbytes), pointer_of(block), allocator(), /*resizable=*/true));
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  // In a forked child the lock may be held by a thread that does not exist there, and the counts mean nothing.
  if (C10_LIKELY(!in_bad_fork())) {
    Core& core = process().core[block->core];
    std::lock_guard<std::mutex> lock(core.mutex);
    count(core, static_cast<int64_t>(block->nbytes), 0);
    core.usage.blocks.decrease(1);
    unlink(block);
  }
  if (C10_LIKELY(block->host)) {
    report(block->host->mutable_data(), -static_cast<int64_t>(block->nbytes), block->core);
  }
  delete block;
}

Block* claim_foreign(c10::StorageImpl* storage) {
  const c10::Device device = storage->device();
  TORCH_CHECK(device.type() == kNeuron, "expected a neuron storage, got one on ", device);
  const size_t nbytes = storage->nbytes();
  auto* owner = new c10::DataPtr();
  auto* block = new Block();
  block->core = static_cast<int8_t>(checked_core(device.index()));
  block->nbytes = nbytes;
  admit(block, {}, false);
  *owner = storage->set_data_ptr(c10::DataPtr());
  void* memory = owner->mutable_get();
  block->host = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      static_cast<int64_t>(nbytes),
      c10::DataPtr(
          memory, owner, [](void* context) { delete static_cast<c10::DataPtr*>(context); }, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(),
      /*resizable=*/true);
  storage->set_data_ptr_noswap(pointer_of(block));
  return block;
}

void refresh_storage(c10::StorageImpl* storage, Block* block) {
  const size_t nbytes = block->host->nbytes();
  if (nbytes != block->nbytes) {
    Core& core = process().core[block->core];
    std::lock_guard<std::mutex> lock(core.mutex);
    count(core, static_cast<int64_t>(block->nbytes), static_cast<int64_t>(nbytes));
    block->nbytes = nbytes;
    block->ndim = -1;
    storage->set_nbytes(nbytes);
  }
  if (storage->data_ptr().get() != block->host->data_ptr().get()) {
    c10::DataPtr before = storage->set_data_ptr(pointer_of(block));
    before.release_context();
  }
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  Block* block = block_of(storage);
  if (nbytes > block->nbytes) {
    check_room(block->core, nbytes - block->nbytes);
  }
  at::native::resize_bytes_cpu(block->host.get(), nbytes);
  refresh_storage(storage, block);
}

c10::DeviceAllocator* allocator() {
  static auto* instance = new CoreAllocator();
  return instance;
}

int core_of_pointer(const void* pointer) {
  Process& p = process();
  for (int index = 0; index < p.cores; ++index) {
    Core& core = p.core[index];
    std::lock_guard<std::mutex> lock(core.mutex);
    for (Block* block = core.live.next; block != &core.live; block = block->next) {
      if (!block->host) {
        continue;
      }
      const auto* start = static_cast<const char*>(block->host->data());
      if (pointer >= start && pointer < start + block->nbytes) {
        return index;
      }
    }
  }
  return -1;
}

Usage usage(int index) {
  Core& core = process().core[index];
  std::lock_guard<std::mutex> lock(core.mutex);
  return core.usage;
}

bool core_used(int index) {
  return process().core[index].used.load(std::memory_order_relaxed);
}

void reset_peak(int index) {
  Core& core = process().core[index];
  std::lock_guard<std::mutex> lock(core.mutex);
  core.usage.bytes.reset_peak();
  core.usage.blocks.reset_peak();
}

void reset_accumulated(int index) {
  Core& core = process().core[index];
  std::lock_guard<std::mutex> lock(core.mutex);
  core.usage.bytes.reset_accumulated();
  core.usage.blocks.reset_accumulated();
  core.usage.ooms = 0;
}

std::vector<LiveBlock> largest_blocks(int index, size_t limit) {
  Core& core = process().core[index];
  std::vector<LiveBlock> blocks;
  std::lock_guard<std::mutex> lock(core.mutex);
  std::vector<const Block*> live;
  for (Block* block = core.live.next; block != &core.live; block = block->next) {
    if (block->nbytes > 0) {
      live.push_back(block);
    }
  }
  limit = std::min(limit, live.size());
  std::partial_sort(live.begin(), live.begin() + static_cast<std::ptrdiff_t>(limit), live.end(), [](auto* a, auto* b) {
    return a->nbytes > b->nbytes;
  });
  for (size_t i = 0; i < limit; ++i) {
    const Block* block = live[i];
    const bool known = block->ndim >= 0;
    blocks.push_back(
        {block->nbytes,
         known ? std::vector<int64_t>(block->shape, block->shape + block->ndim) : std::vector<int64_t>(),
         block->dtype,
         known});
  }
  return blocks;
}

}  // namespace trellium
