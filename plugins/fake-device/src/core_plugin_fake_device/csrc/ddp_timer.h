// DistributedDataParallel's statistics: how long forward, backward and communication take.
//
// A vendor records events on its stream, as kernels run asynchronously; without a timer DDP warns
// and measures nothing. The fake computes at once, so the host's clock is right.
#pragma once

#include "runtime.h"

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace fake {

class DdpTimer final : public c10d::Timer {
 public:
  explicit DdpTimer(Device) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t begun = getTimeRef(start);
    const int64_t ended = getTimeRef(end);
    if (begun == c10d::kUnsetTime || ended < begun) {
      return std::nullopt;
    }
    return ended - begun;
  }
};

} // namespace fake

// The registry's macro writes to names of its own namespace.
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, fake::DdpTimer)
} // namespace c10d
