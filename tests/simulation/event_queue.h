#ifndef OPTSTATE_TESTS_SIMULATION_EVENT_QUEUE_H_
#define OPTSTATE_TESTS_SIMULATION_EVENT_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "tests/simulation/simulated_clock.h"
#include "tests/simulation/trace.h"

namespace optstate::simulation {

// Kinds of events, for the trace.
enum class EventKind : uint16_t {
  kMessage,     // of the network, arrives
  kLocal,       // of a process to another one on its machine
  kHello,       // is looked at by a daemon
  kEngine,      // of a daemon is ready, or to be started
  kRank,        // goes on
  kSessionEnd,  // is noticed by an engine
  kLauncher,    // starts or ends processes
  kOperator,    // begins an upgrade, or tries again
  kStranger,    // knocks
};

// Where it happens; kNowhere: not on one node.
struct EventTag {
  static constexpr uint32_t kNowhere = UINT32_MAX;

  EventKind kind = EventKind::kLocal;
  uint32_t node = kNowhere;
  uint32_t rank = kNowhere;
};

// Events to come of a simulation, in the order of its simulated time; of
// events at one time, in the order in which they were added. Nothing waits:
// the clock leaps to the time of the next event.
//
// Threads: one at a time. An event may add events.
class EventQueue {
 public:
  // Both outlive the queue.
  EventQueue(SimulatedClock* clock, Trace* trace)
      : clock_(*clock), trace_(*trace) {}
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  // Has `run` called when `delay` has passed; a negative one counts as 0.
  void After(absl::Duration delay, EventTag tag, std::function<void()> run);

  // Runs events until `is_done` returns true, which is asked after each.
  // FAILED_PRECONDITION: no event is left. DEADLINE_EXCEEDED: the simulated
  // time has passed `deadline`, or more than kEventsMax events have run, so
  // that a simulation that goes round in circles ends.
  absl::Status RunUntil(absl::Time deadline, absl::FunctionRef<bool()> is_done);

  // Runs what happens within the next `time`.
  absl::Status RunFor(absl::Duration time);

  absl::Time now() const { return clock_.Now(); }
  uint64_t events_run() const { return events_run_; }

 private:
  // About ten times those of 1,000 nodes of 8 ranks in 200 steps.
  static constexpr uint64_t kEventsMax = 1'000'000'000;

  struct Event {
    absl::Time at;
    uint64_t sequence = 0;
    EventTag tag;
    std::function<void()> run;
  };
  // The order of a heap whose first event is the next one.
  static bool IsLater(const Event& a, const Event& b) {
    return a.at != b.at ? a.at > b.at : a.sequence > b.sequence;
  }
  void RunNext();

  SimulatedClock& clock_;
  Trace& trace_;
  std::vector<Event> heap_;
  uint64_t next_sequence_ = 0;
  uint64_t events_run_ = 0;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_EVENT_QUEUE_H_
