#ifndef OPTSTATE_CLIENT_CTL_TAR_GZ_WRITER_H_
#define OPTSTATE_CLIENT_CTL_TAR_GZ_WRITER_H_

#include <zlib.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {

// Writes an archive of regular files in POSIX's ustar format, compressed by
// gzip, which `tar -xzf` reads.
//
// Written here although libarchive and tar have it: an archive of small texts
// is one header of fixed fields a file, our container image has no tar, and
// libarchive would be one more library to link into each release of optctl.
//
// Threads: not thread-safe.
class TarGzWriter {
 public:
  // Writes to `fd`; files get the time `at`, the mode 0600 and the owner 0.
  static absl::StatusOr<std::unique_ptr<TarGzWriter>> Make(UniqueFd fd,
                                                           absl::Time at);
  // Leaves an archive without an end, unless Finish() was called.
  ~TarGzWriter();
  TarGzWriter(const TarGzWriter&) = delete;
  TarGzWriter& operator=(const TarGzWriter&) = delete;

  // Adds a file. INVALID_ARGUMENT: `name` is empty, longer than 100 bytes, or
  // leads out of the archive's folder.
  absl::Status Add(const std::string& name, absl::string_view content);

  // Ends the archive; nothing may be added afterwards.
  absl::Status Finish();

 private:
  TarGzWriter(gzFile file, absl::Time at) : file_(file), at_(at) {}

  absl::Status Write(absl::string_view bytes);

  gzFile file_;  // null: finished
  const absl::Time at_;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_TAR_GZ_WRITER_H_
