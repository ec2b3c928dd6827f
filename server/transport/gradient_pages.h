#ifndef OPTSTATE_SERVER_TRANSPORT_GRADIENT_PAGES_H_
#define OPTSTATE_SERVER_TRANSPORT_GRADIENT_PAGES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"

namespace optstate::transport {

// Where the gradients of a rank's pieces end in its gradient area, ascending.
struct GradientEnd {
  uint32_t parameter;
  uint64_t end_bytes;
};
std::vector<GradientEnd> GradientEnds(const Layout& layout,
                                      const RankPartition& partition);

// The pages of a client segment that a rank said would follow its attach
// (v1::AttachRequest.pages_follow). Checks before gradients are read that their
// pages are there: reading a hole would take memory that is not accounted for,
// or, without memory, end the engine with SIGBUS.
//
// Pages come in ascending order and stay, so one mark is the whole state; once
// it is at the end, a check is one comparison.
//
// Threads: one at a time. Check allocates only in errors, and must be called
// without the job's lock: a peer can make it wait (shm::EndOfWritten).
class GradientPages {
 public:
  // `segment` is the sealed segment, of this size, in which the gradient area
  // begins at this offset.
  GradientPages(UniqueFd segment, uint64_t segment_bytes,
                uint64_t gradient_area, std::vector<GradientEnd> ends);

  // INVALID_ARGUMENT when a gradient of the rank's pieces of parameters [first,
  // +count) lacks a page.
  absl::Status Check(uint64_t first, uint64_t count);

  // The bytes of the gradient area that had their pages when this was last
  // looked at.
  uint64_t present_bytes() const;

 private:
  bool all_present() const { return present_end_ >= segment_bytes_; }
  void LookAgain();

  UniqueFd segment_;
  uint64_t segment_bytes_;
  uint64_t gradient_area_;
  uint64_t present_end_;  // the mark, in the segment
  std::vector<GradientEnd> ends_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRADIENT_PAGES_H_
