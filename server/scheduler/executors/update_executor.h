#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_EXECUTOR_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_EXECUTOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/reduction.h"
#include "kernels/update_kernel.h"
#include "proto/types/accumulation.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/whole_parameter.h"
#include "server/scheduler/index_range.h"
#include "storage/record_lag.h"

namespace optstate::scheduler {

// The sum of micro-steps to which the gradients of a task are added.
struct SumTarget {
  void* data = nullptr;  // null: there is none; the gradients are reduced
  DType dtype = DType::kFloat32;
  // The gradients replace what is there, which no longer counts.
  bool is_first = false;
  // Given `mark_value` once the sum is complete.
  std::atomic<uint64_t>* mark = nullptr;
  uint64_t mark_value = 0;
};

// The reduction of one run's gradient to one number.
struct ReduceTask {
  uint64_t run = 0;
  // The gradients are summed in float in this order; at least one.
  absl::Span<const void* const> gradients;
  DType gradient_dtype = DType::kFloat32;
  size_t numel = 0;
  // The gradients are added to this sum first, and the sum is then reduced.
  SumTarget sum;
  kernels::Reduction reduction = kernels::Reduction::kSumOfSquares;
  double* result = nullptr;
};

// Says what of a run can be rolled back when the process dies in its update.
enum class UndoPolicy : uint8_t {
  // Nothing: the record dies with the process.
  kNone,
  // The record outlives the process, which can die between any two stores: a
  // worker's slot of the job's undo file (worker_undo.h) must then name the run
  // and have all that is needed to go on.
  kInPlace,
};

// The arrays of one whole parameter, of float, as kernels::WholeView has them.
struct WholeArrays {
  float* gradient = nullptr;
  float* master = nullptr;
  float* state[kStateArraysMax] = {};  // null: it has no elements
};

// The whole parameters of one open record, which its tasks name: an update that
// is not separable needs all of one to update an element. Values pass as
// floats, whatever the formats of the record. Used until the record's Close().
//
// Threads: any, and for different parameters at the same time, but only those
// of the worker pool that the job's undo slots are for.
class WholeRecord {
 public:
  virtual WholeParameter Describe(uint32_t parameter) const = 0;
  // Fills the arrays that are not null with the old values, and with the
  // gradient as a kernels::WholeKernel takes it.
  virtual void Gather(uint32_t parameter, const WholeArrays& to) const = 0;
  // Stores the new values of the master and the states, then the stamps of all
  // runs. A process that is killed in here leaves all of the update, or nothing
  // of it.
  virtual void WriteBack(uint32_t parameter, const WholeArrays& from) = 0;
  // Does the update by the CPU's kernel.
  virtual void Update(uint32_t parameter) = 0;

 protected:
  ~WholeRecord() = default;
};

// The update of one run of one record, or of one whole parameter.
struct UpdateTask {
  // The number of its record.
  size_t record = 0;
  uint32_t parameter = 0;
  uint64_t run = 0;
  uint64_t step = 0;
  // The addresses of the gradients, and of the run in each array of its record
  // and in the parameter area. `begin` is 0; `undo` means nothing.
  kernels::TileView view;
  // Not set: the executor has said that it does not need the record, which is
  // not open, and `view` has no addresses of it.
  bool has_record = true;
  // The arithmetic by name, for any device, and the functions of it here.
  const kernels::UpdateKernelKey* key = nullptr;
  const kernels::UpdateKernel* kernel = nullptr;
  // These do the same update when they are given, in place of the gradients,
  // their sum in float: with the same factors and bits.
  const kernels::UpdateKernelKey* sum_key = nullptr;
  const kernels::UpdateKernel* sum_kernel = nullptr;
  // The hyperparameters, step count and clip coefficient, as `kernel->prepare`
  // made them: the same numbers for every device.
  const kernels::UpdateFactors* factors = nullptr;
  UndoPolicy undo = UndoPolicy::kInPlace;
  // Given `step` (release, for ranks that read the parameter) once the run has
  // all of its new values.
  std::atomic<uint64_t>* stamp = nullptr;
  // Set: the task is the whole of `parameter`, whose first run is `run`. Then
  // `view` has its number of elements alone, `key` its optimizer, and the
  // record does what undo, stamps and an observer need; the kernels are null,
  // and `stamp`, that of the last run, is only to be read.
  WholeRecord* whole = nullptr;
};

// The tasks of a pass of reductions. Calls visit(task) for each task at a
// position; different positions may be visited at the same time.
using ReduceTasks = absl::FunctionRef<void(
    size_t position, absl::FunctionRef<void(const ReduceTask&)> visit)>;

// The tasks of a pass of updates, a batch at each position: those of one pinned
// record. Owned by what orders the pass.
//
// Threads: any, and different slots at the same time; one call for a slot at a
// time.
class UpdateTasks {
 public:
  // Pins the record at a position, in a slot that has none.
  virtual absl::Status Open(size_t slot, size_t position) = 0;
  // Calls visit(task) for each task of the record in the slot, once. The
  // visitor may set the view's `undo`, and leaves the rest alone.
  virtual void ForEachTask(size_t slot,
                           absl::FunctionRef<void(UpdateTask&)> visit) = 0;
  // Unpins the record.
  virtual void Close(size_t slot) = 0;

