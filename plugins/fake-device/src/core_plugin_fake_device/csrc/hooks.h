// What torch asks of an accelerator outside of tensors: torch.accelerator, generators, pinning.
//
// A vendor answers each of these by its driver. None but init() may open the hardware.
#pragma once

#include "allocator.h"
#include "generator.h"
#include "pinned_memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>

namespace fake {

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {
    initialize();
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return initializations > 0;
  }

  DeviceIndex deviceCount() const override {
    return device_count();
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    exchange_device(index);
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return exchange_device(index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchange_device(index);
  }

  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return new_generator(index);
  }

  bool isPinnedPtr(const void* pointer) const override {
    return pinned_blocks.find(pointer).has_value();
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    require(kPinnedMemory);
    return &pinned_memory;
  }
  Device getDeviceFromPtr(void* pointer) const override {
    const auto index = device_blocks.find(pointer);
    TORCH_CHECK(index, "fake: ", pointer, " points to no memory of a device");
    return Device(kDeviceType, *index);
  }

  // UntypedStorage.resize_: 0 frees the memory, which FSDP2 lives by.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    require(kStorageResize);
    const c10::DeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr data = allocator.allocate(bytes);
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept > 0) {
      std::memcpy(data.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

inline const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace fake
