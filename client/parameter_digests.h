#ifndef OPTSTATE_CLIENT_PARAMETER_DIGESTS_H_
#define OPTSTATE_CLIENT_PARAMETER_DIGESTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/session_types.h"
#include "proto/types/layout.h"

namespace optstate::client {

// What the trainer's copies of parameters held when they were made, so that
// changes of them are found that leave no other trace.
//
// A parameter's digest is the sum of its blocks', whose order does not count:
// each is summed when it is copied, while the core's cache has it.
//
// Threads: one at a time.
class ParameterDigests {
 public:
  // `layout` outlives it.
  ParameterDigests(const Layout* layout, ChangeDetection detection);

  // Whether there is anything to find.
  bool enabled() const { return detection_ != ChangeDetection::kOff; }
  // Before parameters are copied anew, as of this step: those of which
  // something is added from now on are known again once all of it is.
  void BeginCopies(uint64_t step) {
    ++copies_;
    step_ = step;
  }
  // The end of the block that begins at this element of a parameter: where a
  // part begins (NextCut) there begins a block.
  uint64_t BlockEnd(uint32_t parameter, uint64_t begin) const;
  // `data`: the block's elements.
  void AddBlock(uint32_t parameter, uint64_t begin, const std::byte* data);
  // The same for all blocks of a parameter.
  void AddWhole(uint32_t parameter, const std::byte* data);
  // Whether a copy is known and holds something else now. kSample: one line of
  // each page is compared.
  bool Differs(uint32_t parameter, const std::byte* data) const;

 private:
  struct Entry {
    uint64_t sum = 0;
    uint64_t elements = 0;  // how many of them are summed
    uint64_t copies = 0;    // copies_ when they were
    uint64_t step = 0;      // step_, likewise
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

#endif  // OPTSTATE_CLIENT_PARAMETER_DIGESTS_H_
