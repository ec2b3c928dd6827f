#ifndef OPTSTATE_SERVER_ADMIN_GUARDED_CONNECTION_H_
#define OPTSTATE_SERVER_ADMIN_GUARDED_CONNECTION_H_

#include <sys/epoll.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/admin/http2_frames.h"
#include "server/os/event_loop.h"

namespace optstate::admin {

// Passes one connection's bytes, both ways, between a peer and gRPC. See
// grpc_gate.h.
//
// Threads: the loop's. The loop outlives the object.
class GuardedConnection {
 public:
  struct Callbacks {
    // Takes units from the peer's budget; returns how long the peer has to wait
    // before it may send more.
    std::function<absl::Duration(double units)> charge;
    // Called when the connection is over; destroys the object.
    std::function<void()> on_end;
  };

  // Both fds are non-blocking.
  GuardedConnection(os::EventLoop* loop, UniqueFd peer, UniqueFd grpc,
                    Callbacks callbacks);
  ~GuardedConnection();
  GuardedConnection(const GuardedConnection&) = delete;
  GuardedConnection& operator=(const GuardedConnection&) = delete;

  absl::Status Start();
  // Passes on the bytes that can be passed now; may destroy the object.
  void Pump();

 private:
  // Bytes on their way in one direction.
  struct Flow {
    explicit Flow(Http2Frames::Sender sender) : frames(sender) {}
    std::string bytes;
    Http2Frames frames;
  };
  enum class Outcome { kNothing, kBytes, kOver };

  // Returns false when the connection is over.
  bool PumpToGrpc();
  bool PumpToPeer();
  Outcome Read(int from, Flow* flow);
  static bool Write(int to, std::string* bytes);
  void Charge();
  void Refuse(const absl::Status& why);
  void OnGrpcClosed();
  void UpdateEvents();
  void End();

  os::EventLoop* const loop_;
  const UniqueFd peer_;
  const UniqueFd grpc_;
  const Callbacks callbacks_;
  Flow to_grpc_{Http2Frames::Sender::kClient};
  Flow to_peer_{Http2Frames::Sender::kServer};
  uint64_t frames_charged_ = 0;
  bool waits_ = false;  // for the peer's budget
  bool grpc_closed_ = false;
  // The events that the loop waits for.
  uint32_t peer_events_ = EPOLLIN;
  uint32_t grpc_events_ = EPOLLIN;
  os::EventLoop::TimerId wait_timer_;
  os::EventLoop::TimerId end_timer_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_GUARDED_CONNECTION_H_
