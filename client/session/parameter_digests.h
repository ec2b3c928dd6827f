#ifndef OPTSTATE_CLIENT_SESSION_PARAMETER_DIGESTS_H_
#define OPTSTATE_CLIENT_SESSION_PARAMETER_DIGESTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/session_types.h"
#include "proto/types/layout.h"

namespace optstate::client {

// Digests of the trainer's copies of parameters, taken when the copies were
// made, so that a change that leaves no other trace is found.
//
// A parameter's digest is the sum of its blocks' digests, independent of order:
// each block is summed when it is copied, while the core's cache holds it.
//
// Threads: one at a time.
class ParameterDigests {
 public:
  // `layout` outlives this object.
  ParameterDigests(const Layout* layout, ChangeDetection detection);

  // Returns whether changes are looked for at all.
  bool enabled() const { return detection_ != ChangeDetection::kOff; }
  // Begins new copies of parameters as of this step. A parameter of which some
  // block is added from now on is known again once all its blocks are added.
  void BeginCopies(uint64_t step) {
    ++copies_;
    step_ = step;
  }
  // The end of the block that begins at this element of a parameter. A block
  // begins wherever a part begins (NextCut).
  uint64_t BlockEnd(uint32_t parameter, uint64_t begin) const;
  // Adds a block; `data` points to its elements.
  void AddBlock(uint32_t parameter, uint64_t begin, const std::byte* data);
  // Adds all blocks of a parameter.
  void AddWhole(uint32_t parameter, const std::byte* data);
  // Returns whether a copy is known and its content has changed. kSample: one
  // line of each page is compared.
  bool Differs(uint32_t parameter, const std::byte* data) const;

 private:
  struct Entry {
    uint64_t sum = 0;
    uint64_t elements = 0;  // number of elements summed
    uint64_t copies = 0;    // copies_ when they were summed
    uint64_t step = 0;      // step_ when they were summed
  };

  uint64_t BlockDigest(absl::Span<const std::byte> block, uint64_t begin,
                       uint64_t step) const;

  const Layout* const layout_;
  const ChangeDetection detection_;
  uint64_t copies_ = 0;
  uint64_t step_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_SESSION_PARAMETER_DIGESTS_H_
