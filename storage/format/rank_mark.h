#ifndef OPTSTATE_STORAGE_FORMAT_RANK_MARK_H_
#define OPTSTATE_STORAGE_FORMAT_RANK_MARK_H_

#include <cstdint>

namespace optstate::storage {

// The marks of what a rank has staged, in the file `rank_marks`. Byte by byte:
// FORMAT.md.
//
// Stores are in this order, each a step that a kill may follow: a rank that
// begins to stage sets `epoch` to one more and then `step`; one that drops what
// it staged sets `step` to 0, or `epoch` to one more. So marks of runs count
// exactly when `step` is the step after the committed one and their epoch is
// this.
struct RankMark {
  // The session that staged, a number that the rank's client library drew at
  // random. A process that takes the rank over has another.
  uint64_t client_instance;
  uint64_t step;   // staged for; 0: nothing is
  uint32_t epoch;  // of the rank's marks in staged_marks
  // For jobs whose engine reduces and accumulates: rank 0's `step` and `epoch`
  // are those of all ranks, for a run has the sum of all. In this epoch the
  // rank is past micro-steps [0, ended), and the sum has all that it has pushed
  // of them. Set before `epoch` is, so that it may be one ahead of that.
  uint32_t ended_epoch;
  uint64_t ended;
  // The session's attachment: `attached` is 1 while that session is attached,
  // and the two after it are of the rank's process. An engine that finds it 1
  // knows whose return to wait for, and whose end to take for that of the
  // session.
  uint32_t attached;
  int32_t pid;                   // 0: not known (another machine)
  uint64_t process_start_ticks;  // as /proc/PID/stat has it; 0: not known
  // The step that was next when the rank was lost, while others participated;
  // 0: the rank is attached, or was never.
  uint64_t lost_at_step;
  // 1: that step was open, and no rank is known to have been notified of the
  // loss: none that was aborted for it has made another call.
  uint32_t loss_unacknowledged;
  uint32_t unused;
};
static_assert(sizeof(RankMark) == 64);

// Makes an entry of staged_marks: this run's accumulator has the rank's
// gradients up to the micro-step. Never 0. Epochs wrap after 2^32 steps; a run
// whose mark lay untouched that long would be taken for staged.
inline uint64_t StagedMark(uint32_t epoch, uint32_t micro_step) {
  return uint64_t{epoch} << 32 | micro_step;
}
// Returns the epoch after this one; 0 is none.
inline uint32_t EpochAfter(uint32_t epoch) {
  return epoch == UINT32_MAX ? 1 : epoch + 1;
}
inline uint32_t EpochOf(uint64_t staged_mark) {
  return static_cast<uint32_t>(staged_mark >> 32);
}
inline uint32_t MicroStepOf(uint64_t staged_mark) {
  return static_cast<uint32_t>(staged_mark);
}

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_RANK_MARK_H_
