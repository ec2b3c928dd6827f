#include "server/session/user_bytes.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "storage/allocated_bytes.h"

namespace optstate::session {

std::map<std::string, uid_t> OwnersOfJobs(const std::string& state_dir) {
  std::map<std::string, uid_t> owners;
  std::error_code error;
  std::filesystem::directory_iterator entries(state_dir + "/jobs", error);
  for (; !error && entries != std::filesystem::directory_iterator();
       entries.increment(error)) {
    uid_t owner = 0;
    std::ifstream file(entries->path() / "owner");
    if (file >> owner) owners[entries->path().filename().string()] = owner;
  }
  return owners;
}

std::map<uid_t, uint64_t> StateBytesByOwner(const std::string& state_dir) {
  std::map<uid_t, uint64_t> bytes;
  for (const auto& [job, owner] : OwnersOfJobs(state_dir)) {
    bytes[owner] += storage::AllocatedBytesBelow(state_dir + "/jobs/" + job);
  }
  return bytes;
}

}  // namespace optstate::session
