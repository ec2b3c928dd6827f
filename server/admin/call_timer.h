#ifndef OPTSTATE_SERVER_ADMIN_CALL_TIMER_H_
#define OPTSTATE_SERVER_ADMIN_CALL_TIMER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace optstate::admin {

// Cancels calls that take longer than their method may: a reflection call is a
// stream, which keeps a thread of the server as long as its client likes.
//
// A stream of Admin's that may last has a limit for each of its messages: a
// caller that takes none, because it is stopped or its machine is gone, would
// keep a trace or a verification of the job, of which there is one at a time.
//
// Threads: thread-safe. The timer outlives the servers.
class CallTimer {
 public:
  struct Limits {
    absl::Duration reflection = absl::Seconds(10);
    absl::Duration other = absl::Minutes(6);
    // How long a message may wait until the caller takes it.
    absl::Duration message = absl::Minutes(1);
  };

  explicit CallTimer(const Limits& limits);
  ~CallTimer();
  CallTimer(const CallTimer&) = delete;
  CallTimer& operator=(const CallTimer&) = delete;

  // Returns the argument of
  // ServerBuilder::experimental().SetInterceptorCreators().
  std::vector<
      std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
  Interceptors();

  // How long a call of this method may take. Health checks have no limit,
  // because they keep no thread; nor has a verification, a trace, or a job's
  // way to sleep or awake, which only those who may change the job begin, one
  // at a time.
  absl::Duration LimitOf(absl::string_view method) const;
  // How long each message of such a call may wait.
  absl::Duration MessageLimitOf(absl::string_view method) const;
  // Times the call anew, if it is timed already.
  void Add(grpc::ServerContextBase* call, absl::Time deadline);
  // Stops timing the call, which is not touched afterwards. Idempotent.
  void Remove(grpc::ServerContextBase* call);

 private:
  void Run();

  const Limits limits_;
  absl::Mutex mutex_;
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  // When the thread looks next. A call that is added wakes the thread only if
  // its time ends before that: most calls end long before theirs.
  absl::Time next_look_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::map<grpc::ServerContextBase*, absl::Time> calls_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_CALL_TIMER_H_
