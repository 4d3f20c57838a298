// Copies between host and device, and on and between devices.
//
// A vendor calls its driver's copy functions here, one for each leg. A copy from the host to a
// device is the work of the *target* device's implementation: nothing else knows that memory. With
// non_blocking, and pinned memory on the host's side, it may be queued on the current stream and
// return; the fake always copies at once, which is right for either.
#pragma once

#include "host_alias.h"

#include <ATen/native/Resize.h>

namespace fake {

inline void host_to_device(const at::Tensor& source, const at::Tensor& target) {
  HostAliases().alias(target).copy_(source);
}

inline void device_to_host(const at::Tensor& source, const at::Tensor& target) {
  target.copy_(HostAliases().alias(source));
}

// The same device or another: the host reaches both. One set of aliases, so that a source that
// overlaps its target is refused as on the CPU.
inline void device_to_device(const at::Tensor& source, const at::Tensor& target) {
  HostAliases aliases;
  aliases.alias(target).copy_(aliases.alias(source));
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  initialize();
  TORCH_CHECK(
      (source.is_cpu() || on_device(source)) && (target.is_cpu() || on_device(target)),
      "fake: cannot copy from ", source.device(), " to ", target.device(), "; go through the CPU");
  if (source.is_cpu()) {
    host_to_device(source, target);
  } else if (target.is_cpu()) {
    device_to_host(source, target);
  } else {
    device_to_device(source, target);
  }
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_output(target, source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

// item(), bool(), tolist(): one element, read back.
inline at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  initialize();
  return HostAliases().alias(tensor).item();
}

} // namespace fake
