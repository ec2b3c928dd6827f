#ifndef OPTSTATE_STORAGE_IO_DISK_FILES_H_
#define OPTSTATE_STORAGE_IO_DISK_FILES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "storage/io/io_engine.h"

namespace optstate::io {

// An open and locked file, or extent of a device.
struct DiskFile {
  UniqueFd fd;
  std::string path;
  Extent range;  // of a file: all of it, as it was when it was opened
  bool is_extent = false;
};

// The open files of an engine of a real disk: IoEngine's Open, OpenExtent,
// Close, Remove and Rename.
//
// Threads: Get() is thread-safe; one thread at a time calls the others.
class DiskFiles {
 public:
  // `log` gets a sentence when files are opened without O_DIRECT; may be empty.
  DiskFiles(absl::Duration lock_wait,
            std::function<void(const std::string&)> log);
  ~DiskFiles();

  absl::StatusOr<FileId> Open(const std::string& path, uint64_t bytes,
                              IoEngine::OpenMode mode);
  absl::StatusOr<FileId> OpenExtent(const std::string& device,
                                    const Extent& extent);
  void Close(FileId file);
  static absl::Status Remove(const std::string& path);
  static absl::Status Rename(const std::string& from, const std::string& to);

  // Returns a file, which stays where it is until it is closed. Stops the
  // process when it is not open.
  const DiskFile& Get(FileId file) const;

 private:
  absl::StatusOr<std::unique_ptr<DiskFile>> Create(const std::string& path,
                                                   uint64_t bytes) const;
  absl::StatusOr<std::unique_ptr<DiskFile>> OpenExisting(
      const std::string& path, uint64_t bytes) const;
  absl::Status Lock(const DiskFile& file) const;
  absl::Status BypassPageCache(const DiskFile& file);
  FileId Insert(std::unique_ptr<DiskFile> file);

  const absl::Duration lock_wait_;
  std::function<void(const std::string&)> log_;
  mutable absl::Mutex mutex_;
  // A closed file leaves null, which the next file takes.
  std::vector<std::unique_ptr<DiskFile>> files_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_DISK_FILES_H_
