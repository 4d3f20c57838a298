// The driver: which devices there are, which one a thread uses, and when the hardware is opened.
//
// A vendor calls its driver here. The fake has none: a "device" is a part of the host's memory,
// its settings are plain numbers, and opening the hardware adds one to a counter.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace fake {

using c10::Device;
using c10::DeviceIndex;

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

// ---- Capabilities: what the device can do beyond what every device must. ------------------------
// A vendor declares its own in Python and needs nothing of this. The fake can have each of them
// switched off, to imitate a lesser device; then the operation fails with the capability's name.

enum Capability {
  kMultipleDevices,
  kGenerator,
  kPinnedMemory,
  kStreams,
  kEvents,
  kEventTiming,
  kMemoryStatistics,
  kStorageResize,
  kAverageInCollectives,
  kCpuOffload,
  kFloat64,
  kComplexNumbers,
  kConvolution,
  kRecurrentLayers,
  kFusedOptimizers,
  kProfiler,
  kCapabilities,
};

struct CapabilityText {
  std::string_view name;
  std::string_view subject;
};

constexpr std::array<CapabilityText, kCapabilities> kCapabilityTexts{{
    {"multiple_devices", "further devices are"},
    {"generator", "generators are"},
    {"pinned_memory", "pinned memory is"},
    {"streams", "streams are"},
    {"events", "events are"},
    {"event_timing", "event timing is"},
    {"memory_statistics", "memory statistics are"},
    {"storage_resize", "resizing of storages is"},
    {"average_in_collectives", "averages in collectives are"},
    {"cpu_offload", "CPU offload is"},
    {"float64", "float64 is"},
    {"complex_numbers", "complex numbers are"},
    {"convolution", "convolution is"},
    {"recurrent_layers", "recurrent layers are"},
    {"fused_optimizers", "fused optimizers are"},
    {"profiler", "the profiler is"},
}};

inline std::array<std::atomic<bool>, kCapabilities> switched_off{};

inline bool has(Capability capability) {
  return !switched_off[capability];
}

inline void require(Capability capability) {
  const auto& text = kCapabilityTexts[capability];
  TORCH_CHECK(
      has(capability), "fake: ", text.subject, " switched off (capability ", text.name, ")");
}

inline Capability find_capability(std::string_view name) {
  int found = 0;
  while (found < kCapabilities && kCapabilityTexts[found].name != name) {
    ++found;
  }
  TORCH_CHECK(found < kCapabilities, "fake: there is no capability ", name);
  return static_cast<Capability>(found);
}

inline void require_dtype(c10::ScalarType dtype) {
  if (c10::isComplexType(dtype)) {
    require(kComplexNumbers);
  }
  if (c10::toRealValueType(dtype) == c10::ScalarType::Double) {
    require(kFloat64);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::isQIntType(dtype), "fake: quantized tensors are not supported");
}

// ---- Opening the hardware: at first use, once, and never in a forked child. ---------------------

inline std::once_flag opened;
inline std::atomic<int> initializations{0};
inline std::atomic<bool> in_bad_fork{false};

inline void initialize() {
  TORCH_CHECK(
      !in_bad_fork,
      "fake: the device was used before this process was forked, and cannot be used in the "
      "child; start processes with the method 'spawn' or 'forkserver'");
  std::call_once(opened, [] {
    ++initializations;
    pthread_atfork(nullptr, nullptr, [] { in_bad_fork = true; });
  });
}

// ---- Devices: their number is known without opening the hardware. -------------------------------

inline std::atomic<int> configured_devices{2};
inline thread_local DeviceIndex current = 0;

inline DeviceIndex device_count() {
  return static_cast<DeviceIndex>(has(kMultipleDevices) ? configured_devices.load() : 1);
}

inline void set_device_count(int64_t count) {
  TORCH_CHECK(
      1 <= count && count <= kMaxDevices,
      "fake: the number of devices must be from 1 to ", kMaxDevices, ", got ", count);
  TORCH_CHECK(
      count == configured_devices || initializations == 0,
      "fake: the number of devices cannot change after the device was used");
  configured_devices = static_cast<int>(count);
}

// Those named, and no others.
inline void switch_off(const std::vector<std::string>& names) {
  std::array<bool, kCapabilities> off{};
  for (const auto& name : names) {
    off[find_capability(name)] = true;
  }
  TORCH_CHECK(
      off[kMultipleDevices] == switched_off[kMultipleDevices] || initializations == 0,
      "fake: the number of devices cannot change after the device was used (capability "
      "multiple_devices)");
  for (int i = 0; i < kCapabilities; ++i) {
    switched_off[i] = off[i];
  }
}

inline void check_index(int64_t index) {
  if (0 <= index && index < device_count()) {
    return;
  }
  if (0 <= index && index < configured_devices) {
    require(kMultipleDevices);
  }
  TORCH_CHECK_INDEX(
      false, "fake: there is no device ", index, "; the indices are 0 to ", device_count() - 1);
}

// -1, as in torch.device("fake"), means the current device.
inline DeviceIndex index_or_current(DeviceIndex index) {
  if (index < 0) {
    return current;
  }
  check_index(index);
  return index;
}

inline DeviceIndex exchange_device(DeviceIndex index) {
  check_index(index);
  return std::exchange(current, index);
}

} // namespace fake
