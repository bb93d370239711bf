// The emulated cores: how many there are, what each holds, and which one a thread works on.
//
// A neuron storage owns nothing but a `Block`, and a block owns a host (CPU) storage. Bytes are counted against the core when the block is
// made and given back when it dies, so what a core holds is exact, to the byte, and a tensor too large is refused *before* host memory
// is taken. Live blocks hang in one intrusive list a core; it is walked only to explain an error or to answer a user's question.
// Cost: one uncontended lock when a storage is made and one when it dies, about 40 ns each.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace trellium {

inline constexpr c10::DeviceType kNeuron = c10::DeviceType::PrivateUse1;
// A device index is a signed byte, so torch can number no more than this in one process.
inline constexpr int kMaxCores = 127;

// What a neuron DataPtr's context points to.
struct Block {
  static constexpr int kMaxDims = 8;  // dimensions remembered for messages; a tensor may have more
  c10::intrusive_ptr<c10::StorageImpl> host;
  size_t nbytes = 0;
  Block* previous = nullptr;
  Block* next = nullptr;
  int64_t shape[kMaxDims];
  int8_t core = 0;
  int8_t ndim = -1;  // -1: never described by a tensor
  c10::ScalarType dtype = c10::ScalarType::Byte;

  void describe(c10::IntArrayRef sizes, c10::ScalarType type);
};

// What one thread works on. Plain data, zero-cost to reach.
struct Thread {
  int8_t core = -1;         // current device; -1: not chosen yet, the process's default
  int8_t kernel_core = -1;  // the core whose operator is running on the host right now; -1: none
  bool settled = false;     // autocast's default has been chosen, here or by the user
  std::array<c10::StreamId, kMaxCores> stream{};
};
Thread& this_thread();

// Makes autocast mean bfloat16 on this thread, once: torch keeps the type per thread, and every thread begins with float16. Runs before
// anything asks for the type or sets it (amp.py, and autocast's kernels for threads that are not Python's), so what a thread sets stays.
void settle_autocast();

// Makes the autograd engine run neuron nodes on the thread that called backward. Runs whenever torch asks for a core's stream, which the
// engine does for the root, for every neuron node and for every gradient that reaches one, before it chooses a thread for it. Every neuron
// kernel is synchronous host work, so an engine thread a device would only move it to cold caches and a second OpenMP pool (measured: 1.2
// to 1.7 times the step time); and the engine has such threads only if the device was in use at the process's first backward.
void keep_autograd_on_this_thread();

// ---- the process ----
void configure(int cores, size_t bytes_per_core, std::string core_name, std::string instance);
int core_count();
size_t capacity();
bool in_use();              // a neuron storage has been made in this process
bool core_used(int core);   // ... on this core
bool in_bad_fork();         // this process was forked from one where that was so
[[noreturn]] void refuse_fork();
extern std::atomic<bool> bad_fork;

int current_core();            // resolves the default: LOCAL_RANK, else 0
int exchange_core(int core);   // sets, returns the one before; checks the range
int checked_core(c10::DeviceIndex index);  // -1 means current; refuses what is not there

// ---- memory ----
// Raises torch.OutOfMemoryError if `core` cannot take `nbytes` more. Counts nothing.
void check_room(int core, size_t nbytes);
c10::DataPtr allocate_block(int core, size_t nbytes, c10::IntArrayRef sizes, c10::ScalarType dtype);
// Give a host storage to a core, without a copy.
c10::Storage adopt_storage(int core, const c10::Storage& host, c10::IntArrayRef sizes, c10::ScalarType dtype);
void free_block(void* context);
// The block of a neuron storage; a storage that came from elsewhere (from_blob, a legacy pickle) is adopted first.
Block* claim_foreign(c10::StorageImpl* storage);
inline Block* block_of(c10::StorageImpl* storage) {
  const c10::DataPtr& pointer = storage->data_ptr();
  if (C10_LIKELY(pointer.get_deleter() == &free_block)) {
    return static_cast<Block*>(pointer.get_context());
  }
  return claim_foreign(storage);
}
// After a host kernel may have grown or replaced the memory under `storage`.
void refresh_storage(c10::StorageImpl* storage, Block* block);
void resize_storage(c10::StorageImpl* storage, size_t nbytes);
c10::DeviceAllocator* allocator();
// The core that holds an address, or -1.
int core_of_pointer(const void* pointer);

struct Usage {
  c10::CachingAllocator::Stat bytes, blocks;
  int64_t ooms = 0;
};
Usage usage(int core);
void reset_peak(int core);
void reset_accumulated(int core);
struct LiveBlock {
  size_t nbytes;
  std::vector<int64_t> shape;
  c10::ScalarType dtype;
  bool described;
};
// The `limit` largest live blocks of a core, largest first.
std::vector<LiveBlock> largest_blocks(int core, size_t limit);

}  // namespace trellium
