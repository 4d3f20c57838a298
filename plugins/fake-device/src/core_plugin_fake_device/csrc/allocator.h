// Device memory, with statistics and a capacity for each device.
//
// A vendor puts its caching allocator here: cudaMalloc's counterpart below, and above it blocks
// that are kept for reuse. A DeviceAllocator, rather than a plain Allocator, is what makes
// torch.accelerator's memory functions work.
#pragma once

#include "address_map.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace fake {

struct Memory {
  std::atomic<int64_t> current{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> frees{0};
  std::atomic<int64_t> capacity{0}; // in bytes; 0 is no limit
};

inline std::array<Memory, kMaxDevices> memories;

inline int64_t host_memory() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

inline void take(DeviceIndex index, int64_t bytes) {
  Memory& memory = memories[index];
  const int64_t used = memory.current.fetch_add(bytes) + bytes;
  const int64_t capacity = memory.capacity;
  if (capacity > 0 && used > capacity) {
    memory.current -= bytes;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "fake: device ", int(index),
        " is out of memory: tried to allocate ", bytes, " bytes, ",
        std::max<int64_t>(capacity - used + bytes, 0), " of ", capacity, " are free");
  }
  ++memory.allocations;
  int64_t peak = memory.peak;
  while (used > peak && !memory.peak.compare_exchange_weak(peak, used)) {
  }
}

inline void give_back(DeviceIndex index, int64_t bytes) {
  memories[index].current -= bytes;
  ++memories[index].frees;
}

struct Block {
  void* data;
  int64_t bytes;
  DeviceIndex index;
};

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  device_blocks.remove(block->data);
  give_back(block->index, block->bytes);
  std::free(block->data);
  delete block;
}

struct Allocator final : c10::DeviceAllocator {
  // On the current device: torch sets it before it asks for memory.
  c10::DataPtr allocate(size_t bytes) override {
    initialize();
    const DeviceIndex index = current;
    if (bytes == 0) {
      return {nullptr, Device(kDeviceType, index)};
    }
    take(index, static_cast<int64_t>(bytes));
    void* data = nullptr;
    if (posix_memalign(&data, 64, bytes) != 0) {
      give_back(index, static_cast<int64_t>(bytes));
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "fake: the host is out of memory: tried to allocate ", bytes,
          " bytes");
    }
    device_blocks.add(data, bytes, index);
    auto* block = new Block{data, static_cast<int64_t>(bytes), index};
    return {data, block, &free_block, Device(kDeviceType, index)};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }

  bool initialized() override {
    return initializations > 0;
  }

  // The fake keeps no blocks for reuse.
  void emptyCache(c10::MempoolId_t) override {}

  // Nothing runs asynchronously, so no stream can still use memory that is freed.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    require(kMemoryStatistics);
    const Memory& memory = memories[index_or_current(index)];
    c10::CachingAllocator::Stat bytes;
    bytes.current = memory.current;
    bytes.peak = memory.peak;
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[all] = stats.reserved_bytes[all] = bytes;
    stats.active_bytes[all] = stats.requested_bytes[all] = bytes;
    stats.num_device_alloc = memory.allocations;
    stats.num_device_free = memory.frees;
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex index) override {
    require(kMemoryStatistics);
    Memory& memory = memories[index_or_current(index)];
    memory.allocations = memory.frees = 0;
  }

  void resetPeakStats(DeviceIndex index) override {
    require(kMemoryStatistics);
    Memory& memory = memories[index_or_current(index)];
    memory.peak = memory.current.load();
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    const Memory& memory = memories[index_or_current(index)];
    const int64_t total = memory.capacity > 0 ? memory.capacity.load() : host_memory();
    return {std::max<int64_t>(total - memory.current, 0), total};
  }
};

inline Allocator allocator;
REGISTER_ALLOCATOR(kDeviceType, &allocator)

} // namespace fake
