#ifndef OPTSTATE_SERVER_SESSION_STEPS_STEP_TIMER_H_
#define OPTSTATE_SERVER_SESSION_STEPS_STEP_TIMER_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "optstate/v1/admin.pb.h"
#include "server/observe/trace_recorder.h"

namespace optstate::session {

// Measures the time of each phase of a step, and keeps the times of the last 16
// steps, and of all of them as histograms. Phases may alternate: a rank pushes
// while another waits in its commit. A job with records on disk has one phase
// more, "disk wait", which is measured elsewhere and is a part of the update.
//
// Threads: not thread-safe. Allocates only in Describe.
class StepTimer {
 public:
  enum class Phase : size_t {
    kStaging,
    kWaiting,
    kDecide,
    kUpdate,
    kPublish,
    kNone,  // the ranks' own time
  };
  static constexpr size_t kKept = 16;
  using Clock = std::chrono::steady_clock::time_point (*)();

  explicit StepTimer(Clock clock = &std::chrono::steady_clock::now)
      : clock_(clock) {}
  // Counts steps in a trace too, and records the phases in lane 0 of `spans`.
  // Both outlive the timer.
  StepTimer(observe::TraceRecorder* trace, observe::TraceSource* spans)
      : StepTimer(&std::chrono::steady_clock::now, trace, spans) {}
  StepTimer(Clock clock, observe::TraceRecorder* trace,
            observe::TraceSource* spans)
      : clock_(clock), trace_(trace), spans_(spans) {}

  // Assigns the time from now on to this phase; returns the former phase.
  Phase Enter(Phase phase);
  // Adds time in which the update waited for records to come from disk.
  void NoteDiskWait(uint64_t ns);
  // Ends the step, and counts it.
  void Finish(uint64_t update_bytes);
  // Discards the times of the step that was begun.
  void Drop();

  // Adds the times to `job`; adds nothing while there is no step.
  void Describe(v1::Job* job) const;

  // A phase within another.
  class Scope {
   public:
    Scope(StepTimer* timer, Phase phase)
        : timer_(timer), before_(timer->Enter(phase)) {}
    ~Scope() { timer_->Enter(before_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StepTimer* const timer_;
    const Phase before_;
  };

 private:
  static constexpr size_t kPhases = static_cast<size_t>(Phase::kNone);
  struct Times {
    std::array<uint64_t, kPhases> ns{};
    uint64_t update_bytes = 0;
    // Unset: no record of the job was on disk.
    std::optional<uint64_t> disk_wait_ns;
  };
  // Counts the steps since the beginning by the time of one phase; the last
  // bucket has no bound.
  static constexpr std::array<double, 11> kBoundsS = {
      0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100};
  struct Histogram {
    std::array<uint64_t, kBoundsS.size() + 1> steps{};
    double sum_s = 0;

    void Count(uint64_t ns);
    void Describe(const char* phase, v1::Job* job) const;
  };
  void RecordPhase(std::chrono::steady_clock::time_point end);
  static void Fill(const Times& sum, uint64_t steps, v1::StepTimes* times);

  const Clock clock_;
  observe::TraceRecorder* const trace_ = nullptr;
  observe::TraceSource* const spans_ = nullptr;
  Phase phase_ = Phase::kNone;
  std::chrono::steady_clock::time_point since_;
  Times current_;
  std::array<Times, kKept> kept_;
  uint64_t finished_ = 0;
  std::array<Histogram, kPhases> histograms_;
  std::optional<Histogram> disk_waits_;  // of the steps that were on disk
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_STEP_TIMER_H_
