#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_SESSION_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_SESSION_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/session.pb.h"
#include "server/session/job.h"
#include "server/transport/grpc/parameter_sender.h"
#include "server/transport/grpc/reply_queue.h"
#include "server/transport/peer.h"
#include "server/transport/session_handler.h"
#include "server/transport/session_table.h"
#include "server/transport/session_traffic.h"
#include "storage/state_file.h"

namespace optstate::transport {

// One rank's session over a stream, without the stream: takes requests one
// after another and puts replies into a queue. Knows nothing of gRPC.
//
// Gradients arrive in chunks and lie in a staging file of the job's directory
// until they are pushed. The file is allocated when the rank attaches, so that
// no step fails for want of memory, and outlives the engine
// (session::Job::MakeStaging).
//
// Threads: Handle() and Detach() by the thread that reads requests; answers to
// steps come from others.
class GrpcSession : public session::SessionListener {
 public:
  // `job`, `table`, `link` and `replies` outlive the session.
  GrpcSession(session::Job* job, SessionTable* table, Peer peer,
              const PeerLink* link, ReplyQueue* replies,
              std::function<void()> interrupt);

  // Carries out one request. An error ends the stream: a request that is no
  // request, or a chunk, which has no reply, in the wrong place. CANCELLED is
  // an orderly end: a detach, or a peer that reads no replies any more.
  absl::Status Handle(const v1::SessionRequest& request);
  // Returns the address to which a gradient chunk of that size is to be copied;
  // an error ends the stream. For a caller that has the bytes in another form
  // than a message.
  absl::StatusOr<std::byte*> StagingFor(uint64_t offset_bytes,
                                        uint64_t data_bytes);
  // Drops staged gradients; idempotent.
  void Detach(absl::string_view reason) { handler_.Detach(reason); }

  bool attached() const { return handler_.attached(); }
  const SessionTraffic& traffic() const { return handler_.traffic(); }
  // The sender of parameters of open steps; for the thread that writes replies.
  ParameterSender& parameters() { return parameters_; }
  std::string Name() const { return handler_.Name(); }

  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const session::StepOutcome& outcome) override;
  void OnNotice(absl::string_view text) override;

 private:
  absl::Status Stage(const v1::GradientChunk& chunk);
  // Queues a reply for which there is room, and counts it.
  void Reply(v1::SessionReply reply);
  // Answers a request that has one reply, given before Handle() returns.
  v1::SessionReply Answer(const v1::SessionRequest& request);
  absl::StatusOr<v1::AttachReply> Attach(const v1::AttachRequest& request);
  // Attaches a claimed rank; whatever was made for that stays after an error.
  absl::StatusOr<v1::AttachReply> AttachClaimed(AttachPlan* plan);
  absl::Status Load(const v1::LoadRequest& request);
  absl::Status Fetch(const v1::FetchRequest& request, v1::FetchReply* reply);
  // Starts a request whose reply comes later.
  absl::Status StartEndMicroStep(const v1::SessionRequest& request);
  absl::Status StartCommit(const v1::SessionRequest& request);
  absl::Status StartDecide(const v1::SessionRequest& request);
  absl::Status StartFinishLoad(const v1::SessionRequest& request);
  absl::Status SendParameters(uint64_t request_id);

  session::Job* const job_;
  SessionHandler handler_;
  ReplyQueue* const replies_;
  std::optional<storage::StateFile> staging_;
  ParameterSender parameters_;
  uint64_t gradient_area_bytes_ = 0;
  uint64_t parameter_area_bytes_ = 0;
  // Number of unanswered commits; while there are any, the staging area is
  // being read.
  std::atomic<uint32_t> pending_{0};
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_SESSION_H_
