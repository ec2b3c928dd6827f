#ifndef OPTSTATE_CLIENT_VIEWS_WRITTEN_PAGES_H_
#define OPTSTATE_CLIENT_VIEWS_WRITTEN_PAGES_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// Finds the pages of a private mapping of a file that the process has written
// and therefore has copies of. The kernel reports them (ioctl PAGEMAP_SCAN,
// since Linux 6.7; else /proc/self/pagemap).
//
// Threads: not thread-safe. A forked child must not use it: it refers to the
// process that made it.
class WrittenPages {
 public:
  // Opens the kernel interface. UNIMPLEMENTED where /proc/self/pagemap cannot
  // be read.
  static absl::Status Open(WrittenPages* pages);

  // Finds the ranges of whole written pages, ascending and disjoint, of a
  // mapping that begins and ends at page boundaries.
  absl::Status Find(absl::Span<std::byte> mapping,
                    std::vector<absl::Span<std::byte>>* ranges);
  // Reads /proc/self/pagemap although the kernel has the ioctl; for tests.
  void UseEntries() { scans_ = false; }

 private:
  absl::Status Scan(absl::Span<std::byte> mapping,
                    std::vector<absl::Span<std::byte>>* ranges);
  absl::Status ReadEntries(absl::Span<std::byte> mapping,
                           std::vector<absl::Span<std::byte>>* ranges);

  UniqueFd pagemap_;
  bool scans_ = true;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_WRITTEN_PAGES_H_
