// Which memory is the device's, and which is pinned: looked up by any address within a block.
//
// A vendor asks its driver and has nothing of this kind; the fake remembers its blocks.
#pragma once

#include "runtime.h"

#include <map>
#include <optional>

namespace fake {

// A child that is forked while another thread holds the mutex could free nothing. So a fork takes
// it first, and parent and child both release it.
inline std::mutex address_mutex;
inline const int address_mutex_survives_forks = pthread_atfork(
    [] { address_mutex.lock(); }, [] { address_mutex.unlock(); }, [] { address_mutex.unlock(); });

class AddressMap {
 public:
  void add(const void* start, size_t bytes, DeviceIndex index) {
    const std::lock_guard<std::mutex> lock(address_mutex);
    blocks_[static_cast<const char*>(start)] = {bytes, index};
  }

  void remove(const void* start) {
    const std::lock_guard<std::mutex> lock(address_mutex);
    blocks_.erase(static_cast<const char*>(start));
  }

  // The index that the block came with; nothing if the address is in no block.
  std::optional<DeviceIndex> find(const void* address) const {
    const std::lock_guard<std::mutex> lock(address_mutex);
    auto next = blocks_.upper_bound(static_cast<const char*>(address));
    if (next == blocks_.begin()) {
      return std::nullopt;
    }
    const auto& [start, block] = *--next;
    return address < start + block.bytes ? std::optional(block.index) : std::nullopt;
  }

 private:
  struct Block {
    size_t bytes;
    DeviceIndex index;
  };
  std::map<const char*, Block> blocks_;
};

// Never destroyed: tensors may outlive the library's static objects.
inline AddressMap& device_blocks = *new AddressMap;
inline AddressMap& pinned_blocks = *new AddressMap;

} // namespace fake
