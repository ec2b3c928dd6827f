#include "tests/faults/small_tmpfs.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::faults {

absl::StatusOr<std::unique_ptr<SmallTmpfs>> SmallTmpfs::Mount(uint64_t bytes,
                                                              uint64_t inodes) {
  OPTSTATE_RETURN_IF_ERROR(storage::EnterPrivateMounts());
  std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/tmpfs-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) return OsError(errno, "mkdtemp");
  absl::StatusOr<storage::TestTmpfs> mounted = storage::TestTmpfs::Mount(
      path, absl::StrCat("mode=0700,size=", bytes, ",nr_inodes=", inodes));
  if (!mounted.ok()) {
    rmdir(path.c_str());
    return mounted.status();
  }
  std::unique_ptr<SmallTmpfs> tmpfs(
      new SmallTmpfs(std::move(path), *std::move(mounted)));
  const std::string filler = tmpfs->path_ + "/filler";
  tmpfs->filler_.reset(
      open(filler.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!tmpfs->filler_.ok()) return OsError(errno, "open of the filler");
  return tmpfs;
}

SmallTmpfs::~SmallTmpfs() {
  Empty().IgnoreError();
  filler_.reset();
  mounted_.reset();
  rmdir(path_.c_str());
}

void SmallTmpfs::Fill() {
  const auto fill = [this] {
    static const std::array<char, 4096> page{};
    while (write(filler_.get(), page.data(), page.size()) > 0) {
    }
  };
  fill();
  filling_.store(true);
  thread_ = std::thread([this, fill] {
    while (filling_.load()) {
      fill();
      std::this_thread::yield();
    }
  });
}

void SmallTmpfs::FillInodes() {
  while (true) {
    const std::string path = absl::StrCat(path_, "/empty-", empty_files_);
    if (!UniqueFd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600))
             .ok()) {
      return;
    }
    ++empty_files_;
  }
}

absl::Status SmallTmpfs::Empty() {
  filling_.store(false);
  if (thread_.joinable()) thread_.join();
  for (; empty_files_ > 0; --empty_files_) {
    unlink(absl::StrCat(path_, "/empty-", empty_files_ - 1).c_str());
  }
  if (ftruncate(filler_.get(), 0) == 0) return absl::OkStatus();
  return OsError(errno, "ftruncate of the filler");
}

}  // namespace optstate::faults
