#include "server/session/user_bytes.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "storage/allocated_bytes.h"

namespace optstate::session {

uint64_t AllocatedBytesOfUser(const std::string& state_dir, uid_t uid) {
  uint64_t bytes = 0;
  std::error_code error;
  for (const auto& job :
       std::filesystem::directory_iterator(state_dir + "/jobs", error)) {
    uid_t owner = 0;
    std::ifstream file(job.path() / "owner");
    if (!(file >> owner) || owner != uid) continue;
    bytes += storage::AllocatedBytesBelow(job.path().string());
  }
  return bytes;
}

bool IsOperator(uid_t uid) { return uid == 0 || uid == ::geteuid(); }

}  // namespace optstate::session
