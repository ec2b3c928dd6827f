#ifndef OPTSTATE_SERVER_ADMIN_EVENT_STREAMS_H_
#define OPTSTATE_SERVER_ADMIN_EVENT_STREAMS_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/event_log.h"

namespace optstate::admin {

// Sends events to those who watch them.
//
// A stream keeps a thread of its caller's server as long as it lasts, so their
// number is limited: other calls of the caller must find a thread.
//
// Threads: thread-safe.
class EventStreams {
 public:
  // `log` outlives the object.
  EventStreams(const observe::EventLog* log, size_t streams_max)
      : log_(log), streams_max_(streams_max) {}

  // Passes on the events that were asked for. With `follow` goes on until the
  // deadline, which is OK. RESOURCE_EXHAUSTED: there are too many streams;
  // INVALID_ARGUMENT: no job can have that name; CANCELLED: `pass` has returned
  // false, or `caller`, unless that is null, was cancelled; UNAVAILABLE: End()
  // was called, and all events of before have been passed on.
  absl::Status Send(const v1::WatchEventsRequest& request, absl::Time deadline,
                    const grpc::ServerContext* caller,
                    absl::FunctionRef<bool(const v1::Event&)> pass);

  // Ends all streams shortly, and those that come later at once.
  void End() { ended_ = true; }

 private:
  absl::Status Run(const v1::WatchEventsRequest& request, absl::Time deadline,
                   const grpc::ServerContext* caller,
                   absl::FunctionRef<bool(const v1::Event&)> pass) const;

  const observe::EventLog* const log_;
  const size_t streams_max_;
  std::atomic<size_t> streams_ = 0;
  std::atomic<bool> ended_ = false;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_EVENT_STREAMS_H_
