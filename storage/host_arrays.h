#ifndef OPTSTATE_STORAGE_HOST_ARRAYS_H_
#define OPTSTATE_STORAGE_HOST_ARRAYS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"
#include "storage/array_files.h"
#include "storage/memory/memory_locker.h"
#include "storage/state_array_table.h"
#include "storage/state_store.h"

namespace optstate::storage {

// The arrays of a job that lie in host memory.
struct HostArrays {
  // NOLINTNEXTLINE(google-explicit-constructor): most jobs have all records.
  HostArrays(Accumulation accumulates, bool records = true,
             bool parameters = true)
      : accumulation(accumulates),
        has_records(records),
        has_parameters(parameters) {}

  Accumulation accumulation;
  // Masters, state arrays and scales; false: records are swapped.
  bool has_records = true;
  // The parameter area; false: parameters are a part of swapped records.
  bool has_parameters = true;
};

// The arrays of state that a job has in memory: parameters, masters, the
// optimizer's arrays with their scales, sums of micro-steps, and what there is
// one of for each parameter. Each is a file that outlives the process.
//
// Threads: not thread-safe; the arrays may be written by many at once.
// Lifetime: addresses are valid until Resize or Restore.
class HostArrayFiles {
 public:
  static uint64_t BytesNeeded(const Layout& layout, const HostArrays& which);

  explicit HostArrayFiles(std::string folder);

  // See ArrayFiles for these.
  absl::Status Create(const Layout& layout, const HostArrays& which);
  absl::Status Open(const Layout& layout, const HostArrays& which);
  absl::Status Resize(const Layout& layout, const HostArrays& which);
  void RemoveUnwanted(const Layout& layout, const HostArrays& which);
  void LockMemory(MemoryLocker* locker) { files_.LockMemory(locker); }
  ArrayFiles::Extents extents() const { return files_.extents(); }
  void Restore(const ArrayFiles::Extents& extents, const Layout& layout) {
    files_.Restore(extents, layout);
  }
  std::optional<ArrayInfo> Describe(StateArrayIndex array,
                                    const Layout& layout) const {
    return files_.Describe(array, layout);
  }
  uint64_t bytes() const { return files_.bytes(); }

  // Returns the addresses of the arrays.
  StateArrays addresses() const;
  // Opens the file of StateArrays::parameters, for ranks to map: it cannot be
  // written through this fd. The file has whole pages, none of them a hole. The
  // job has parameters here.
  absl::StatusOr<UniqueFd> OpenParameters() const {
    return files_.OpenToRead(kParametersArray);
  }

 private:
  ArrayFiles files_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_HOST_ARRAYS_H_
