#include "server/transport/session_traffic.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "proto/types/dtype.h"

namespace optstate::transport {

void SessionTraffic::Attach(const Layout& layout,
                            const RankPartition& partition,
                            uint64_t published_bytes) {
  if (counts_ == nullptr) return;
  published_bytes_ = published_bytes;
  std::vector<uint64_t>& before = gradient_bytes_before_;
  before.assign(layout.parameters().size() + 1, 0);
  for (const Piece& piece : partition.pieces) {
    const DType dtype = layout.parameters()[piece.parameter].gradient_dtype;
    before[piece.parameter + 1] += piece.numel * SizeInBytes(dtype);
  }
  std::partial_sum(before.begin(), before.end(), before.begin());
}

// An extension of the job's layout may have added parameters since the rank
// attached.
void SessionTraffic::CountPush(uint32_t first_parameter,
                               uint32_t parameter_count) const {
  if (counts_ == nullptr || gradient_bytes_before_.empty()) return;
  const uint64_t last = gradient_bytes_before_.size() - 1;
  const uint64_t begin = std::min<uint64_t>(first_parameter, last);
  const uint64_t end =
      std::min<uint64_t>(uint64_t{first_parameter} + parameter_count, last);
  counts_->AddGradients(gradient_bytes_before_[end] -
                        gradient_bytes_before_[begin]);
}

void SessionTraffic::CountPublished(const absl::Status& status,
                                    const session::StepOutcome& outcome) const {
  // Loads are answered in the same way, with step 0.
  if (!status.ok() || outcome.step == 0 || !outcome.applied) return;
  CountSent(published_bytes_);
}

}  // namespace optstate::transport
