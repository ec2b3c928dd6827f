#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_OBSERVER_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_OBSERVER_H_

#include <cstdint>

namespace optstate::scheduler {

// Receives the progress of a step, at the points between which a crash
// differs. For tests that kill an engine at a chosen instant; production has
// none.
//
// Threads: OnRunUpdated and OnLoadPartApplied are called by all workers at
// once. An observer must not call back.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Gradients are about to be read, without the job's lock: for the statistics
  // of a long push, for sums of micro-steps, or for a norm.
  virtual void OnGradientsRead() {}
  // The step is marked as in progress; no tile was touched.
  virtual void OnStepMarked(uint64_t /*step*/) {}
  // The kernel has written this run of the step.
  virtual void OnRunUpdated(uint64_t /*step*/, uint64_t /*run*/) {}
  // All runs are written, the step counts are not.
  virtual void OnRunsDone(uint64_t /*step*/) {}
  // The step's record is the current one; the mark is still set.
  virtual void OnStepRecorded(uint64_t /*step*/) {}
  // A call begins to wait for the end of a pause; with the job's lock held.
  virtual void OnAwaitPauseEnd() {}
  // A load's log is sealed; nothing of it is in place.
  virtual void OnLoadSealed() {}
  // A part of the load is in place.
  virtual void OnLoadPartApplied() {}
  // All of the load is in place; the record still says that it is to be
  // applied.
  virtual void OnLoadApplied() {}
  // The load is recorded; its log is still there.
  virtual void OnLoadRecorded() {}
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_OBSERVER_H_
