#include "server/session/durability/record_moves.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "proto/types/status_macros.h"
#include "server/session/admission.h"
#include "spdlog/spdlog.h"

namespace optstate::session {

bool RecordMoves::IsTo(const v1::StorageSettings& storage) const {
  const v1::StorageSettings& next = move_->records->description().storage;
  return next.directories() == storage.directories() &&
         std::equal(next.directory_weights().begin(),
                    next.directory_weights().end(),
                    storage.directory_weights().begin(),
                    storage.directory_weights().end());
}

absl::StatusOr<RecordMoves::Moved> RecordMoves::Run(
    const JobDescription& next) {
  if (move_ != nullptr && IsTo(next.storage)) return AwaitEnd();
  job_.EndMove("other directory_weights were set");
  const auto move = std::make_shared<Move>();
  move->began_at = job_.options.clock();
  absl::Status status = Begin(next, move);
  if (move->records == nullptr) return status;
  status.Update(move->cancelled);
  move->what = move->records->Describe("directory_weights");
  move->waited = job_.options.clock() - move->began_at;
  if (status.ok()) {
    spdlog::info("records are written anew, training goes on: {}", move->what);
    job_.lock.WorkBeside([&] {
      status = move->records->Copy();
      move->has_left_store.Notify();
    });
    if (move->is_over) return move->result;
    status.Update(move->cancelled);
    status.Update(job_.failure);
  }
  Finish(move.get(),
         status.ok() ? Switch(move.get()) : absl::StatusOr<Moved>(status));
  return move->result;
}

absl::Status RecordMoves::Begin(const JobDescription& next,
                                const std::shared_ptr<Move>& move) {
  // Until the files take their space, so that no other job is promised it.
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(job_.StateDir()));
  OPTSTATE_ASSIGN_OR_RETURN(move->records, Rearrangement::Prepare(&job_, next));
  move_ = move;
  return move->records->Begin();
}

absl::StatusOr<RecordMoves::Moved> RecordMoves::AwaitEnd() {
  const std::shared_ptr<Move> move = move_;
  job_.lock.mu.Await(absl::Condition(&move->is_over));
  job_.lock.AwaitIdle();
  return move->result;
}

absl::StatusOr<RecordMoves::Moved> RecordMoves::Switch(Move* move) {
  const absl::Time began_at = job_.options.clock();
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t bytes, move->records->Switch());
  move->waited += job_.options.clock() - began_at;
  return Moved{bytes, move->waited};
}

void RecordMoves::Finish(Move* move, absl::StatusOr<Moved> result) {
  const absl::Duration took = job_.options.clock() - move->began_at;
  if (result.ok()) {
    spdlog::info("records were written anew: {} bytes={} ms={} waited_ms={}",
                 move->what, result->bytes, absl::ToInt64Milliseconds(took),
                 absl::ToInt64Milliseconds(result->waited));
  } else if (absl::IsAborted(result.status())) {
    spdlog::warn("records were not written anew: {} reason=\"{}\"", move->what,
                 std::string(result.status().message()));
  } else {
    spdlog::error("records were not written anew: {} error=\"{}\"", move->what,
                  result.status().ToString());
  }
  move->records.reset();
  move->result = std::move(result);
  move->is_over = true;
  if (move_.get() == move) move_.reset();
}

// The call that makes the move finds that out when it has the lock again.
void RecordMoves::Cancel(const absl::Status& why) {
  if (move_ == nullptr) return;
  move_->cancelled.Update(why);
  move_->records->Cancel(why);
}

void RecordMoves::End(const absl::Status& why) {
  if (move_ == nullptr) return;
  const std::shared_ptr<Move> move = move_;
  Cancel(why);
  move->has_left_store.WaitForNotification();
  Finish(move.get(), move->cancelled);
}

}  // namespace optstate::session
