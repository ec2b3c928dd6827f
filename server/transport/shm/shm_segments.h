#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_SHM_SEGMENTS_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_SHM_SEGMENTS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/unique_fd.h"
#include "server/transport/session_handler.h"

namespace optstate::transport {

// The two segments of one session over shared memory, as the engine sees them:
// the client's, read-only and checked, and its own for the answers.
//
// Move-only. Nothing here reads the client's memory again after Open(), except
// through the accessors' results.
class ShmSegments {
 public:
  // Maps the client's segment and creates the completion segment.
  // INVALID_ARGUMENT naming the field that does not fit the plan;
  // RESOURCE_EXHAUSTED when there is no memory for the completion segment.
  static absl::StatusOr<ShmSegments> Open(UniqueFd client,
                                          const AttachPlan& plan);

  uint64_t gradient_offset_bytes() const { return layout_.gradient_area; }
  uint64_t client_bytes() const { return client_.size(); }
  int completion_fd() const { return completion_.fd(); }

  shm::RingSide* engine_ring() const {
    return &reinterpret_cast<shm::CompletionHeader*>(completion_.data())->ring;
  }
  const shm::RingSide* client_ring() const {
    return &reinterpret_cast<const shm::ClientHeader*>(client_.data())->ring;
  }
  const shm::Submission* submissions() const {
    return reinterpret_cast<const shm::Submission*>(
        client_.data() + shm::ClientSegmentLayout::kRing);
  }
  shm::Completion* completions() const {
    return reinterpret_cast<shm::Completion*>(
        completion_.data() + shm::CompletionSegmentLayout::kRing);
  }
  // Text of the completion with this index in the ring.
  char* text(uint64_t index) const {
    return reinterpret_cast<char*>(completion_.data() +
                                   shm::CompletionSegmentLayout::kText +
                                   index % shm::kRingEntries * shm::kTextBytes);
  }
  const shm::CommitSettings* commit_settings() const {
    return reinterpret_cast<const shm::CommitSettings*>(
        client_.data() + shm::ClientSegmentLayout::kSettings);
  }
  const shm::CommitGroup* commit_groups() const {
    return reinterpret_cast<const shm::CommitGroup*>(
        client_.data() + shm::ClientSegmentLayout::kGroups);
  }
  absl::Span<const std::byte> load_window() const {
    return {client_.data() + layout_.load_window, shm::kWindowBytes};
  }
  absl::Span<std::byte> fetch_window() const {
    return {completion_.data() + shm::CompletionSegmentLayout::kFetchWindow,
            shm::kWindowBytes};
  }
  const std::byte* gradient_area() const {
    return client_.data() + layout_.gradient_area;
  }

 private:
  ShmSegments(shm::PeerSegment client, shm::SealedSegment completion,
              shm::ClientSegmentLayout layout);

  shm::PeerSegment client_;
  shm::SealedSegment completion_;
  shm::ClientSegmentLayout layout_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_SHM_SEGMENTS_H_
