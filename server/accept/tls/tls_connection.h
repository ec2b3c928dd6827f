#ifndef OPTSTATE_SERVER_ACCEPT_TLS_TLS_CONNECTION_H_
#define OPTSTATE_SERVER_ACCEPT_TLS_TLS_CONNECTION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/tls/tls_relay.h"
#include "proto/tls/tls_stream.h"
#include "proto/types/unique_fd.h"
#include "server/os/event_loop.h"

namespace optstate::accept {

// One connection of a TCP peer: its handshake, then the relay between the
// network and the end of a socket pair that the rest of the daemon has.
//
// Threads: the loop's. The loop outlives the object.
class TlsConnection {
 public:
  struct Callbacks {
    // The peer does not begin with TLS; nothing was read. on_end follows.
    std::function<void(UniqueFd network)> on_plaintext;
    // The handshake is over. Takes the plain end, and the names in the peer's
    // certificate.
    std::function<void(UniqueFd inside, const std::vector<std::string>& names)>
        on_ready;
    // Called once, when the connection is over; destroys the object. `why` is
    // OK when it was closed in order.
    std::function<void(const absl::Status& why)> on_end;
  };

  // `network` is non-blocking; the handshake ends within `timeout`.
  TlsConnection(os::EventLoop* loop, UniqueFd network,
                std::unique_ptr<tls::TlsStream> stream, absl::Duration timeout,
                Callbacks callbacks);
  ~TlsConnection();
  TlsConnection(const TlsConnection&) = delete;
  TlsConnection& operator=(const TlsConnection&) = delete;

  absl::Status Start();
  // Passes on the bytes that can be passed now; may destroy the object.
  void Pump();
  bool is_shaking_hands() const { return relay_ == nullptr; }
  // Returns whether the connection is one that somebody inside has.
  bool is_established() const {
    return relay_ != nullptr && !relay_->is_ending();
  }

 private:
  void OnNetwork(uint32_t events);
  void ShakeHands();
  // Returns false when the connection is over.
  bool Receive();
  void BeginRelay();
  void OnRelay(uint32_t network, uint32_t inside);
  void UpdateEvents();
  void Refuse(const absl::Status& why);
  void End(const absl::Status& why);

  os::EventLoop* const loop_;
  const absl::Duration timeout_;
  const Callbacks callbacks_;
  UniqueFd network_;                        // until the relay has it
  std::unique_ptr<tls::TlsStream> stream_;  // likewise
  std::unique_ptr<tls::TlsRelay> relay_;
  bool has_begun_ = false;  // the peer has, with TLS
  bool watches_network_ = false;
  bool watches_inside_ = false;
  bool has_timer_ = false;
  os::EventLoop::TimerId timer_;
};

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_TLS_TLS_CONNECTION_H_
