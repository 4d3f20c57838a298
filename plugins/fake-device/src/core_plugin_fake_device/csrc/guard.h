// The current device and stream of a thread, and events; torch switches them through this class.
//
// A vendor calls its runtime's stream and event functions here. The fake runs everything at once:
// a stream is a number, an event is the time at which it was recorded, and waiting takes no time.
#pragma once

#include "runtime.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace fake {

using c10::Stream;
using c10::StreamId;

struct Event {
  std::chrono::steady_clock::time_point time;
};

inline std::atomic<StreamId> last_stream{0};
inline thread_local std::array<StreamId, kMaxDevices> current_streams{};

inline Stream make_stream(DeviceIndex index, StreamId id) {
  return Stream(Stream::UNSAFE, Device(kDeviceType, index), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  // The name that C10_REGISTER_GUARD_IMPL looks for.
  static constexpr c10::DeviceType static_type = kDeviceType;

  c10::DeviceType type() const override {
    return kDeviceType;
  }
  Device getDevice() const override {
    return Device(kDeviceType, current);
  }
  Device exchangeDevice(Device device) const override {
    return Device(kDeviceType, exchange_device(index_or_current(device.index())));
  }
  void setDevice(Device device) const override {
    exchange_device(index_or_current(device.index()));
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) {
      current = device.index();
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  // The dtypes that torch.accelerator.get_device_capability reports.
  c10::DeviceCapability getDeviceCapability(Device) const override {
    c10::DeviceCapability capability;
    auto& types = capability.capability_data.supported_scalar_types;
    types.has_Double = has(kFloat64);
    types.has_ComplexHalf = types.has_ComplexFloat = has(kComplexNumbers);
    types.has_ComplexDouble = has(kComplexNumbers) && has(kFloat64);
    types.has_QInt8 = types.has_QUInt8 = types.has_QInt32 = 0;
    types.has_QUInt4x2 = types.has_QUInt2x4 = 0;
    return capability;
  }

  Stream getStream(Device device) const override {
    const DeviceIndex index = index_or_current(device.index());
    return make_stream(index, current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return make_stream(index_or_current(device.index()), 0);
  }
  Stream getNewStream(Device device, int /*priority*/) const override {
    require(kStreams);
    initialize();
    return make_stream(index_or_current(device.index()), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    const DeviceIndex index = stream.device_index();
    return make_stream(index, std::exchange(current_streams[index], stream.id()));
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex index) const override {
    index_or_current(index);
    initialize();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    require(kEvents);
    initialize();
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void block(void*, const Stream&) const override {
    require(kEvents);
  }
  bool queryEvent(void*) const override {
    require(kEvents);
    return true;
  }
  void synchronizeEvent(void*) const override {
    require(kEvents);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    require(kEvents);
    require(kEventTiming);
    TORCH_CHECK(start && end, "fake: both events must be recorded before their time is taken");
    const auto elapsed = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace fake
