#include "server/session/steps/staging_marks.h"

#include "storage/persist_in_order.h"

namespace optstate::session {

// Returns the mark for the rank's runs; see RankMark.
uint64_t StagingMarks::BeginStaging(uint32_t rank, uint64_t step,
                                    uint32_t micro_step) {
  storage::RankMark& mark = job_.staging_mark(rank);
  if (mark.step != step) {
    RenewEpoch(rank);
    mark.step = step;
  }
  return storage::StagedMark(mark.epoch, micro_step);
}

// Invalidates all marks of the rank's runs.
void StagingMarks::RenewEpoch(uint32_t rank) {
  storage::RankMark& mark = job_.staging_mark(rank);
  const uint32_t epoch = storage::EpochAfter(mark.epoch);
  if (job_.accumulates_together()) CarryEnded(epoch);
  storage::PersistInOrder(storage::PersistPoint::kStagingEpoch);
  mark.epoch = epoch;
  storage::PersistInOrder(storage::PersistPoint::kStagingEpochStored);
}

// Carries the marks of ended micro-steps into an epoch that begins because some
// rank dropped its part: the other ranks do not repeat their ends. Marks left
// by a former engine or step do not count.
void StagingMarks::CarryEnded(uint32_t epoch) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    storage::RankMark& mark = job_.rank_mark(rank);
    const bool counts =
        mark.ended_epoch == job_.staging_mark(0).epoch &&
        step_.micro_steps.past(rank) >= static_cast<int64_t>(mark.ended);
    mark.ended_epoch = counts ? epoch : 0;
  }
}

}  // namespace optstate::session
