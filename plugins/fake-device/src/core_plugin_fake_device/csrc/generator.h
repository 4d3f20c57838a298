// Random numbers: a generator for each device, independent of the CPU's.
//
// A vendor keeps the seed and offset of its counter-based generator here. The fake computes on the
// host, so its generator owns a CPU generator of its own, which kernels draw from.
#pragma once

#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace fake {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : c10::GeneratorImpl(
            Device(kDeviceType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {}

  // Kernels hold the same lock for as long as they draw.
  void set_current_seed(uint64_t seed) override {
    const auto lock = locked();
    host.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    const auto lock = locked();
    return host.current_seed();
  }
  uint64_t seed() override {
    const auto lock = locked();
    return host.seed();
  }
  void set_offset(uint64_t offset) override {
    const auto lock = locked();
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    const auto lock = locked();
    return host.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto lock = locked();
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const auto lock = locked();
    return host.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator host;

 private:
  std::unique_lock<std::mutex> locked() const {
    return std::unique_lock(host.unsafeGetGeneratorImpl()->mutex_);
  }

  Generator* clone_impl() const override {
    const auto lock = locked();
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

// Seeding opens no hardware: a run is seeded before the device is used.
inline const at::Generator& default_generator(DeviceIndex index) {
  static const auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; ++i) {
      all->push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i)));
    }
    return all;
  }();
  return (*generators)[index_or_current(index)];
}

inline at::Generator new_generator(DeviceIndex index) {
  require(kGenerator);
  return at::make_generator<Generator>(index_or_current(index));
}

// What kernels draw from: the generator that was passed, or the device's.
inline at::Generator host_generator(const std::optional<at::Generator>& passed, DeviceIndex index) {
  const bool given = passed && passed->defined();
  const at::Generator& chosen = given ? *passed : default_generator(index);
  TORCH_CHECK(
      chosen.device().type() == kDeviceType,
      "Expected a 'fake' device type for generator but found '", chosen.device().type(), "'");
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->host;
}

} // namespace fake
