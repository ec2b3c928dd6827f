#ifndef OPTSTATE_SERVER_ADMIN_CONNECTION_UIDS_H_
#define OPTSTATE_SERVER_ADMIN_CONNECTION_UIDS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/unique_fd.h"
#include "server/access/caller.h"

namespace optstate::admin {

using access::Caller;

// Remembers which caller is behind which gRPC connection.
//
// gRPC shows a call's connection only as "fd:N" (of a server that was given
// fds), and closes the fd at any time. So a call that is still running could
// find that N belongs to another caller by now. Therefore a number that one
// caller has had is never given to a connection of another (who may differ in
// the role or the way alone), as long as the process lives: connections are
// moved (dup) to numbers of their caller.
//
// The connections of one user are bounded, and those of strangers together by
// kStrangersConnectionsMax, which bounds the numbers taken. Numbers from
// FirstNumber() on are used, above those of everything else in the process.
//
// Threads: thread-safe.
class ConnectionUids {
 public:
  static constexpr size_t kStrangersConnectionsMax = 256;

  explicit ConnectionUids(size_t connections_of_user)
      : connections_of_user_(connections_of_user) {}

  // Half of the process's limit of open fds, 512 at most.
  static int FirstNumber();

  // Returns RESOURCE_EXHAUSTED, naming the limit, when the caller, or strangers
  // together, have too many connections.
  absl::Status CheckRoom(const Caller& caller) const;

  // Moves the connection to a number of `caller`; returns the number, which the
  // calling code owns and passes to gRPC. RESOURCE_EXHAUSTED: the process is
  // out of file descriptors.
  absl::StatusOr<int> Move(UniqueFd connection, const Caller& caller);

  size_t CountOpen(const Caller& caller) const;

  // Finds the caller of `peer`, a grpc::ServerContext::peer(). NOT_FOUND: no
  // connection moved here.
  absl::StatusOr<Caller> Find(absl::string_view peer) const;

 private:
  struct Slot {
    bool used = false;
    Caller caller;
    ino_t inode = 0;  // of the number's last connection
  };

  template <typename Counts>
  size_t CountOpenIf(const Counts& counts) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t connections_of_user_;
  const int first_ = FirstNumber();
  mutable absl::Mutex mutex_;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);  // [N - first_]
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_CONNECTION_UIDS_H_
