#ifndef OPTSTATE_CLIENT_COLLECTIVE_SHARDED_GRADIENT_NORM_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SHARDED_GRADIENT_NORM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/collective/collective.h"
#include "client/collective/sharded/ownership.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"

namespace optstate::client {

// The norms that a step can be clipped by.
enum class NormType : uint8_t {
  kSumOfAbsolutes = 1,
  kEuclidean = 2,
  kLargestAbsolute = 3,
};

// Reduces elements [begin, begin + count) of a gradient, which are those of one
// run, to one number: the sum of their squares (kEuclidean) or of their
// absolute values, or the largest of these. In double, in the order of the
// daemons' kernels (kernels/reduce.h): element i goes to accumulator i % 16,
// and the accumulators are reduced pairwise. Not finite exactly when some
// element is not.
double ReduceRun(NormType type, DType dtype, const std::byte* gradient,
                 uint64_t begin, uint64_t count);

// The norm of gradients of which each rank has its own share. It has the bits
// that the daemon of one node finds when that is given all gradients: one
// number for each run, the part of a parameter in a tile of the layout of all,
// then over the runs of each parameter in order, then over parameters in order.
// Shares never cut a run. (The daemons of several nodes could not find it:
// their layouts have other tiles.)
//
// A rank sends a number for each parameter that it owns whole, and one for each
// run of those that are cut.
//
// Threads: one at a time.
class GradientNorm {
 public:
  // `layout`: of all parameters. `shares`: by rank. Both outlive the object.
  GradientNorm(const Layout* layout, const std::vector<Share>* shares);

  // Returns the norm as the gradients are, the same on all ranks. `mine`: the
  // gradient of each part of this rank's share. `has_gradient`: by parameter,
  // equal on all ranks. Collective.
  absl::StatusOr<double> Compute(Collective& collective, NormType type,
                                 absl::Span<const std::vector<std::byte>> mine,
                                 const std::vector<bool>& has_gradient) const;

 private:
  // Returns how many numbers the owner of a part sends.
  size_t CountOf(const OwnedPart& part) const;
  // Writes the numbers of one part.
  void ReducePart(NormType type, const OwnedPart& part,
                  const std::byte* gradient,
                  absl::Span<uint64_t> numbers) const;

  const Layout& layout_;
  const std::vector<Share>& shares_;
  size_t numbers_max_ = 0;  // of any rank
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_GRADIENT_NORM_H_
