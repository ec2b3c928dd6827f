#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_SHM_SESSION_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_SHM_SESSION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"
#include "server/session/wire_counters.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/gradient_pages.h"
#include "server/transport/peer.h"
#include "server/transport/session_handler.h"
#include "server/transport/session_table.h"
#include "server/transport/shm/completion_writer.h"
#include "server/transport/shm/ring_server.h"
#include "server/transport/shm/shm_segments.h"
#include "server/transport/shm/spin_policy.h"

namespace optstate::transport {

// One rank's session over shared memory: frames on the socket until it is
// attached, then the rings, and frames for what comes with fds; a detach frame
// or the end of the peer ends it.
//
// A session that the engine ends (a broken protocol, a shutdown) sends the
// reason on the socket, as a SessionReply with request_id 0, before it closes
// it. Notices are sent the same way; those that a peer leaves no room for are
// dropped.
//
// Threads: Run() by one thread; Stop() by any.
class ShmSession {
 public:
  struct Environment {
    session::Job* job = nullptr;
    SessionTable* table = nullptr;
    FdWatcher* watcher = nullptr;
    SpinPolicy* spin = nullptr;
    absl::Duration handshake_timeout = absl::Seconds(5);
  };

  // All objects in `environment` outlive the session.
  ShmSession(UniqueFd socket, Peer peer, const Environment& environment);
  ShmSession(const ShmSession&) = delete;
  ShmSession& operator=(const ShmSession&) = delete;

  // Serves the session until it ends; it is detached when this returns.
  void Run();
  // Makes Run() return soon; the peer is told `why` unless it is gone.
  void Stop(absl::string_view why) ABSL_LOCKS_EXCLUDED(stop_mutex_);

 private:
  // Serves until the session ends; the status says why: CANCELLED is an end by
  // the peer's request or death; any other status is sent to the peer.
  absl::Status Serve();
  absl::Status Handshake();
  absl::Status AnswerRegister(const v1::SessionRequest& request);
  absl::Status AnswerPosition(const v1::SessionRequest& request);
  absl::Status AnswerDecide(const v1::SessionRequest& request);
  absl::Status AnswerAttach(shm::Frame frame,
                            const v1::SessionRequest& request);
  absl::Status AnswerDetach(const v1::SessionRequest& request);
  absl::Status AnswerShareParameters(const v1::SessionRequest& request);
  absl::Status AnswerShareGradients(shm::Frame frame,
                                    const v1::SessionRequest& request);
  absl::StatusOr<v1::AttachReply> Attach(shm::Frame frame,
                                         const v1::AttachRequest& request,
                                         AttachPlan* plan);
  absl::Status ExpectPages(AttachPlan* plan);
  absl::Status WatchPeer();
  absl::Status ServeRing();
  absl::Status CheckEvents();
  absl::Status AnswerSocket();
  void NoteNotice(absl::string_view text) ABSL_LOCKS_EXCLUDED(notice_mutex_);
  void SendNotices() ABSL_LOCKS_EXCLUDED(notice_mutex_);
  void End(const absl::Status& why);

  absl::StatusOr<v1::SessionRequest> Receive(absl::Time deadline,
                                             shm::Frame* frame);
  absl::Status Send(const v1::SessionReply& reply, absl::Span<const int> fds);
  session::WireCounters::QueueLengths Queues() const;
  absl::Status StopReason() const ABSL_LOCKS_EXCLUDED(stop_mutex_);

  const UniqueFd socket_;
  const PeerLink link_;
  const Environment environment_;
  SessionHandler handler_;
  absl::Time handshake_deadline_;

  // Held from the parsing of a large request until its answer.
  std::optional<absl::MutexLock> large_;

  std::optional<ShmSegments> segments_;
  std::optional<GradientPages> pages_;  // none: all were there at the attach
  std::unique_ptr<CompletionWriter> writer_;
  std::unique_ptr<RingServer> ring_;

  // Set by the watcher's thread, which then interrupts ring_.
  std::atomic<bool> socket_event_{false};
  std::atomic<bool> process_ended_{false};
  std::optional<FdWatcher::Id> socket_watch_;
  std::optional<FdWatcher::Id> process_watch_;

  // Set by other ranks' threads, which then interrupt ring_.
  std::atomic<bool> has_notices_{false};
  absl::Mutex notice_mutex_;
  std::vector<std::string> notices_ ABSL_GUARDED_BY(notice_mutex_);

  std::atomic<bool> stop_{false};
  mutable absl::Mutex stop_mutex_;
  std::string stop_reason_ ABSL_GUARDED_BY(stop_mutex_);
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_SHM_SESSION_H_
