#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_SCRUBBER_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_SCRUBBER_H_

#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/session/durability/record_verifier.h"

namespace optstate::session {

// Verifies a job's records when the last whole verification is long ago, on a
// thread of its own, so that a damage is known before the record is needed.
//
// The interval begins at the end of each verification that looked at every
// record, an operator's and a former engine's included
// (RecordVerifier::UseNote). Without any it begins with Start(). A scrub that
// cannot begin or is ended is tried again after kRetry, from the first record
// on.
//
// Threads: thread-safe, but for Start().
class RecordScrubber {
 public:
  static constexpr absl::Duration kRetry = absl::Minutes(10);
  // Begins a scrub, or says why it cannot be now.
  using Begin = std::function<absl::StatusOr<std::shared_ptr<Verification>>()>;

  struct Options {
    absl::Duration interval;
    std::function<absl::Time()> clock;  // see Job::Options
    Begin begin;
  };

  // The verifier must outlive this object.
  RecordScrubber(Options options, RecordVerifier* verifier)
      : options_(std::move(options)), verifier_(*verifier) {}
  ~RecordScrubber() { Stop(); }
  RecordScrubber(const RecordScrubber&) = delete;
  RecordScrubber& operator=(const RecordScrubber&) = delete;

  // Called once at most. RESOURCE_EXHAUSTED: no thread can be had.
  absl::Status Start();
  // Has the thread look at the clock.
  void Wake();
  // Ends a scrub that is under way, and the thread. Waits for a read of one
  // record at most. No lock is held that `begin` takes.
  void Stop();

 private:
  void Run();
  // Waits until a scrub is due, and not before `earliest`; false: stopped.
  bool AwaitDue(absl::Time earliest);
  absl::Status Scrub();
  bool is_stopped() const;

  const Options options_;
  RecordVerifier& verifier_;
  absl::Time started_at_;
  mutable absl::Mutex mu_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_SCRUBBER_H_
