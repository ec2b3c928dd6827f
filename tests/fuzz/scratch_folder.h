#ifndef OPTSTATE_TESTS_FUZZ_SCRATCH_FOLDER_H_
#define OPTSTATE_TESTS_FUZZ_SCRATCH_FOLDER_H_

#include <string>

#include "absl/strings/string_view.h"

namespace optstate::fuzz {

// A folder in memory (or in $TEST_TMPDIR) for the files of a target, removed at
// the end of the process.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  // Makes a file of these bytes, in place of any of that name. Ends the process
  // when it cannot.
  void Write(absl::string_view name, absl::string_view bytes) const;

 private:
  std::string path_;
};

}  // namespace optstate::fuzz

#endif  // OPTSTATE_TESTS_FUZZ_SCRATCH_FOLDER_H_
