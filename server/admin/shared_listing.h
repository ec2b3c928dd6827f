#ifndef OPTSTATE_SERVER_ADMIN_SHARED_LISTING_H_
#define OPTSTATE_SERVER_ADMIN_SHARED_LISTING_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::admin {

// Lets callers who want a list of all jobs at once share one question to the
// engines: a list costs a call to each engine, and each engine's lock.
//
// A caller who comes while a question is under way waits for the next one,
// which one of those who wait asks for all of them. So nobody gets an answer
// that is older than his call, and there is one question at a time.
//
// Threads: thread-safe. Calls block the calling thread.
class SharedListing {
 public:
  using Jobs = std::vector<v1::Job>;

  // Returns what `ask`, or that of another caller, has found since the call
  // began.
  std::shared_ptr<const Jobs> Get(absl::FunctionRef<Jobs()> ask);

  // The number of callers who wait for a question that has not begun, or that
  // another asks.
  size_t waiting() const;

 private:
  mutable absl::Mutex mutex_;
  // Questions that have begun, and that have ended: at most one fewer.
  uint64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  // The answer to the last one, as long as somebody waits for it.
  std::shared_ptr<const Jobs> last_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_SHARED_LISTING_H_