 protected:
  ~UpdateTasks() = default;
};

// Computes what the scheduler orders. Three things are apart: the session
// decides (which step, with what coefficient), the scheduler orders (passes,
// records, which runs lack what, what is kept of them), and an executor
// computes. It knows no job, rank or step but what its tasks say, and a task
// says nothing of how it is computed.
//
// An executor must
//   1. visit each position of the range once, and do each task that it is shown
//      there once, in any order and any number at the same time: no two tasks
//      of a pass write the same bytes, and none reads what another writes.
//   2. give the bits of the kernels (kernels/README.md), whatever its device.
//   3. have all stores of a task in the job's memory before it stores the
//      task's mark or stamp. A task with a stamp is done for any process; one
//      without may be shown again.
//   4. follow UndoPolicy, and for a sum that is not the first the same with
//      UndoKind::kAccumulate, before the first store of the task.
//   5. return only when it holds no task, no slot is open and no store is to
//      come.
// An executor may
//   1. hold any number of tasks of up to slots() open records: addresses in a
//      record are valid until its Close(), those of a ReduceTask until Reduce()
//      returns. A task itself, its list of gradients and its factors are valid
//      in visit() alone, so an executor that computes later copies them.
//   2. write to nothing but the arrays, sum, mark, stamp and result of its
//      tasks, and the undo slots that it was made with.
//   3. use the owners that an IndexRange implies, so that a worker finds its
//      part of the state on its node; or not.
// An executor may not
//   1. allocate, once it has been used with a layout, nor wait for a rank.
//   2. call back into the scheduler, but through the tasks.
//   3. leave tasks of a record undone without an error, but for those of which
//      HasLeftTasks() says so.
//
// Errors: Update() returns the first one, of Open() or its own. It opens no
// further position then, closes what is open, and may leave tasks undone: those
// have no stamp, and the next pass of the same step shows them again. Reduce()
// cannot fail, because its numbers decide the step: all that it reads and
// writes is in host memory, so an executor whose device fails does the tasks
// there, or ends the process, as an engine does whose device is lost.
//
// Runs that a CPU worker was killed in are finished by StepRecovery, with the
// CPU's kernels, whatever the executor: their undo is those kernels' own.
//
// Threads: one pass at a time. `tasks` is used until the call returns.
class UpdateExecutor {
 public:
  virtual ~UpdateExecutor() = default;

  // Returns UNIMPLEMENTED, naming the parameter, for a layout with one that
  // this executor cannot update.
  virtual absl::Status CanUpdate(const Layout& layout,
                                 Accumulation accumulation) const = 0;
  // Returns the number of records that may be open at the same time, at least
  // one: slots are numbered below it.
  virtual size_t slots() const = 0;

  // Says which records in host memory lag behind copies that the executor keeps
  // elsewhere; null: it keeps none. Used between two passes.
  virtual storage::RecordLag* lag() { return nullptr; }
  // Says that the copies no longer count, nor what records in host memory lack:
  // all are going to get new values. Called between two passes.
  virtual void DropCopies() {}
  // Says whether the update of a run in this step uses the record in host
  // memory. Called before the pass.
  virtual bool NeedsRecord(uint64_t /*run*/, uint64_t /*step*/) { return true; }
  // Says whether the pass of the next step, as far as it is known, brings the
  // record in host memory up to date, which may be done ahead of it.
  virtual bool IsDue(const SubGroup& /*sub_group*/) { return false; }

  // Says whether the last Update(), which returned OK, has left tasks that need
  // their records after all: the next pass is to have those open.
  virtual bool HasLeftTasks() const { return false; }

  // Does the tasks at the positions of the range.
  virtual void Reduce(const IndexRange& positions, ReduceTasks tasks) = 0;
  virtual absl::Status Update(const IndexRange& positions,
                              UpdateTasks* tasks) = 0;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_EXECUTOR_H_
