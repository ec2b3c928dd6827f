#ifndef OPTSTATE_SERVER_ADMIN_GRPC_REFUSALS_H_
#define OPTSTATE_SERVER_ADMIN_GRPC_REFUSALS_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "absl/status/status.h"
#include "proto/types/unique_fd.h"
#include "server/admin/http2_frames.h"
#include "server/os/event_loop.h"

namespace optstate::admin {

// Tells connections that are not passed to gRPC why they are refused, as the
// answer to their first call: every gRPC library shows that answer to its
// caller, and none shows why a connection was closed.
//
// When all places are taken, a peer who has fewer of them than another gets the
// oldest of the one with the most, so that a flood by one user leaves others
// their answers. Peers are the users of this machine. All that come over TCP
// count as one; what comes out of TLS comes from the daemon's own user.
//
// Threads: the loop's. The loop outlives the object.
class GrpcRefusals {
 public:
  // Refusals in progress at once; connections that get no place are closed
  // without an answer.
  static constexpr size_t kRefusalsMax = 64;

  explicit GrpcRefusals(os::EventLoop* loop) : loop_(loop) {}
  ~GrpcRefusals();
  GrpcRefusals(const GrpcRefusals&) = delete;
  GrpcRefusals& operator=(const GrpcRefusals&) = delete;

  // `connection` begins with HTTP/2's preface, and is non-blocking.
  void Refuse(UniqueFd connection, absl::Status why);

 private:
  // A user's number, or kOverTcp.
  using Peer = int64_t;
  static constexpr Peer kOverTcp = -1;

  struct Refusal {
    UniqueFd fd;
    Peer peer = kOverTcp;
    uint64_t number = 0;  // ascends
    absl::Status why;
    Http2Frames frames{Http2Frames::Sender::kClient};
    size_t bytes_read = 0;
    bool said = false;
    os::EventLoop::TimerId timer;
  };

  static Peer PeerOf(int fd);
  // Ends a refusal of another peer; returns false when none has too many.
  bool MakeRoomFor(Peer peer);
  void OnReadable(int fd);
  // Returns false when the connection is over.
  static bool Serve(Refusal* refusal);
  void End(int fd);

  os::EventLoop* const loop_;
  uint64_t next_number_ = 0;
  std::unordered_map<int, Refusal> refusals_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_GRPC_REFUSALS_H_
