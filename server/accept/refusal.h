#ifndef OPTSTATE_SERVER_ACCEPT_REFUSAL_H_
#define OPTSTATE_SERVER_ACCEPT_REFUSAL_H_

#include "absl/status/status.h"

namespace optstate::accept {

// Sends a HelloReply frame with `status` on a fresh, non-blocking connection,
// as far as the peer's buffer takes it (it does, unless the peer filled it on
// purpose), and shuts the connection down. The bytes that the peer has sent are
// read and dropped first: closing with unread bytes would reset a TCP
// connection and could lose the reply.
void SendRefusal(int fd, const absl::Status& status);

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_REFUSAL_H_
