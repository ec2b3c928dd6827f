#ifndef OPTSTATE_CLIENT_PARAMETER_VIEWS_H_
#define OPTSTATE_CLIENT_PARAMETER_VIEWS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/fault_guard.h"
#include "client/written_pages.h"
#include "proto/types/layout.h"

namespace optstate::client {

// The parameters of a job as memory that its trainer may write: a private
// mapping of the parameter file.
//
// What the engine writes is there at once. What the trainer writes goes to a
// copy of the page, which the engine's writes do not reach any more, and is
// found by FindWritten(); Release() gives such copies back. The address never
// changes.
//
// Threads: not thread-safe; but any thread may read and write the memory at any
// time, except what it writes during FindWritten and Release, which may be
// lost.
class ParameterViews {
 public:
  // `file` is the parameter file of a job of this layout, which was checked;
  // it stays the caller's. UNIMPLEMENTED where written pages cannot be found.
  static absl::StatusOr<std::unique_ptr<ParameterViews>> Map(
      int file, const Layout& layout);
  ParameterViews(const ParameterViews&) = delete;
  ParameterViews& operator=(const ParameterViews&) = delete;
  ~ParameterViews();

  // Elements of a parameter, in its own dtype. Empty behind the last one.
  absl::Span<std::byte> parameter(uint32_t parameter) const;

  // Parameters, ascending, whose bytes differ from those of `committed`, the
  // parameter area of the session, because the trainer has written them. Copies
  // of pages that do not differ are given back. `file`: as in Map; when it is
  // another one than before the mapping becomes one of it, and what was written
  // stays. DATA_LOSS: the file was cut short.
  absl::Status FindWritten(int file, absl::Span<const std::byte> committed,
                           std::vector<uint32_t>* parameters);
  // Gives all copies back, so that the engine's values are there.
  absl::Status Release();
  // Copies every page: what the engine writes from now on is not there.
  // RESOURCE_EXHAUSTED, and some are not copied, when there is no memory.
  absl::Status Keep();

 private:
  explicit ParameterViews(const Layout& layout) : layout_(layout) {}

  absl::Status CheckFile(int file);
  absl::Status Follow(int file);
  // Gives equal pages of the range back; notes the parameters of others.
  absl::Status Compare(absl::Span<std::byte> range,
                       absl::Span<const std::byte> committed,
                       std::vector<uint32_t>* parameters);
  void NoteParameters(uint64_t begin, uint64_t end,
                      absl::Span<const std::byte> committed,
                      std::vector<uint32_t>* parameters) const;

  const Layout layout_;
  absl::Span<std::byte> area_;  // whole pages
  uint64_t file_bytes_ = 0;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  FaultGuard guard_;
  WrittenPages pages_;
  std::vector<absl::Span<std::byte>> ranges_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_PARAMETER_VIEWS_H_
