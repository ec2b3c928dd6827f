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
// Threads: the loop's. The loop outlives the object.
class GrpcRefusals {
 public:
  // Refusals in progress at once; further connections are closed without an
  // answer.
  static constexpr size_t kRefusalsMax = 64;

  explicit GrpcRefusals(os::EventLoop* loop) : loop_(loop) {}
  ~GrpcRefusals();
  GrpcRefusals(const GrpcRefusals&) = delete;
  GrpcRefusals& operator=(const GrpcRefusals&) = delete;

  // `connection` begins with HTTP/2's preface, and is non-blocking.
  void Refuse(UniqueFd connection, absl::Status why);

 private:
  struct Refusal {
    UniqueFd fd;
    absl::Status why;
    Http2Frames frames{Http2Frames::Sender::kClient};
    size_t bytes_read = 0;
    bool said = false;
    os::EventLoop::TimerId timer;
  };

  void OnReadable(int fd);
  // Returns false when the connection is over.
  static bool Serve(Refusal* refusal);
  void End(int fd);

  os::EventLoop* const loop_;
  std::unordered_map<int, Refusal> refusals_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_GRPC_REFUSALS_H_
