#ifndef OPTSTATE_STORAGE_ARRAY_FILES_H_
#define OPTSTATE_STORAGE_ARRAY_FILES_H_

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"
#include "storage/memory/memory_locker.h"
#include "storage/state_array_table.h"
#include "storage/state_file.h"

namespace optstate::storage {

// Some of the arrays of state_array_table.h, by index.
using ArraySet = std::bitset<kStateArrayCount>;

// One file of a job's state, as operators see it.
struct ArrayInfo {
  std::string name;
  std::string file;  // within the state folder
  std::string dtype;
  uint64_t bytes = 0;
};

// The arrays of a job that one owner is responsible for, each a file of the
// state folder that is mapped whole.
//
// `wanted`, at each call, says which of the owner's arrays the job has.
// Threads: not thread-safe; the arrays may be written by many at once.
// Lifetime: addresses are valid until Resize or Restore.
class ArrayFiles {
 public:
  // The extent of an array; 0 bytes: no file.
  struct Extent {
    uint64_t bytes = 0;
    std::vector<ByteRange> reserved;
  };
  using Extents = std::array<Extent, kStateArrayCount>;

  // `owned`: the arrays whose files this object makes and removes.
  ArrayFiles(std::string folder, const ArraySet& owned)
      : folder_(std::move(folder)), owned_(owned) {}

  // Returns the bytes that files of these arrays take.
  static uint64_t BytesNeeded(const Layout& layout, const ArraySet& wanted);

  // Creates the files, of zeros.
  absl::Status Create(const Layout& layout, const ArraySet& wanted);
  // Opens the files. DATA_LOSS, naming the file: one is missing or too short.
  // Removes files of owned arrays that are not wanted: a reshape left them that
  // did not get as far as its description, or had not removed them yet.
  absl::Status Open(const Layout& layout, const ArraySet& wanted);
  // Gives the files the sizes of another layout, and makes those that are not
  // there. After an error, Restore() brings back what was.
  absl::Status Resize(const Layout& layout, const ArraySet& wanted);
  // Removes the files of arrays that are not wanted.
  void RemoveUnwanted(const Layout& layout, const ArraySet& wanted);

  // See StateFile::LockMemory.
  void LockMemory(MemoryLocker* locker);

  Extents extents() const;
  // Cuts the files to these extents, and removes those that have none. A
  // failure here is put right by the next Open.
  void Restore(const Extents& extents, const Layout& layout);

  // Returns the array's first byte; null: the job has no such array.
  std::byte* data(StateArrayIndex array) const {
    return files_[array].has_value() ? files_[array]->data() : nullptr;
  }
  // Returns all bytes of an array that the job has.
  absl::Span<std::byte> span(StateArrayIndex array) const {
    return {files_[array]->data(), files_[array]->size()};
  }
  // Opens the file of an array that the job has, so that it cannot be written
  // through the fd.
  absl::StatusOr<UniqueFd> OpenToRead(StateArrayIndex array) const;
  // Describes an array; nullopt: the job has no such array here.
  std::optional<ArrayInfo> Describe(StateArrayIndex array,
                                    const Layout& layout) const;
  // Returns the bytes that all files take.
  uint64_t bytes() const;

 private:
  std::string PathOf(StateArrayIndex array, const Layout& layout) const;
  void RestoreOne(StateArrayIndex array, const Extent& extent,
                  const Layout& layout);

  std::string folder_;
  ArraySet owned_;
  std::array<std::optional<StateFile>, kStateArrayCount> files_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_ARRAY_FILES_H_
