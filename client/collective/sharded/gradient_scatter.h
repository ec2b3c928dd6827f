#ifndef OPTSTATE_CLIENT_COLLECTIVE_SHARDED_GRADIENT_SCATTER_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SHARDED_GRADIENT_SCATTER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/collective/collective.h"
#include "client/collective/gradients/gradient_reducer.h"
#include "client/collective/sharded/ownership.h"
#include "proto/types/layout.h"

namespace optstate::client {

// Adds up the gradients of all ranks at their owners (reduce-scatter), bucket
// by bucket, in the order of the ranks.
//
// Threads: one at a time.
class GradientScatter {
 public:
  // `layout`: of all parameters. `shares`: by rank. Neither `how.quantization`
  // nor device memory. All that is pointed to outlives the object.
  GradientScatter(Collective* collective, const Layout* layout,
                  const std::vector<Share>* shares, const ReducerOptions& how);

  // Makes reduced() the sum or the mean of all ranks' gradients. `gradients`:
  // of the layout of all, whole. `has_mine`: by parameter, whether this rank
  // has one; what a rank lacks counts as 0. Collective.
  absl::Status Reduce(absl::Span<const absl::Span<const std::byte>> gradients,
                      const std::vector<bool>& has_mine);

  // The gradient of each part of this rank's share.
  const std::vector<std::vector<std::byte>>& reduced() const {
    return reduced_;
  }

 private:
  // Fills sums_ with this rank's gradients at [begin, begin + size) of each
  // rank's share, one rank after the other.
  void Pack(absl::Span<const absl::Span<const std::byte>> gradients,
            const std::vector<bool>& has_mine, uint64_t begin, uint64_t size);
  absl::Status ScatterSums(uint64_t size);
  // Writes the sums of this rank's share at [begin, begin + size) to reduced_.
  void Unpack(uint64_t begin, uint64_t size);
  const Share& mine() const { return shares_[collective_.rank()]; }

  Collective& collective_;
  const Layout& layout_;
  const std::vector<Share>& shares_;
  const ReducerOptions how_;
  uint64_t longest_ = 0;  // elements of any rank's share
  std::vector<std::vector<std::byte>> reduced_;
  // The bucket under way.
  std::vector<float> sums_;
  std::vector<float> scattered_;
  std::vector<uint16_t> halves_;
  std::vector<uint16_t> scattered_halves_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_GRADIENT_SCATTER_H_
