#ifndef OPTSTATE_SERVER_SUPERVISOR_REFUSAL_H_
#define OPTSTATE_SERVER_SUPERVISOR_REFUSAL_H_

#include "absl/status/status.h"

namespace optstate::supervisor {

// Sends a HelloReply frame with `status` on a fresh, non-blocking connection,
// as far as the peer's buffer takes it (it does, unless the peer filled it on
// purpose), and shuts the connection down. What the peer has sent is read away
// first: closing over unread bytes would reset a TCP connection and could take
// the reply with it.
void SendRefusal(int fd, const absl::Status& status);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_REFUSAL_H_
