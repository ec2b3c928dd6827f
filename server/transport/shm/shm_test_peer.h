#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_SHM_TEST_PEER_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_SHM_TEST_PEER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/shm/ring.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"

namespace optstate::transport {

// The client's side of a session over shared memory, written out by hand from
// the protocol, for tests of the engine's side: it does each thing right, and
// lets a test do any of them wrong.
//
// Size: one short method for each right and each wrong thing.
//
// Threads: one at a time.
class ShmTestPeer {
 public:
  // protocol_version: what its Hello named, which decides on its segment.
  ShmTestPeer(UniqueFd socket, Layout layout, uint32_t world_size,
              uint32_t rank, uint32_t protocol_version = shm::kProtocolVersion);

  int socket() const { return socket_.get(); }
  const RankPartition& partition() const { return partition_; }

  v1::SessionRequest RegisterRequest() const;
  v1::SessionRequest AttachRequest() const;
  // Makes a valid segment; `change` may corrupt its header.
  shm::SealedSegment MakeSegment(
      const std::function<void(shm::ClientHeader*)>& change = nullptr,
      shm::SealedSegment::Pages pages =
          shm::SealedSegment::Pages::kMapped) const;
  // Makes a segment without the pages of its gradients.
  shm::SealedSegment MakeSegmentWithoutGradients() const;
  const shm::ClientSegmentLayout& segment_layout() const {
    return segment_layout_;
  }

  absl::Status Send(const v1::SessionRequest& request,
                    absl::Span<const int> fds = {});
  // Receives the next frame. After an attach the two segments are mapped; other
  // fds are those of received_fds.
  absl::StatusOr<v1::SessionReply> Receive();
  // Receives until the engine closes; returns the status of its last reply.
  absl::Status AwaitEnd();

  absl::Status Register();
  // Sends an attach with `segment`, which the peer keeps, without awaiting the
  // reply.
  absl::Status SendAttach(shm::SealedSegment segment);
  absl::Status Attach(shm::SealedSegment segment);
  absl::Status Open();  // both, with a good segment

  struct Answer {
    shm::Completion completion;
    absl::Status status;
  };
  // Publishes a submission with the next request_id; returns that.
  uint64_t Submit(shm::Submission submission);
  // Waits for the next completion.
  Answer Await();
  Answer Call(const shm::Submission& submission) {
    Submit(submission);
    return Await();
  }
  shm::Submission Push(uint64_t step) const;
  shm::Submission Commit(uint64_t step) const;

  shm::ClientHeader* header() const;
  std::byte* gradient_area() const;
  std::byte* load_window() const;
  shm::CommitSettings* commit_settings() const;
  shm::CommitGroup* commit_groups() const;
  const std::byte* fetch_window() const;
  const std::byte* parameters() const { return parameters_.data(); }

  std::vector<UniqueFd> received_fds;
  uint64_t next_request_id = 1;
  bool takes_notices = false;
  bool pages_follow = false;

 private:
  absl::Status MapReply(std::vector<UniqueFd> fds);

  UniqueFd socket_;
  const Layout layout_;
  const uint32_t world_size_;
  const uint32_t rank_;
  RankPartition partition_;
  const bool has_lead_;
  shm::ClientSegmentLayout segment_layout_;
  shm::SealedSegment segment_;
  shm::PeerSegment completions_;
  shm::PeerSegment parameters_;
  std::unique_ptr<shm::RingProducer<shm::Submission>> producer_;
  std::unique_ptr<shm::RingConsumer<shm::Completion>> consumer_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_SHM_TEST_PEER_H_
