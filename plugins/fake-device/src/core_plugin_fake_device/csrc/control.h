// What Python calls: torch.ops.fake_device.<name>, used by runtime.py alone.
//
// Operators instead of a Python module in C++: the library needs no Python headers, and one build
// serves every Python version.
#pragma once

#include "allocator.h"
#include "generator.h"
#include "host_alias.h"

#include <torch/library.h>

namespace fake {

inline std::vector<int64_t> memory_stats(int64_t index) {
  require(kMemoryStatistics);
  check_index(index);
  const Memory& memory = memories[index];
  return {memory.current, memory.peak, memory.allocations, memory.frees};
}

inline void reset_peak_memory(int64_t index) {
  check_index(index);
  allocator.resetPeakStats(static_cast<DeviceIndex>(index));
}

inline void set_capacity(int64_t bytes) {
  TORCH_CHECK(bytes >= 0, "fake: the capacity must not be negative, got ", bytes);
  for (auto& memory : memories) {
    memory.capacity = bytes;
  }
}

inline const at::Generator& checked_generator(int64_t index) {
  check_index(index);
  return default_generator(static_cast<DeviceIndex>(index));
}

inline at::Tensor get_rng_state(int64_t index) {
  return at::Tensor(checked_generator(index).unsafeGetGeneratorImpl()->get_state());
}

inline void set_rng_state(int64_t index, const at::Tensor& state) {
  checked_generator(index).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}

inline void seed(int64_t index, int64_t seed) {
  checked_generator(index).unsafeGetGeneratorImpl()->set_current_seed(static_cast<uint64_t>(seed));
}

inline at::Tensor host_alias(const at::Tensor& tensor) {
  initialize();
  return HostAliases().alias(tensor);
}

TORCH_LIBRARY(fake_device, library) {
  library.def("initialize", initialize);
  library.def("initializations", []() -> int64_t { return initializations; });
  library.def("is_in_bad_fork", []() -> bool { return in_bad_fork; });

  library.def("set_device_count", set_device_count);
  library.def("set_capacity", set_capacity);
  library.def("switch_off", [](std::vector<std::string> names) { switch_off(names); });
  library.def("require", [](std::string name) { require(find_capability(name)); });

  library.def("device_count", []() -> int64_t { return device_count(); });
  library.def("current_device", []() -> int64_t { return current; });
  library.def("exchange_device", [](int64_t index) -> int64_t {
    check_index(index);
    return exchange_device(static_cast<DeviceIndex>(index));
  });

  library.def("memory_stats", memory_stats);
  library.def("reset_peak_memory", reset_peak_memory);

  library.def("get_rng_state", get_rng_state);
  library.def("set_rng_state", set_rng_state);
  library.def("seed", seed);

  library.def("host_alias(Tensor tensor) -> Tensor", host_alias);
}

} // namespace fake
