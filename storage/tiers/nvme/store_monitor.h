#ifndef OPTSTATE_STORAGE_TIERS_NVME_STORE_MONITOR_H_
#define OPTSTATE_STORAGE_TIERS_NVME_STORE_MONITOR_H_

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/io_counters.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_counters.h"

namespace optstate::nvme {

// The one lock of an NvmeStore, what its threads wait for, and what they count.
//
// Rooms that work under the lock name it as `monitor_.mu`. Clang cannot see
// that theirs and their caller's are one, so their public methods begin with
// AssertHeld().
struct StoreMonitor {
  explicit StoreMonitor(const StoreContext* the_context)
      : io_counters(the_context->options.directories.size()),
        context(*the_context) {}

  // Has the thread of I/O look for work.
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    has_work = true;
    if (is_polling) {
      context.engine.Wake();
    } else {
      work.Signal();
    }
  }
  // Ends the store: nothing is written after this. The last durable step
  // stands, and records that were not written stay in their frames.
  void Fail(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (failed.ok()) failed = why;
    changed.SignalAll();
  }
  void Submit(io::IoRequest* request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    io_counters.OnSubmit(context.DirectoryOf(request->file));
    context.engine.Submit(request);
  }

  absl::Mutex mu;
  absl::CondVar changed;  // some record can be taken, or a commit is over
  absl::CondVar work;     // the thread of I/O has something to do
  bool has_work ABSL_GUARDED_BY(mu) = false;
  bool is_polling ABSL_GUARDED_BY(mu) = false;
  bool stop ABSL_GUARDED_BY(mu) = false;
  absl::Status failed ABSL_GUARDED_BY(mu);
  StoreCounters counters ABSL_GUARDED_BY(mu);
  IoCounters io_counters ABSL_GUARDED_BY(mu);
  const StoreContext& context;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_STORE_MONITOR_H_
