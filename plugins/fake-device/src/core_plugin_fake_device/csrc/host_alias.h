// CPU tensors over device memory, without a copy, for as long as one operator runs.
//
// A vendor has nothing of this kind: its kernels run where the memory is. The fake's memory is the
// host's, so CPU kernels can compute in it. Two tensors that share a storage share it as CPU
// tensors too, so that kernels still see which of them overlap.
#pragma once

#include "allocator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

namespace fake {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

inline at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype, Device device) {
  require_dtype(dtype);
  const c10::DeviceGuard guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, keys, dtype);
}

class HostAliases {
 public:
  // The CPU tensor over a device tensor; others are returned as they are.
  at::Tensor alias(const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided, "fake: ", tensor.layout(), " tensors are not supported");
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
        tensor.dtype());
    copy_geometry(tensor, alias);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    return alias;
  }

  // What a kernel returned, on the device: a view if it shares memory with an alias, else a copy.
  at::Tensor to_device(const at::Tensor& result, Device device) const {
    if (!result.defined() || !result.is_cpu()) {
      return result;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == c10::kStrided, "fake: ", result.layout(), " tensors are not supported");
    for (const auto& [on_device, on_host] : storages_) {
      if (on_host.is_alias_of(result.storage())) {
        return view_of(on_device, result);
      }
    }
    return copy_of(result, device);
  }

 private:
  c10::Storage host_storage(const c10::Storage& storage) {
    for (const auto& [on_device, on_host] : storages_) {
      if (on_device.is_alias_of(storage)) {
        return on_host;
      }
    }
    auto* kept = new c10::Storage(storage);
    c10::DataPtr data(
        storage.mutable_data(), kept, [](void* s) { delete static_cast<c10::Storage*>(s); },
        Device(c10::kCPU));
    c10::Storage on_host(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
        /*allocator=*/nullptr, /*resizable=*/false);
    storages_.emplace_back(storage, on_host);
    return on_host;
  }

  static void copy_geometry(const at::Tensor& from, const at::Tensor& to) {
    to.unsafeGetTensorImpl()->set_sizes_and_strides(
        from.sizes(), from.strides(), from.storage_offset());
  }

  static at::Tensor view_of(const c10::Storage& storage, const at::Tensor& result) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    copy_geometry(result, view);
    view._set_conj(result.is_conj());
    view._set_neg(result.is_neg());
    return view;
  }

  static at::Tensor copy_of(const at::Tensor& result, Device device) {
    const bool dense = result.is_non_overlapping_and_dense();
    const auto strides =
        dense ? result.strides().vec() : at::detail::defaultStrides(result.sizes());
    auto copy = empty_strided(result.sizes(), strides, result.scalar_type(), device);
    HostAliases().alias(copy).copy_(result);
    return copy;
  }

  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

} // namespace fake
