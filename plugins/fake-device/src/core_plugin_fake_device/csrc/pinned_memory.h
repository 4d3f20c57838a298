// Host memory that the device can read by itself, so that copies need not wait.
//
// A vendor calls its driver's host allocation here and asks it which pointers are pinned. For the
// fake, it is ordinary memory that is remembered.
#pragma once

#include "runtime.h"

#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace fake {

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    require(kPinnedMemory);
    initialize();
    void* data = nullptr;
    TORCH_CHECK(
        posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0,
        "fake: cannot pin ", bytes, " bytes of host memory");
    const std::lock_guard<std::mutex> lock(mutex());
    blocks()[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &free_block, Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }

  // Also for a pointer into the middle of a block.
  static bool contains(const void* pointer) {
    const auto* address = static_cast<const char*>(pointer);
    const std::lock_guard<std::mutex> lock(mutex());
    auto next = blocks().upper_bound(address);
    if (next == blocks().begin()) {
      return false;
    }
    const auto& [start, bytes] = *--next;
    return address < start + bytes;
  }

 private:
  static void free_block(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(static_cast<const char*>(data));
    }
    std::free(data);
  }

  // Never destroyed: tensors may outlive the library's static objects.
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  static std::map<const char*, size_t>& blocks() {
    static auto* blocks = new std::map<const char*, size_t>;
    return *blocks;
  }
};

inline PinnedMemory pinned_memory;

} // namespace fake
