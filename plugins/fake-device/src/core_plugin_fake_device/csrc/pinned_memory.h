// Host memory that the device can read by itself, so that copies need not wait.
//
// A vendor calls its driver's host allocation here and asks it which pointers are pinned. For the
// fake, it is ordinary memory that is remembered.
#pragma once

#include "address_map.h"

#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>

namespace fake {

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    require(kPinnedMemory);
    initialize();
    void* data = nullptr;
    TORCH_CHECK(
        posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0,
        "fake: cannot pin ", bytes, " bytes of host memory");
    pinned_blocks.add(data, std::max<size_t>(bytes, 1), current);
    return {data, data, &free_block, Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }

 private:
  static void free_block(void* data) {
    pinned_blocks.remove(data);
    std::free(data);
  }
};

inline PinnedMemory pinned_memory;

} // namespace fake
