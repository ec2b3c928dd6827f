#include "storage/next_frame_table.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::storage {
namespace {

constexpr char kFrameTableFile[] = "/frame_table";

std::string PathOf(const std::string& state_folder, uint32_t arrangement) {
  return absl::StrCat(state_folder, kFrameTableFile, ".", arrangement);
}

}  // namespace

absl::StatusOr<StateFile> MakeNextFrameTable(const std::string& state_folder,
                                             uint32_t arrangement,
                                             uint64_t bytes) {
  RemoveNextFrameTable(state_folder, arrangement);
  const ByteRange whole = {0, bytes};
  absl::StatusOr<StateFile> file =
      StateFile::Create(PathOf(state_folder, arrangement), bytes, {&whole, 1});
  if (!file.ok()) RemoveNextFrameTable(state_folder, arrangement);
  return file;
}

void RemoveNextFrameTable(const std::string& state_folder,
                          uint32_t arrangement) {
  ::unlink(PathOf(state_folder, arrangement).c_str());
}

absl::Status SettleFrameTable(const std::string& state_folder,
                              uint32_t arrangement) {
  const std::string from = PathOf(state_folder, arrangement);
  const std::string to = state_folder + kFrameTableFile;
  if (::rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) {
    return OsError(errno, absl::StrCat("rename of ", from, " to ", to));
  }
  RemoveNextFrameTable(state_folder, arrangement + 1);
  return absl::OkStatus();
}

}  // namespace optstate::storage
