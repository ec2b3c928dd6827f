#ifndef OPTSTATE_SERVER_TRANSPORT_PEER_H_
#define OPTSTATE_SERVER_TRANSPORT_PEER_H_

#include <cstdint>

#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::transport {

// The process at the other end of a connection: the data of its Hello, and the
// kernel's credentials of it (SO_PEERCRED, read when the connection was
// accepted).
struct Peer {
  v1::Hello hello;
  uint32_t uid = 0;
  int64_t pid = 0;  // 0: unknown (TCP, or another pid namespace)
};

// Detects whether a peer is still there.
//
// A hung-up socket alone is not enough: children that the trainer forked (data
// loaders) hold a copy of it and may outlive the trainer. So the process is
// checked as well where its pid is known.
//
// Threads: thread-safe; everything is fixed at construction.
class PeerLink {
 public:
  // Borrows `socket`, which must stay open as long as this object.
  PeerLink(int socket, int64_t pid);

  // Returns whether the peer has hung up or half closed, or its process has
  // ended.
  bool IsGone() const;

  int socket() const { return socket_; }
  // A pidfd that becomes readable when the process ends; -1: it cannot be
  // watched.
  int process() const { return process_.get(); }

 private:
  int socket_;
  UniqueFd process_;
  bool was_gone_ = false;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_PEER_H_
