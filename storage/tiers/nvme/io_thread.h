#ifndef OPTSTATE_STORAGE_TIERS_NVME_IO_THREAD_H_
#define OPTSTATE_STORAGE_TIERS_NVME_IO_THREAD_H_

#include <thread>

#include "absl/base/thread_annotations.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/committer.h"
#include "storage/tiers/nvme/parameter_cache.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/record_mover.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"
#include "storage/tiers/nvme/swapper.h"
#include "storage/tiers/nvme/verifier.h"

namespace optstate::nvme {

// The one thread of a store that uses its engine: it has the rooms begin what
// they can, polls, and gives each completion to the room that it is of.
//
// Invariant: nothing begins after the store has failed or is to stop; what is
// under way ends before the thread does.
//
// Threads: Start() and Stop() are called in turns, by the store's owner
// without the store's lock. The thread holds the lock, but while it polls or
// sums.
class IoThread {
 public:
  // The arguments must outlive this object.
  IoThread(const StoreContext* context, StoreMonitor* monitor,
           RecordCache* cache, Swapper* swapper, Committer* committer,
           Verifier* verifier, ParameterCache* parameters, RecordMover* mover)
      : context_(*context),
        monitor_(*monitor),
        cache_(*cache),
        swapper_(*swapper),
        committer_(*committer),
        verifier_(*verifier),
        parameters_(*parameters),
        mover_(*mover) {}
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;

  void Start();
  // Ends the thread, if it was started.
  void Stop();

 private:
  void Run();
  void Schedule() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void Complete(io::IoRequest* request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);

  const StoreContext& context_;
  StoreMonitor& monitor_;
  RecordCache& cache_ ABSL_GUARDED_BY(monitor_.mu);
  Swapper& swapper_ ABSL_GUARDED_BY(monitor_.mu);
  Committer& committer_;
  Verifier& verifier_;
  ParameterCache& parameters_ ABSL_GUARDED_BY(monitor_.mu);
  RecordMover& mover_;
  std::thread thread_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_IO_THREAD_H_
