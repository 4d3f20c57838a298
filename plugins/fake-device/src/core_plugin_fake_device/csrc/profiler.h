// What torch.profiler shows of the device: the kernels that ran, each with its operator.
//
// A vendor collects these records from its driver's tracing library, which Kineto starts and stops
// through a session. The fake takes the time of each operator that the fallback runs.
#pragma once

#include "guard.h"

#include <c10/util/ApproximateClock.h>
#include <libkineto.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <deque>

namespace fake {

struct KernelRecord {
  std::string name;
  int64_t begun; // nanoseconds since the epoch, as is all of Kineto's time
  int64_t ended;
  Device device;
  StreamId stream;
  uint64_t operator_id; // Kineto's, of the operator that started it
};

class ProfilerSession final : public libkineto::IActivityProfilerSession {
 public:
  ~ProfilerSession() override {
    stop();
  }
  void start() override {
    trace_.span = libkineto::TraceSpan(c10::getTime(), 0, "fake");
    active = this;
  }
  void stop() override {
    const std::lock_guard<std::mutex> lock(mutex);
    if (active == this) {
      active = nullptr;
    }
  }

  static bool is_active() {
    return active != nullptr;
  }

  static void add(KernelRecord record) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (active != nullptr) {
      active.load()->records_.push_back(std::move(record));
    }
  }

  static uint64_t current_operator() {
    return operators.empty() ? 0 : operators.back();
  }

  // Kineto tells which operator of torch a thread is in.
  void pushCorrelationId(uint64_t id) override {
    operators.push_back(id);
  }
  void popCorrelationId() override {
    if (!operators.empty()) { // it was entered before the session began
      operators.pop_back();
    }
  }

  void processTrace(libkineto::ActivityLogger&) override {}

  void processTrace(
      libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback operator_of, int64_t,
      int64_t) override {
    trace_.span.endTime = c10::getTime();
    for (const auto& record : records_) {
      trace_.emplace_activity(
          trace_.span, libkineto::ActivityType::CONCURRENT_KERNEL, record.name);
      auto& activity = *trace_.activities.back();
      activity.startTime = record.begun;
      activity.endTime = record.ended;
      activity.device = record.device.index();
      activity.resource = static_cast<int32_t>(record.stream);
      activity.id = static_cast<int32_t>(record.operator_id);
      activity.linked = operator_of(activity.id);
      activity.log(logger);
    }
  }

  std::vector<std::string> errors() override {
    return {};
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return nullptr;
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    return {};
  }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::make_unique<libkineto::CpuTraceBuffer>(std::move(trace_));
  }

 private:
  static inline std::mutex mutex;
  static inline std::atomic<ProfilerSession*> active{nullptr};
  static inline thread_local std::vector<uint64_t> operators;

  std::deque<KernelRecord> records_;
  libkineto::CpuTraceBuffer trace_{};
};

struct Profiler final : libkineto::IActivityProfiler {
  const std::string& name() const override {
    static const std::string name = "fake";
    return name;
  }
  const std::set<libkineto::ActivityType>& availableActivities() const override {
    static const std::set<libkineto::ActivityType> types{
        libkineto::ActivityType::CONCURRENT_KERNEL};
    return types;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<libkineto::ActivityType>& types, const libkineto::Config&) override {
    if (types.count(libkineto::ActivityType::CONCURRENT_KERNEL) == 0) {
      return nullptr;
    }
    require(kProfiler);
    return std::make_unique<ProfilerSession>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<libkineto::ActivityType>& types,
      const libkineto::Config& config) override {
    return configure(types, config);
  }
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

// Takes the time of a kernel, if someone asked for it.
class KernelTimer {
 public:
  KernelTimer(const std::string& name, Device device) {
    if (ProfilerSession::is_active()) {
      record_.emplace(KernelRecord{
          name, c10::getTime(), 0, device, current_streams[device.index()],
          ProfilerSession::current_operator()});
    }
  }
  ~KernelTimer() {
    if (record_) {
      record_->ended = c10::getTime();
      ProfilerSession::add(std::move(*record_));
    }
  }
  KernelTimer(const KernelTimer&) = delete;
  KernelTimer& operator=(const KernelTimer&) = delete;

 private:
  std::optional<KernelRecord> record_;
};

} // namespace fake
