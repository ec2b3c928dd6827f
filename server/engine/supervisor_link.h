#ifndef OPTSTATE_SERVER_ENGINE_SUPERVISOR_LINK_H_
#define OPTSTATE_SERVER_ENGINE_SUPERVISOR_LINK_H_

#include <deque>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::engine {

// A message from the supervisor, with the fd that came along.
struct SupervisorMessage {
  v1::SupervisorRequest request;
  UniqueFd fd;
};

// The engine's side of the control socket: one supervisor at a time. A new
// supervisor replaces the previous one; while there is none, the engine waits
// for the next and goes on with everything else.
//
// Threads: Send() from any thread; everything else from one.
class SupervisorLink {
 public:
  // `listener` is from ListenForSupervisor(). With `ends_with_supervisor` the
  // end of a connection is the end of the engine.
  static absl::StatusOr<std::unique_ptr<SupervisorLink>> Start(
      UniqueFd listener, bool ends_with_supervisor);

  // Readable when Receive() has something to do.
  int fd() const { return epoll_.get(); }

  // Returns the supervisor's next message. Each supervisor's first message is
  // Supervise, which comes with an fd, as KeptGradients and AdoptConnection do;
  // other messages were refused and logged. nullopt: nothing now, or ended().
  std::optional<SupervisorMessage> Receive();
  // Receives what is there, and keeps it for Receive(): while the engine is
  // busy with something else, the next supervisor is accepted and can be sent
  // to. In the place of Receive(), not beside it.
  void Collect();

  // Returns whether the supervisor said Stop, or is gone and the engine ends
  // with it.
  bool ended() const { return ended_; }

  // Returns false when there is no supervisor, or it does not read just now. In
  // the latter case fd() becomes readable when it does, and TakeWritable()
  // returns true.
  bool Send(const v1::EngineEvent& event, int fd = -1);
  bool TakeWritable();

 private:
  SupervisorLink(UniqueFd listener, UniqueFd epoll, UniqueFd collected,
                 bool ends_with_supervisor);

  bool WatchForInput(int fd);
  // Receives from the supervisor what was not collected.
  std::optional<SupervisorMessage> ReceiveNext();
  // Accepts the next supervisor; false: none waits.
  bool AcceptNext();
  void Disconnect();
  // Receives one message; nullopt: none now.
  std::optional<SupervisorMessage> ReceiveFrom(int connection);
  bool IsWelcome(const SupervisorMessage& message);
  void Watch(int operation, uint32_t events)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const UniqueFd listener_;
  const UniqueFd epoll_;
  const UniqueFd collected_event_;  // readable while something is collected
  const bool ends_with_supervisor_;
  std::deque<SupervisorMessage> collected_;
  bool ended_ = false;
  bool supervised_ = false;  // Supervise was received

  absl::Mutex mutex_;
  // Closed and replaced under the mutex; the one thread that does so may read
  // it without the mutex.
  UniqueFd connection_;
  // Nothing is sent to a supervisor that has not introduced itself.
  bool may_send_ ABSL_GUARDED_BY(mutex_) = false;
  bool awaits_room_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_SUPERVISOR_LINK_H_
