#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_SHM_TRANSPORT_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_SHM_TRANSPORT_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/config.pb.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/peer.h"
#include "server/transport/session_table.h"
#include "server/transport/shm/shm_session.h"
#include "server/transport/shm/spin_policy.h"

namespace optstate::transport {

// Serves sessions over shared memory, each on its own thread, so that one
// cannot hold up another.
//
// Threads: thread-safe. Destruction shuts down.
class ShmTransport {
 public:
  struct Options {
    session::Job* job = nullptr;
    SessionTable* table = nullptr;
    FdWatcher* watcher = nullptr;
    v1::EngineSettings settings;
    absl::Duration handshake_timeout = absl::Seconds(5);
    // Called after each session has ended and detached; from its thread.
    std::function<void()> on_session_end = nullptr;
  };

  // All objects in `options` outlive the transport.
  explicit ShmTransport(Options options);
  ~ShmTransport();
  ShmTransport(const ShmTransport&) = delete;
  ShmTransport& operator=(const ShmTransport&) = delete;

  // Serves a connection whose HelloReply was sent.
  void Serve(UniqueFd socket, Peer peer);

  // Sets the timeout of connections that come later.
  void SetHandshakeTimeout(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  // Number of sessions that have not ended.
  size_t session_count() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends all sessions, telling their peers `why`, and refuses new ones. Waits
  // for steps that are being applied.
  void Shutdown(absl::string_view why);

 private:
  // A session and its thread; `session` is guarded by mutex_, except for use by
  // its own thread.
  struct Served {
    std::unique_ptr<ShmSession> session;  // null once it has ended
    std::thread thread;
    std::atomic<bool> ended{false};
  };

  void RunSession(Served* served);
  // Removes ended sessions from sessions_, so that they can be joined unlocked.
  std::list<std::unique_ptr<Served>> TakeEnded()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  SpinPolicy spin_;
  mutable absl::Mutex mutex_;
  std::list<std::unique_ptr<Served>> sessions_ ABSL_GUARDED_BY(mutex_);
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration handshake_timeout_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_SHM_TRANSPORT_H_
