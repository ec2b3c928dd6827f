#ifndef OPTSTATE_SERVER_TRANSPORT_MESSAGE_PATIENCE_H_
#define OPTSTATE_SERVER_TRANSPORT_MESSAGE_PATIENCE_H_

#include <cstdint>

#include "absl/time/time.h"

namespace optstate {

// Bytes that a connection has brought so far, as the kernel counts them: those
// over TCP, and on every socket those that nobody has read yet.
struct Arrived {
  uint64_t received_bytes = 0;  // over TCP; else 0
  uint64_t unread_bytes = 0;
};

Arrived ArrivedOn(int socket);

// How long the next message of a peer is waited for: as long as its bytes come,
// for a large registration may take minutes over a slow link, and not for ever.
//
// Looked at once in each `period`. Not thread-safe.
class MessagePatience {
 public:
  // Of a message of the largest size over a link of two megabits per second.
  static constexpr absl::Duration kMost = absl::Minutes(5);
  // Fewer in a period are no progress.
  static constexpr uint64_t kBytesMin = 4096;

  explicit MessagePatience(absl::Duration most = kMost) : most_(most) {}

  // From here on the peer's time counts.
  void Begin(absl::Time now, const Arrived& arrived);
  // Whether a message that is not whole a period after the last look, or
  // Begin(), is waited for one more.
  bool Lasts(absl::Time now, const Arrived& arrived);

 private:
  const absl::Duration most_;
  absl::Time begin_;
  uint64_t received_bytes_ = 0;  // at the last look
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_TRANSPORT_MESSAGE_PATIENCE_H_
