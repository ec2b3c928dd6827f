#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_VERIFIER_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_VERIFIER_H_

#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "storage/state_store.h"
#include "storage/verify_result.h"

namespace optstate::session {

// One verification of a job's records. A thread of its own reads them, so that
// a caller that waits for its end never waits for the listener to its progress.
//
// Threads: thread-safe.
class Verification {
 public:
  // Interval at which progress is reported.
  static constexpr absl::Duration kInterval = absl::Milliseconds(200);
  using Progress = absl::FunctionRef<bool(const v1::VerifyJobProgress&)>;

  // Waits for the end, and for the thread. Called once. See Job::Verify.
  absl::Status Await(Progress progress);

 private:
  friend class RecordVerifier;

  void Read(storage::StateStore* store);
  bool Note(const storage::VerifyResult& found);
  void Cancel(const absl::Status& why);
  // Returns what is new since the last call.
  v1::VerifyJobProgress Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool has_ended() const;
  void AwaitEnd() const;

  mutable absl::Mutex mu_;
  storage::VerifyProgress progress_ ABSL_GUARDED_BY(mu_);
  std::vector<storage::RecordDamage> damages_ ABSL_GUARDED_BY(mu_);
  size_t reported_damages_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status cancelled_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  // The store is not used any more.
  bool has_ended_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Verifies a job's records on disk, one verification at a time, and sees to it
// that none is under way when the store ends.
//
// Threads: thread-safe.
class RecordVerifier {
 public:
  // Begins to verify the store, which must live until the verification has
  // ended or Cancel has returned. FAILED_PRECONDITION: one is under way;
  // RESOURCE_EXHAUSTED: no thread can be had.
  absl::StatusOr<std::shared_ptr<Verification>> Begin(
      storage::StateStore* store);
  // Ends what is under way with ABORTED, which says why. Returns when the store
  // is not used any more: after a read of one record, at most.
  // The caller keeps the next one from beginning.
  void Cancel(absl::string_view why);

 private:
  absl::Mutex mu_;
  std::shared_ptr<Verification> last_ ABSL_GUARDED_BY(mu_);
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_VERIFIER_H_
