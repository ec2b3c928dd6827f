#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_VERIFIER_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_VERIFIER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/durability/verify_note.h"
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

  // At most `bytes_per_s` are read in a second; 0: as the disk can.
  explicit Verification(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  // Waits for the end, and for the thread. Called once. See Job::Verify.
  absl::Status Await(Progress progress);

 private:
  friend class RecordVerifier;

  bool Note(absl::string_view job, const storage::VerifyResult& found);
  // Waits until the bytes read since the last call are what the limit allows.
  void Pace(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(const absl::StatusOr<storage::VerifyResult>& result);
  void Cancel(const absl::Status& why);
  // Returns what is new since the last call.
  v1::VerifyJobProgress Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool has_ended() const;
  void AwaitEnd() const;

  const uint64_t bytes_per_s_;
  mutable absl::Mutex mu_;
  std::chrono::steady_clock::time_point paced_at_ ABSL_GUARDED_BY(mu_) =
      std::chrono::steady_clock::now();
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
// that none is under way when the store ends. Knows what the last one found
// that looked at every record.
//
// A scrub is a verification that the engine begins by itself (RecordScrubber).
// A scrub gives way to an operator's verification.
//
// Threads: thread-safe.
class RecordVerifier {
 public:
  // While it exists no scrub is under way, so that none refuses an operator. It
  // may end when the operator's verification has begun.
  class OperatorTurn {
   public:
    // Ends a scrub; waits for a read of one record at most. The verifier must
    // outlive this object.
    explicit OperatorTurn(RecordVerifier* verifier);
    ~OperatorTurn();
    OperatorTurn(const OperatorTurn&) = delete;
    OperatorTurn& operator=(const OperatorTurn&) = delete;

   private:
    RecordVerifier& verifier_;
  };

  // `job` is its name, for the log; the clocks are those of Job::Options.
  RecordVerifier(std::string job, std::function<absl::Time()> clock,
                 std::function<absl::Time()> wall_clock)
      : job_(std::move(job)),
        clock_(std::move(clock)),
        wall_clock_(std::move(wall_clock)) {}

  // Takes up what former engines noted in the job's folder on a disk, and notes
  // there what ends from now on. A job without a note counts from now on.
  void UseNote(const std::string& folder, uint64_t incarnation);

  // Begins to verify the store, which must live until the verification has
  // ended or Cancel has returned. FAILED_PRECONDITION: one is under way;
  // RESOURCE_EXHAUSTED: no thread can be had.
  absl::StatusOr<std::shared_ptr<Verification>> Begin(
      storage::StateStore* store);
  // Does the same for a scrub. FAILED_PRECONDITION: also in an OperatorTurn.
  absl::StatusOr<std::shared_ptr<Verification>> BeginScrub(
      storage::StateStore* store, uint64_t bytes_per_s);
  // Ends what is under way with ABORTED, which says why. Returns when the store
  // is not used any more: after a read of one record, at most.
  // The caller keeps the next one from beginning.
  void Cancel(absl::string_view why);
  // Does the same with a scrub, and leaves an operator's verification alone.
  void CancelScrub(absl::string_view why);

  // Returns from when on the interval to the next scrub counts, by `clock`: the
  // end of the last verification that looked at every record, also by a former
  // engine, or what a note of a job without one says. Nullopt: there is
  // neither.
  std::optional<absl::Time> counted_from() const;
  // Sets what that verification found, and the number of scrubs.
  void Describe(v1::DiskState* disk) const;

 private:
  enum class Asker : uint8_t { kOperator, kScrub };

  absl::StatusOr<std::shared_ptr<Verification>> BeginFor(
      Asker asker, uint64_t bytes_per_s, storage::StateStore* store)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run(Asker asker, storage::StateStore* store, Verification* run);
  void NoteWhole(Asker asker, const storage::VerifyProgress& found);
  void WriteNote(const std::string& folder, const VerifyNote& note) const;
  static void End(Verification* verification, absl::string_view why);

  const std::string job_;
  const std::function<absl::Time()> clock_;
  const std::function<absl::Time()> wall_clock_;
  mutable absl::Mutex mu_;
  std::shared_ptr<Verification> last_ ABSL_GUARDED_BY(mu_);
  Asker last_asker_ ABSL_GUARDED_BY(mu_) = Asker::kOperator;
  int operator_turns_ ABSL_GUARDED_BY(mu_) = 0;
  std::string note_folder_ ABSL_GUARDED_BY(mu_);  // empty: there is none
  // As it is noted, times by the wall clock.
  VerifyNote note_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> counted_from_ ABSL_GUARDED_BY(mu_);
  uint64_t scrubs_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_RECORD_VERIFIER_H_
