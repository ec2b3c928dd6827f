#ifndef OPTSTATE_STORAGE_PERSIST_IN_ORDER_H_
#define OPTSTATE_STORAGE_PERSIST_IN_ORDER_H_

#include <atomic>
#include <cstdint>

namespace optstate::storage {

// The places at which recovery relies on the order of stores to a job's files.
// Each is named by the store that follows it or, where nothing follows, by the
// store that must be there before the function returns.
enum class PersistPoint : uint8_t {
  // server/scheduler
  kStagedMark,       // the sum that it marks is complete
  kCountsBegun,      // the count and the number before are kept
  kStepCount,        // counts_begun names the parameter
  kAllStepCounts,    // all counts are those after the step
  kStepSpeculated,   // step_speculated names the step
  kRolledBackStamp,  // the run has its old values
  kSpeculationOver,  // no entry names the step
  kReplacedStamps,   // the parameter has its new values
  kReplacedSlot,     // the parameter's runs are stamped
  // server/scheduler/gradient_log
  kLogBegunStored,    // before the control file says that records may lag
  kLogTile,           // the log is made, and the tile's row in its table whole
  kLogResident,       // the tile has no entries, its step, and its own master
  kLogEntry,          // the factors and the gradient are whole
  kLogEntryStored,    // before the run gets the step's stamp
  kLogSettledStored,  // before the record, of which no entry counts, is changed
  kLogCleared,        // all records are up to date, and so are their parameters
  kLogClearedStored,  // before a record, or the room of the log, is changed
  // server/session
  kRankProcessStart,    // a rank's mark has no pid
  kRankProcessId,       // its process_start_ticks is that of the new process
  kRankAttached,        // and so is its pid
  kInstanceDrop,        // a replaced session is not attached
  kClientInstance,      // and nothing that it staged counts
  kLossDrop,            // a loss is recorded
  kRankDetached,        // nothing that the lost rank staged counts
  kStagingEpoch,        // the marks of ended micro-steps are of the next epoch
  kStagingEpochStored,  // the epoch is the next one
  kMicroStepEnded,      // a rank's mark says how many micro-steps it has ended
  kMicroStepAnswer,     // and that it counts in this epoch
  kStepInProgress,      // the intent of a step is whole
  kStepPrepared,        // likewise, of a step that waits for a verdict
  kStepClipped,         // the norm that all nodes agreed on is stored
  kFirstTile,           // the step is marked as in progress
  kStepGivenUp,         // the rank whose gradients are lost is recorded
  kLoadSeal,            // the log of a load is whole
  kLoadInPlace,         // and sealed
  kLoadRecord,          // all that the log has is in place
  kParameterLoading,    // masters of a former build's load are in place
  // storage
  kFrameTableMagic,          // all else of a new table is in memory
  kRecordPlace,              // the frame or slot has what the place says
  kRecordPlaceStored,        // before the frame is changed or used anew
  kFrameTableSyncing,        // all that came before the sync, or its end
  kFrameTableSyncingStored,  // before the sync is begun
  kFramesGivenUp,            // no place names a frame that is cut off
  kKeptEpochBegun,           // no entry is of an earlier use of the epoch
  kKeptEntry,                // the kept values are complete
  kKeptEntryStored,          // before the run gets new values
  kKeptEntryCleared,         // the run is as it was before it was kept

  kCount,  // the number of points
};

// Called at each point by PersistInOrder(); null outside tests.
using PersistHook = void (*)(PersistPoint point);
inline std::atomic<PersistHook> persist_hook{nullptr};

// Makes the stores before it reach the job's files before the stores after it,
// as a process sees them that comes after this one was killed. A killed thread
// has executed its instructions up to one and none after it, so that only the
// compiler could change the order: this stops it, and costs no fence
// instruction.
//
// Compilers seldom would reorder these stores, and so a missing call would go
// unnoticed. Therefore each place has a name, and a test that sets
// `persist_hook` looks at the files at each point, and fails when a point that
// it knows is never reached.
//
// `hook` is the value of persist_hook, which a short loop loads once.
inline void PersistInOrder(PersistPoint point, PersistHook hook) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (hook != nullptr) hook(point);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}
inline void PersistInOrder(PersistPoint point) {
  PersistInOrder(point, persist_hook.load(std::memory_order_relaxed));
}

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_PERSIST_IN_ORDER_H_
