#ifndef OPTSTATE_CLIENT_CTL_BUG_REPORT_H_
#define OPTSTATE_CLIENT_CTL_BUG_REPORT_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/tar_gz_writer.h"

namespace optstate::ctl {

// A bug report on its way into an archive: it keeps a list of its files, and
// of what could not be had and why, which is its last file.
//
// Threads: not thread-safe.
class BugReport {
 public:
  // The folder of all files within the archive.
  static constexpr char kFolder[] = "optstate-bugreport/";
  // Limit of a file; the rest is cut.
  static constexpr size_t kFileBytesMax = 4 << 20;

  // `archive` outlives the object.
  explicit BugReport(TarGzWriter* archive) : archive_(archive) {}

  // Adds a file, or notes why it could not be had. An archive that cannot be
  // written is said by Finish().
  void Add(const std::string& name, const absl::StatusOr<std::string>& content);
  // Adds files of this machine's kernel, each under the name `folder` + its
  // base name. Notes those that cannot be read.
  void AddMachineFile(const std::string& folder, const std::string& path);

  // Returns the bytes of all files so far, before they are compressed.
  uint64_t bytes() const { return bytes_; }

  // Adds the list and ends the archive. Returns the list, or why the archive
  // could not be written.
  absl::StatusOr<std::string> Finish();

 private:
  TarGzWriter* const archive_;
  absl::Status written_;
  uint64_t bytes_ = 0;
  std::string contents_;
  std::string missing_;
};

// Reads a small file, such as one of /proc, as far as `bytes_max`.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t bytes_max);

// Adds what the kernel says of this machine, and optctl's own version.
void AddMachine(BugReport* report);
// Adds what the kernel says of the daemon's process, its command line, and the
// configuration file named there. That file has no secrets: it names the files
// that have some. Nothing of the environment or the memory is read.
void AddDaemonProcess(pid_t pid, BugReport* report);
// Returns where the daemon serves its metrics, as far as its command line and
// configuration file say and this user may read them; "": nowhere.
std::string MetricsAddressOf(pid_t daemon);
// Adds what the kernel says of a job's engine.
void AddEngineProcess(pid_t pid, BugReport* report);

// Returns the path of the configuration file in the text of /proc/PID/cmdline;
// "": none is named.
std::string ConfigFileIn(const std::string& command_line);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_BUG_REPORT_H_
