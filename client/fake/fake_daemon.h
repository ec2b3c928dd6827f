#ifndef OPTSTATE_CLIENT_FAKE_FAKE_DAEMON_H_
#define OPTSTATE_CLIENT_FAKE_FAKE_DAEMON_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/channel/channel.h"

namespace optstate::client {

class FakeDaemonJob;

// An in-memory model of optstated: the same rules on plain vectors, without
// processes, sockets or threads of its own. The model serves tests of code that
// uses a Channel (use the real daemon where the wire or the engine matters) and
// specifies the behaviour of the real implementations: the conformance suite
// runs on both.
//
// A connection is a number; the daemon decides when it is lost.
// Threads: thread-safe.
// Size: one method for each call of a session, and what tests ask.
class FakeDaemon {
 public:
  using Connection = uint64_t;

  FakeDaemon();
  ~FakeDaemon();

  // Registers and attaches the rank.
  absl::StatusOr<Connection> Open(const ChannelSetup& setup, bool must_exist,
                                  const std::byte* gradient_area,
                                  Attached* attached);
  void Close(Connection connection);
  // Counts the call and nothing else: the model awaits no rank.
  absl::Status Farewell();
  int farewells() const;
  bool connected(Connection connection) const;
  absl::Span<const std::byte> parameter_area(Connection connection) const;

  absl::Status Push(Connection connection, const PushRange& range);
  absl::Status StartCommit(Connection connection, const CommitOptions& options);
  absl::StatusOr<Outcome> WaitCommit(Connection connection, absl::Time deadline,
                                     const InterruptCheck& interrupted);
  absl::Status Abort(Connection connection, uint64_t step);
  absl::Status BeginLoad(Connection connection);
  absl::Status Load(Connection connection, StateArray array, uint32_t parameter,
                    uint64_t begin, DType dtype,
                    absl::Span<const std::byte> data);
  absl::Status FinishLoad(Connection connection, const LoadEnd& end,
                          absl::Time deadline);
  absl::StatusOr<uint64_t> Fetch(Connection connection, StateArray array,
                                 uint32_t parameter, uint64_t begin,
                                 absl::Span<std::byte> out);

  // Faults. LoseConnections acts like the death of every engine: connections
  // and staged gradients are lost; committed steps stay.
  void LoseConnections();
  // Applies the next commit that completes a step, but loses its answers with
  // the connections.
  void LoseConnectionsAfterNextStep();
  // Loses the answers of the next load that every rank has finished.
  void LoseConnectionsAfterNextLoad();
  // Is of a build that does not know LoadEnd::begin_at, from now on.
  void ForgetBeginAt();
  // Fails the next `count` attempts to open as if no daemon were there.
  void RefuseOpens(int count);

 private:
  struct Seat {
    FakeDaemonJob* job = nullptr;
    uint32_t rank = 0;
  };

  absl::StatusOr<Seat> Find(Connection connection) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LoseAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Done>
  absl::Status Await(Connection connection, absl::Time deadline,
                     const InterruptCheck& interrupted, const Done& done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<FakeDaemonJob>> jobs_
      ABSL_GUARDED_BY(mutex_);
  std::map<Connection, Seat> seats_ ABSL_GUARDED_BY(mutex_);
  Connection last_connection_ ABSL_GUARDED_BY(mutex_) = 0;
  int refuse_opens_ ABSL_GUARDED_BY(mutex_) = 0;
  int farewells_ ABSL_GUARDED_BY(mutex_) = 0;
  bool lose_after_step_ ABSL_GUARDED_BY(mutex_) = false;
  bool lose_after_load_ ABSL_GUARDED_BY(mutex_) = false;
  bool takes_begin_at_ ABSL_GUARDED_BY(mutex_) = true;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_FAKE_FAKE_DAEMON_H_
