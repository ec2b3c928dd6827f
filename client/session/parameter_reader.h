#ifndef OPTSTATE_CLIENT_SESSION_PARAMETER_READER_H_
#define OPTSTATE_CLIENT_SESSION_PARAMETER_READER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/session/parameter_digests.h"
#include "client/session_types.h"
#include "proto/types/layout.h"

namespace optstate::client {

// Copies parameters out of the parameter area, also while a step is being
// applied: each part is copied once all its runs are stamped with the step.
//
// Threads: one at a time.
class ParameterReader {
 public:
  // `layout` and `digests` outlive this object; `digests` receives the copied
  // blocks.
  ParameterReader(const Layout* layout, ParameterDigests* digests)
      : layout_(layout), digests_(digests) {}

  // Begins a read. `targets` were checked and stay valid until all is copied.
  void Begin(uint64_t step, const ParameterTargets& targets);
  // Copies the parts that are ready and not copied yet, or tells targets.ready
  // of those without a destination; returns whether there were any. `stamps` is
  // Channel::run_stamps, `area` Channel::parameter_area.
  bool CopyReady(const std::atomic<uint64_t>* stamps, const std::byte* area);
  // Copies the remaining parts.
  void CopyRest(const std::byte* area);
  bool done() const { return left_.empty(); }
  // Returns whether CopyReady has copied something since Begin.
  bool has_copied() const { return has_copied_; }

 private:
  // Elements [begin, end) of one target, or several whole targets of
  // consecutive parameters.
  struct Part {
    size_t first_target = 0;
    size_t end_target = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t first_run = 0;
    uint64_t end_run = 0;
  };

  void AddPieces(size_t target);
  void AddWhole(size_t target);
  bool IsReady(const Part& part, const std::atomic<uint64_t>* stamps) const;
  void Copy(const Part& part, const std::byte* area);
  void CopyElements(size_t target, uint64_t begin, uint64_t end,
                    const std::byte* area);

  const Layout* const layout_;
  ParameterDigests* const digests_;
  uint64_t step_ = 0;
  ParameterTargets targets_;
  bool has_copied_ = false;
  std::vector<Part> left_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_SESSION_PARAMETER_READER_H_
