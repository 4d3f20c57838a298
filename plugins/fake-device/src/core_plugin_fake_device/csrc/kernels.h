// The operators that a device must bring itself, and their registration with torch.
//
// A vendor registers its whole set of kernels here. This is the least that torch asks for; all
// else is left to the fallback. Composite operators (to.dtype and its like) must not be registered:
// torch derives them, with their gradients, from these.
#pragma once

#include "fallback.h"
#include "recurrent.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

namespace fake {

inline at::Tensor empty_memory_format(
    at::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> memory_format) {
  const auto type = c10::dtype_or_default(dtype);
  require_dtype(type);
  TORCH_CHECK_NOT_IMPLEMENTED(
      c10::layout_or_default(layout) == c10::kStrided, "fake: ", *layout,
      " tensors are not supported");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "fake: only CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &allocator, keys, type, memory_format);
}

inline at::Tensor empty_strided_kernel(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      c10::layout_or_default(layout) == c10::kStrided, "fake: ", *layout,
      " tensors are not supported");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "fake: only CPU tensors can be pinned");
  const auto type = c10::dtype_or_default(dtype);
  return empty_strided(sizes, strides, type, c10::device_or_default(device));
}

// Operators that only change sizes, strides or the storage: torch's CPU kernels do so for a tensor
// of any device. resize_ may ask the tensor's allocator for memory, which takes it from the current
// device.
inline void change_geometry(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& self = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  const c10::DeviceGuard guard(self.device());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (stack->back().isTensor()) {
    require_dtype(stack->back().toTensor().scalar_type());
  }
}

// Nothing runs asynchronously, so no stream can still use memory that is freed.
inline void record_stream(at::Tensor&, c10::Stream) {}

inline void fused_optimizer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  require(kFusedOptimizers);
  fallback(op, stack);
}

// The one operator that draws random numbers without taking a generator: the CPU's kernel would
// draw from the CPU's.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  auto kept = at::empty(input.sizes(), input.options().dtype(c10::kBool));
  if (!train.value_or(true)) {
    return {input.clone(), kept.fill_(true)};
  }
  kept.bernoulli_(1 - p);
  return {input * kept * (p == 1 ? 0 : 1 / (1 - p)), kept};
}

// torch never asks a fallback for convolutions, but for these two.
inline at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  require(kConvolution);
  require_device(weight, input.device(), "weight", "aten::convolution");
  require_device(bias.value_or(at::Tensor()), input.device(), "bias", "aten::convolution");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  HostAliases aliases;
  const auto host_bias = given(bias) ? MaybeTensor(aliases.alias(*bias)) : std::nullopt;
  const auto result = at::convolution(
      aliases.alias(input), aliases.alias(weight), host_bias, stride, padding, dilation,
      transposed, output_padding, groups);
  return aliases.to_device(result, input.device());
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  require(kConvolution);
  const auto device = input.device();
  require_device(grad_output, device, "grad_output", "aten::convolution_backward");
  require_device(weight, device, "weight", "aten::convolution_backward");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  HostAliases aliases;
  const std::vector<int64_t> bias_sizes{grad_output.size(1)};
  const auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      aliases.alias(grad_output), aliases.alias(input), aliases.alias(weight),
      at::IntArrayRef(bias_sizes), stride, padding, dilation, transposed, output_padding, groups,
      wanted);
  return {
      aliases.to_device(grad_input, device), aliases.to_device(grad_weight, device),
      aliases.to_device(grad_bias, device)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided_kernel);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  for (const char* name :
       {"as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
        "resize_", "is_set_to", "set_", "set_.source_Storage",
        "set_.source_Storage_storage_offset", "set_.source_Tensor"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&change_geometry>());
  }
  // torch computes these without asking for a kernel, and by a table that has none for the device.
  for (const char* name : {"kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  for (const char* name :
       {"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr",
        "_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fused_optimizer>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&unsupported_layout>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&unsupported_layout>());
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&unsupported_layout>());
}

// Conjugates and negatives are bits on a tensor, which torch resolves by a copy. Without these two
// lines that copy would be resolved by a copy again, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace fake
