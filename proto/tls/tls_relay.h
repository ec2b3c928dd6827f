#ifndef OPTSTATE_PROTO_TLS_TLS_RELAY_H_
#define OPTSTATE_PROTO_TLS_TLS_RELAY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "proto/tls/tls_stream.h"
#include "proto/types/unique_fd.h"

namespace optstate::tls {

// Passes the bytes of a connection on between the network, where they are
// encrypted, and an end of a socket pair, where they are plain. Whoever has the
// other end sees a connection like any other.
//
// Either side's half-close is passed on, after all bytes before it. A side that
// does not read stops the other one: at most kBytesMax wait in each direction,
// further ones in the sockets. An end without a close of TLS, as a killed
// process leaves it, is passed on like a close: what is inside has frames, and
// sees when one is cut.
//
// The owner waits for events of both sockets (those of epoll, which poll has
// too) and calls OnEvents().
// Threads: one at a time.
class TlsRelay {
 public:
  static constexpr size_t kBytesMax = 64 << 10;

  // Both sockets are non-blocking; the handshake is over. Bytes that `stream`
  // has taken already are passed on.
  TlsRelay(UniqueFd network, UniqueFd inside, std::unique_ptr<TlsStream> stream)
      : network_(std::move(network)),
        inside_(std::move(inside)),
        stream_(std::move(stream)) {}

  // Handles what epoll or poll says of the sockets (0: nothing), and passes on
  // what can be passed on now. Returns whether the connection goes on; when it
  // does not, status() says how it ended.
  bool OnEvents(uint32_t network, uint32_t inside);
  bool Pump() { return OnEvents(0, 0); }

  // Whether the socket is to be waited for at all: one that has hung up would
  // wake its owner for ever.
  bool watches_network() const { return !network_is_gone_; }
  bool watches_inside() const { return !inside_is_gone_; }
  // The events to wait for; 0: only errors and hang-ups.
  uint32_t network_events() const;
  uint32_t inside_events() const;
  // Returns whether nobody is left inside, and the last bytes are on their way
  // to the network: the owner ends that after a while.
  bool is_ending() const { return inside_is_gone_; }

  int network() const { return network_.get(); }
  int inside() const { return inside_.get(); }
  const absl::Status& status() const { return status_; }
  const TlsStream& stream() const { return *stream_; }

 private:
  enum class Flow { kMoved, kBlocked, kFailed };

  // Each moves one buffer's worth of bytes.
  Flow MoveInward();
  Flow MoveOutward();
  Flow TakeFromNetwork();
  Flow TakeFromInside();
  void ShutNetwork();
  // Return false when the socket is gone.
  bool SendToNetwork();
  bool SendToInside();
  Flow Fail(absl::Status status);

  const UniqueFd network_;
  const UniqueFd inside_;
  const std::unique_ptr<TlsStream> stream_;
  std::string plain_;             // for inside_
  bool network_is_over_ = false;  // it sends nothing more
  bool inside_is_over_ = false;
  bool network_was_shut_ = false;  // it was told that nothing more comes
  bool inside_was_shut_ = false;
  bool network_is_gone_ = false;  // it neither sends nor takes
  bool inside_is_gone_ = false;
  absl::Status status_;
};

}  // namespace optstate::tls

#endif  // OPTSTATE_PROTO_TLS_TLS_RELAY_H_
