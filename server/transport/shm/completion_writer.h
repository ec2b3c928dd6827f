#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_COMPLETION_WRITER_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_COMPLETION_WRITER_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "proto/shm/ring.h"
#include "server/session/job.h"
#include "server/transport/session_handler.h"
#include "server/transport/shm/shm_segments.h"

namespace optstate::transport {

// Writes the answers of one session into its completion ring, from the
// session's thread and, for steps, from whichever thread finished them.
//
// Never blocks on the peer: HasRoom() is asked before a submission is taken, so
// there is a free entry for each answer that may come.
//
// Threads: thread-safe, but HasRoom() is for the session's thread.
class CompletionWriter : public session::SessionListener {
 public:
  // Takes notices, which are no completions, from any thread.
  using NoticeSink = std::function<void(absl::string_view text)>;

  // `segments` and `handler` outlive the writer. `on_failure` is called, from
  // any thread, when failed() becomes true; null: nobody needs to know at once.
  CompletionWriter(const ShmSegments* segments, SessionHandler* handler,
                   NoticeSink notices,
                   std::function<void()> on_failure = nullptr);

  // Answers `completion.request_id` with `status`; the other fields are the
  // caller's. An error is the peer's fault (DATA_LOSS) and ends the session.
  // `text` goes with an answer that is no error.
  absl::Status Write(shm::Completion completion, const absl::Status& status,
                     absl::string_view text = {}) ABSL_LOCKS_EXCLUDED(mutex_);

  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const session::StepOutcome& outcome) override;
  void OnNotice(absl::string_view text) override { notices_(text); }

  // Returns whether one more answer fits when `taken` submissions were taken so
  // far. DATA_LOSS: the peer claims to have read answers that were never given.
  absl::StatusOr<bool> HasRoom(uint64_t taken) const;

  // The first error of an answer given from another thread.
  absl::Status error() const ABSL_LOCKS_EXCLUDED(mutex_);
  bool failed() const { return failed_.load(); }

 private:
  const ShmSegments* const segments_;
  SessionHandler* const handler_;
  const NoticeSink notices_;
  const std::function<void()> on_failure_;
  mutable absl::Mutex mutex_;
  shm::RingProducer<shm::Completion> producer_ ABSL_GUARDED_BY(mutex_);
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> failed_{false};
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_COMPLETION_WRITER_H_
