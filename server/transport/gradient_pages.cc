#include "server/transport/gradient_pages.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/page_reserve.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/dtype.h"

namespace optstate::transport {

std::vector<GradientEnd> GradientEnds(const Layout& layout,
                                      const RankPartition& partition) {
  std::vector<GradientEnd> ends;
  ends.reserve(partition.pieces.size());
  for (const Piece& piece : partition.pieces) {
    const DType dtype = layout.parameters()[piece.parameter].gradient_dtype;
    ends.push_back({.parameter = piece.parameter,
                    .end_bytes = piece.gradient_offset_bytes +
                                 piece.numel * SizeInBytes(dtype)});
  }
  return ends;
}

GradientPages::GradientPages(UniqueFd segment, uint64_t segment_bytes,
                             uint64_t gradient_area,
                             std::vector<GradientEnd> ends)
    : segment_(std::move(segment)),
      segment_bytes_(segment_bytes),
      gradient_area_(gradient_area),
      present_end_(gradient_area / shm::kPageBytes * shm::kPageBytes),
      ends_(std::move(ends)) {
  LookAgain();
}

uint64_t GradientPages::present_bytes() const {
  return present_end_ - std::min(present_end_, gradient_area_);
}

void GradientPages::LookAgain() {
  present_end_ =
      shm::EndOfWritten(segment_.get(), present_end_, segment_bytes_);
  if (all_present()) segment_.reset();
}

absl::Status GradientPages::Check(uint64_t first, uint64_t count) {
  if (all_present()) return absl::OkStatus();
  const auto after = std::partition_point(
      ends_.begin(), ends_.end(), [&](const GradientEnd& end) {
        return end.parameter < first || end.parameter - first < count;
      });
  if (after == ends_.begin()) return absl::OkStatus();
  const GradientEnd& last = *(after - 1);
  if (last.parameter < first || last.end_bytes <= present_bytes()) {
    return absl::OkStatus();
  }
  LookAgain();
  if (last.end_bytes <= present_bytes()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "push of parameters [", first, ", ", first + count,
      "): their gradients end at byte ", last.end_bytes,
      " of the gradient area, which has pages up to ", present_bytes(),
      ": write them in ascending order before they are pushed"));
}

}  // namespace optstate::transport
