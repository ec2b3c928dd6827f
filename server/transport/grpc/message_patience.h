#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_MESSAGE_PATIENCE_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_MESSAGE_PATIENCE_H_

#include <cstdint>

#include "absl/time/time.h"

namespace optstate::transport {

// Bytes that have arrived on a connection, as the kernel counts them: all bytes
// over TCP, and on every socket those that are unread.
struct Arrived {
  uint64_t received_bytes = 0;  // over TCP; else 0
  uint64_t unread_bytes = 0;
};

Arrived ArrivedOn(int socket);

// Decides how long to wait for a peer's next message: as long as its bytes
// arrive, because a large registration may take minutes over a slow link, but
// not for ever.
//
// Threads: not thread-safe. Its owner asks it once in each period.
class MessagePatience {
 public:
  // The time of a message of the largest size over a link of two megabits per
  // second.
  static constexpr absl::Duration kMost = absl::Minutes(5);
  // Fewer bytes in a period are no progress.
  static constexpr uint64_t kBytesMin = 4096;

  explicit MessagePatience(absl::Duration most = kMost) : most_(most) {}

  // Starts counting the peer's time.
  void Begin(absl::Time now, const Arrived& arrived);
  // Returns whether to wait one more period for a message that is incomplete a
  // period after the last call, or after Begin().
  bool Lasts(absl::Time now, const Arrived& arrived);

 private:
  const absl::Duration most_;
  absl::Time begin_;
  uint64_t received_bytes_ = 0;  // at the last call
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_MESSAGE_PATIENCE_H_
