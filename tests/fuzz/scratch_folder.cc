#include "tests/fuzz/scratch_folder.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {

ScratchFolder::ScratchFolder() {
  const char* given = std::getenv("TEST_TMPDIR");
  const char* parent = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm"
                       : given != nullptr              ? given
                                                       : "/tmp";
  path_ = absl::StrCat(parent, "/optstate-fuzz-XXXXXX");
  Require(::mkdtemp(path_.data()) != nullptr, "a scratch folder can be made");
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void ScratchFolder::Write(absl::string_view name,
                          absl::string_view bytes) const {
  std::ofstream file(absl::StrCat(path_, "/", name),
                     std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  Require(static_cast<bool>(file), "a scratch file can be written");
}

}  // namespace optstate::fuzz
