#ifndef OPTSTATE_CLIENT_VIEWS_PARAMETER_VIEWS_H_
#define OPTSTATE_CLIENT_VIEWS_PARAMETER_VIEWS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/views/fault_guard.h"
#include "client/views/written_pages.h"
#include "proto/types/layout.h"

namespace optstate::client {

// The parameters of a job as memory that its trainer may write: a private
// mapping of the parameter file.
//
// Values that the engine writes appear at once. A write by the trainer goes to
// a copy of the page, which later writes of the engine do not reach and
// FindWritten() finds; Release() gives such copies back. The address never
// changes.
//
// Threads: not thread-safe; but any thread may read and write the memory at any
// time, except that writes during FindWritten and Release may be lost.
class ParameterViews {
 public:
  // Maps `file`, the checked parameter file of a job of this layout; the caller
  // keeps it. UNIMPLEMENTED where written pages cannot be found.
  static absl::StatusOr<std::unique_ptr<ParameterViews>> Map(
      int file, const Layout& layout);
  ParameterViews(const ParameterViews&) = delete;
  ParameterViews& operator=(const ParameterViews&) = delete;
  ~ParameterViews();

  // The elements of a parameter, in its own dtype. Empty for an index behind
  // the last parameter.
  absl::Span<std::byte> parameter(uint32_t parameter) const;

  // Finds the parameters, ascending, whose bytes differ from those of
  // `committed`, the session's parameter area, because the trainer has written
  // them. Copies of pages that do not differ are given back. `file`: as in Map;
  // when the file has changed, the mapping is replaced by one of the new file,
  // and the trainer's writes stay. DATA_LOSS: the file was cut short.
  absl::Status FindWritten(int file, absl::Span<const std::byte> committed,
                           std::vector<uint32_t>* parameters);
  // Gives all copies back, so that the memory shows the engine's values.
  absl::Status Release();
  // Copies every page: later writes of the engine do not appear.
  // RESOURCE_EXHAUSTED: there is no memory, and some pages are not copied.
  // DATA_LOSS: the file was cut short; every page is copied, and those behind
  // the cut are zeros.
  absl::Status Keep();
  // Does what Keep() does, and moves everything out of the file: when nobody
  // else uses the file, its memory can be given back, while this memory stays,
  // at its addresses. FindWritten() and Release() are FAILED_PRECONDITION from
  // then on. What other threads write meanwhile may be lost. After an error all
  // values are as before; the call may be repeated.
  absl::Status Leave();

 private:
  explicit ParameterViews(const Layout& layout) : layout_(layout) {}

  absl::Status CheckHasFile() const;
  absl::Status CheckFile(int file);
  absl::Status Follow(int file);
  // Gives equal pages of the range back; records the parameters of the others.
  absl::Status Compare(absl::Span<std::byte> range,
                       absl::Span<const std::byte> committed,
                       std::vector<uint32_t>* parameters);
  void NoteParameters(uint64_t begin, uint64_t end,
                      absl::Span<const std::byte> committed,
                      std::vector<uint32_t>* parameters) const;

  const Layout layout_;
  absl::Span<std::byte> area_;  // whole pages
  uint64_t left_bytes_ = 0;     // of area_, that are not the file's any more
  uint64_t file_bytes_ = 0;
  std::string file_name_;  // for errors
  dev_t device_ = 0;
  ino_t inode_ = 0;
  FaultGuard guard_;
  WrittenPages pages_;
  std::vector<absl::Span<std::byte>> ranges_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_PARAMETER_VIEWS_H_
