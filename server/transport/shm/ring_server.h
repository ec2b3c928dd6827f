#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_RING_SERVER_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_RING_SERVER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/shm/ring.h"
#include "proto/types/optimizer.h"
#include "server/transport/gradient_pages.h"
#include "server/transport/session_handler.h"
#include "server/transport/shm/completion_writer.h"
#include "server/transport/shm/shm_segments.h"

namespace optstate::transport {

// Takes submissions from a session's ring, one at a time, and ensures that each
// gets its answer.
//
// The peer's memory is not trusted: an entry is copied once, then checked. An
// entry that is merely wrong (a range, a dtype) is answered with an error; one
// that breaks the protocol (impossible indices, an unknown op, a request_id out
// of order) makes the function return an error, and the session has to end.
//
// Allocates nothing once constructed, except for loads of step counts and for
// errors. Threads: one at a time; Interrupt() by any.
class RingServer {
 public:
  // All arguments outlive the server. `pages`: null when all were there at the
  // attach.
  RingServer(const ShmSegments* segments, SessionHandler* handler,
             CompletionWriter* writer, uint64_t group_count,
             GradientPages* pages);

  // Serves one submission. kEmpty: there is none, or the peer has not read its
  // answers; call Wait().
  absl::StatusOr<shm::Poll> ServeOne();
  // Does some of what the rank's pushes allow, when ServeOne() has nothing to
  // serve. Returns whether there may be more to do: look at the ring again
  // before the next part of it.
  bool WorkAhead();
  void Wait(absl::Duration spin, absl::Duration sleep);
  void Interrupt() { consumer_.Interrupt(); }

 private:
  absl::Status CheckRequestId(uint64_t request_id);
  absl::Status Serve(const shm::Submission& submission);
  absl::Status Push(const shm::Submission& submission);
  absl::Status ServeCommit(const shm::Submission& submission);
  absl::Status ServeLoad(const shm::Submission& submission);
  absl::Status ServeFetch(const shm::Submission& submission);
  void ReadCommitGroups();
  absl::Status Answer(uint64_t request_id, const absl::Status& status);

  const ShmSegments* const segments_;
  SessionHandler* const handler_;
  CompletionWriter* const writer_;
  GradientPages* const pages_;
  shm::RingConsumer<shm::Submission> consumer_;
  uint64_t taken_ = 0;
  bool answers_unread_ = false;
  // It has pushed or committed since WorkAhead() had nothing to do.
  bool may_work_ahead_ = false;
  std::optional<uint64_t> last_request_id_;
  std::vector<shm::CommitGroup> commit_groups_;
  std::vector<Hyperparams> hyperparams_;
  std::vector<uint32_t> clips_with_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_RING_SERVER_H_
