#ifndef OPTSTATE_CLIENT_COLLECTIVE_TCP_MESH_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TCP_MESH_H_

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/collective/tcp/frame.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// The payloads of one exchange with one peer.
struct PeerPayloads {
  absl::Span<const std::byte> send;
  absl::Span<std::byte> receive;
};

// One rank's sockets to all others, and the one thing that it does with them:
// an exchange, in which every pair of ranks sends each other a frame. All
// operations are made of exchanges.
//
// An exchange reads nothing beyond its own frames, so a peer that is further
// on waits in its sockets. A peer that fails sends an abort and closes its
// side; that is noticed at once, whatever else is awaited.
//
// Threads: one at a time, but for Wake().
class Mesh {
 public:
  // `sockets`: by rank, connected and non-blocking; at `rank` there is none.
  // RESOURCE_EXHAUSTED: no descriptor for the wake-up.
  static absl::StatusOr<std::unique_ptr<Mesh>> Make(
      uint32_t rank, std::vector<UniqueFd> sockets);

  // Sends each peer a frame with its payload, and receives one from each.
  //
  // `frame`: of this rank; `payloads`: by rank, each peer's. The errors are
  // those of Collective; after one the mesh is of no use but for Leave().
  absl::Status Exchange(const Frame& frame,
                        absl::Span<const PeerPayloads> payloads,
                        absl::Time deadline);

  // Makes Exchange() return ABORTED, now and in future.
  void Wake();

  // Tells the peers why this rank leaves, as far as its sockets take it, and
  // sends nothing more. A text that came from another rank is passed on as it
  // is.
  void Leave(const absl::Status& why);

 private:
  // The exchange under way with one peer.
  struct Link {
    UniqueFd socket;
    Frame::Bytes head_out = {};
    size_t sent = 0;        // of head and payload
    size_t send_bytes = 0;  // likewise, in all
    Frame::Bytes head_in = {};
    size_t received = 0;
    size_t receive_bytes = 0;
    bool is_closed = false;  // by the peer, after its frame had come
    bool is_sent() const { return sent == send_bytes; }
    bool is_received() const { return received == receive_bytes; }
  };

  Mesh(uint32_t rank, std::vector<UniqueFd> sockets, UniqueFd wake);

  // Lists the sockets to wait for; returns whether the exchange goes on.
  bool ListPolls();
  absl::Status Advance(uint32_t peer, const PeerPayloads& payloads,
                       int16_t events);
  absl::Status Send(uint32_t peer, const PeerPayloads& payloads);
  absl::Status Receive(uint32_t peer, const PeerPayloads& payloads);
  // Looks at what follows the frame of a peer that has sent it all.
  absl::Status LookBehind(uint32_t peer);
  absl::Status CheckHead(uint32_t peer, const PeerPayloads& payloads);
  // Reads the text of an abort whose head was read.
  absl::Status ReadAbort(uint32_t peer, const Frame& head);
  absl::Status Lost(uint32_t peer, int error) const;
  absl::Status TimedOut() const;

  const uint32_t rank_;
  std::vector<Link> links_;  // by rank
  UniqueFd wake_;            // an eventfd
  Frame frame_;              // of the exchange under way
  std::vector<pollfd> polls_;
  std::vector<uint32_t> polled_;  // the peers of polls_, after the first
  // The rank that failed first, where this rank learned it from a peer.
  uint32_t failed_rank_;
  std::string failed_text_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TCP_MESH_H_
