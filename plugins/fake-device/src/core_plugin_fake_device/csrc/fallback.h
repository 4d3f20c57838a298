// Every operator that has no kernel of its own: run the CPU's on aliases of the arguments.
//
// A vendor registers kernels (kernels.h) and may keep a fallback that copies to the host and back
// for the rest: at::native::cpu_fallback does that. This one copies no arguments, and so in-place
// operators and views need nothing special.
#pragma once

#include "copy.h"
#include "generator.h"
#include "profiler.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fake {

inline void require_device(
    const at::Tensor& tensor, Device device, std::string_view argument, std::string_view op) {
  TORCH_CHECK(
      !tensor.defined() || tensor.device() == device,
      "Expected all tensors to be on the same device, but found at least two devices, ", device,
      " and ", tensor.device(), "! (argument '", argument, "' of ", op, ")");
}

class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), stack_(stack), first_(stack.size() - schema_.arguments().size()),
        arguments_(stack.begin() + static_cast<std::ptrdiff_t>(first_), stack.end()) {
    find_device();
  }

  void run(const c10::OperatorHandle& op) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      stack_[first_ + i] = host_argument(i);
    }
    {
      const KernelTimer timer(schema_.name(), device_);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    const size_t returns = schema_.returns().size();
    for (size_t i = 0; i < returns; ++i) {
      auto& result = stack_[stack_.size() - returns + i];
      result = device_result(schema_.returns()[i], result);
    }
  }

 private:
  // Results go to the first tensor's device, or to that which a factory function names.
  void find_device() {
    device_ = Device(kDeviceType, current);
    for (const auto& argument : arguments_) {
      if (argument.isDevice() && argument.toDevice().type() == kDeviceType) {
        device_.set_index(index_or_current(argument.toDevice().index()));
      }
    }
    for (const auto& argument : arguments_) {
      for (const auto& tensor : tensors(argument)) {
        if (on_device(tensor)) {
          device_ = tensor.device();
          return;
        }
      }
    }
  }

  static std::vector<at::Tensor> tensors(const c10::IValue& value) {
    if (value.isTensor()) {
      return {value.toTensor()};
    }
    return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
  }

  c10::IValue host_argument(size_t i) {
    const auto& argument = schema_.arguments()[i];
    const auto& value = arguments_[i];
    if (value.isTensor()) {
      return host_tensor(value.toTensor(), argument);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) {
        list.push_back(host_tensor(tensor, argument));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      return host_indices(value.toOptionalTensorList());
    }
    if (value.isDevice()) {
      return Device(c10::kCPU);
    }
    return is_generator(argument) ? host_generator(value) : value;
  }

  at::Tensor host_tensor(const at::Tensor& tensor, const c10::Argument& argument) {
    check_device(tensor, argument);
    const bool single = argument.type()->kind() == c10::TypeKind::TensorType;
    if (argument.is_out() && single && tensor.defined()) {
      // Of no size yet: the kernel gives it the right one, and device_result takes it over.
      return at::empty({0}, tensor.options().device(c10::kCPU));
    }
    return aliases_.alias(tensor);
  }

  // Indices may be on the CPU, as for any device.
  c10::IValue host_indices(const c10::List<std::optional<at::Tensor>>& indices) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& index : indices.vec()) {
      if (index && !index->is_cpu()) {
        require_device(*index, device_, "indices", schema_.name());
      }
      list.push_back(index ? std::optional(aliases_.alias(*index)) : std::nullopt);
    }
    return list;
  }

  // A number on the CPU may be combined with anything, but not written to.
  void check_device(const at::Tensor& tensor, const c10::Argument& argument) const {
    const auto* alias = argument.alias_info();
    const bool written = alias && alias->isWrite();
    if (tensor.defined() && tensor.is_cpu() && tensor.dim() == 0 && !written) {
      return;
    }
    require_device(tensor, device_, argument.name(), schema_.name());
  }

  static bool is_generator(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    const auto type = optional ? optional->getElementType() : argument.type();
    return type->kind() == c10::TypeKind::GeneratorType;
  }

  c10::IValue host_generator(const c10::IValue& value) const {
    return fake::host_generator(value.toOptional<at::Generator>(), device_.index());
  }

  c10::IValue device_result(const c10::Argument& returned, const c10::IValue& result) {
    const auto* alias = returned.alias_info();
    if (alias && alias->isWrite()) {
      return written_argument(*alias, result);
    }
    if (result.isTensor()) {
      return aliases_.to_device(result.toTensor(), device_);
    }
    if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : result.toTensorVector()) {
        list.push_back(aliases_.to_device(tensor, device_));
      }
      return list;
    }
    return result;
  }

  // An operator that writes to an argument returns that argument.
  c10::IValue written_argument(const c10::AliasInfo& alias, const c10::IValue& result) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (!argument.alias_info() || argument.alias_info()->beforeSets() != alias.beforeSets()) {
        continue;
      }
      if (argument.is_out() && result.isTensor()) {
        copy_from_and_resize(result.toTensor(), arguments_[i].toTensor());
      }
      return arguments_[i];
    }
    return result;
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t first_;
  const std::vector<c10::IValue> arguments_;
  Device device_{kDeviceType};
  HostAliases aliases_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      "fake: there is no kernel for ", op.operator_name());
  initialize();
  // The device's autocast is over when a kernel runs; the CPU's must not begin within it.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  HostCall(op, *stack).run(op);
}

// Layouts that the device has no memory format for.
inline void unsupported_layout(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "fake: sparse and quantized tensors are not supported (", op.operator_name(), ")");
}

} // namespace fake
