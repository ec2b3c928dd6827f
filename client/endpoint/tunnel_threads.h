#ifndef OPTSTATE_CLIENT_ENDPOINT_TUNNEL_THREADS_H_
#define OPTSTATE_CLIENT_ENDPOINT_TUNNEL_THREADS_H_

#include <memory>

#include "absl/status/status.h"
#include "proto/tls/tls_relay.h"

namespace optstate::client {

// Runs a relay on a thread of its own until its connection is over. Threads end
// with the process, before OpenSSL's own end. RESOURCE_EXHAUSTED: there is no
// thread to be had.
//
// Threads: thread-safe. A forked child has none of its parent's relays, and
// its copies of their sockets are closed.
absl::Status RunRelay(std::unique_ptr<tls::TlsRelay> relay);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_TUNNEL_THREADS_H_
