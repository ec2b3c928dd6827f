#include "client/collective/store/file_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

constexpr absl::Duration kPauseMin = absl::Milliseconds(1);
constexpr absl::Duration kPauseMax = absl::Milliseconds(50);

// Returns a file name for any key, another one for each: letters, digits, '-'
// and '_' stand for themselves.
std::string FileNameOf(absl::string_view key) {
  std::string name = "key-";
  for (const char each : key) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(each)) || each == '-' ||
        each == '_') {
      name += each;
    } else {
      absl::StrAppend(&name, "%",
                      absl::Hex(static_cast<uint8_t>(each), absl::kZeroPad2));
    }
  }
  return name;
}

// A name that no other thread or process uses, unless their container has the
// host's name and numbers its processes by itself, or a process has left it.
std::string FreshName() {
  static std::atomic<uint64_t> count{0};
  char host[65] = "";
  // A cut name is not terminated; the last byte stays zero.
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat("new-", FileNameOf(host), "-", getpid(), "-",
                      count.fetch_add(1));
}

absl::Status WriteAll(int fd, absl::string_view value,
                      const std::string& path) {
  while (!value.empty()) {
    const ssize_t written = write(fd, value.data(), value.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return OsError(errno, absl::StrCat("write(", path, ")"));
    value.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// Returns the file's content; nothing: there is no such file.
absl::StatusOr<std::optional<std::string>> ReadIfThere(
    const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.ok()) {
    // NFS says so of a name that it knew before.
    if (errno == ENOENT || errno == ESTALE) return std::nullopt;
    return OsError(errno, absl::StrCat("open(", path, ")"));
  }
  std::string value(kStoreValueBytesMax + 1, '\0');
  size_t size = 0;
  while (size < value.size()) {
    const ssize_t count = read(fd.get(), &value[size], value.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return OsError(errno, absl::StrCat("read(", path, ")"));
    if (count == 0) break;
    size += static_cast<size_t>(count);
  }
  if (size > kStoreValueBytesMax) {
    return absl::DataLossError(absl::StrCat(path, " has more than ",
                                            kStoreValueBytesMax,
                                            " bytes: no rank has written it"));
  }
  value.resize(size);
  return value;
}

absl::Status CheckSizes(absl::string_view key, absl::string_view value) {
  if (key.empty() || key.size() > kStoreKeyBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a key has 1 to ", kStoreKeyBytesMax, " bytes, not ", key.size()));
  }
  if (value.size() > kStoreValueBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the value of key \"", key, "\" has ", value.size(),
                     " bytes, the limit is ", kStoreValueBytesMax));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileStore>> FileStore::Open(std::string folder) {
  struct stat found = {};
  if (stat(folder.c_str(), &found) != 0) {
    return OsError(errno, absl::StrCat("stat(", folder, ")"));
  }
  if (!S_ISDIR(found.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder, " is no folder: give a folder that all ranks see"));
  }
  if ((found.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder,
        " can be written by other users, who could send ranks to any "
        "address: chmod go-w"));
  }
  if (found.st_uid != geteuid() && found.st_uid != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder, " belongs to user ", found.st_uid,
        ", who could send ranks to any address: give a folder of your own"));
  }
  return std::unique_ptr<FileStore>(new FileStore(std::move(folder)));
}

std::string FileStore::PathOf(absl::string_view key) const {
  return absl::StrCat(folder_, "/", FileNameOf(key));
}

absl::Status FileStore::Set(absl::string_view key, absl::string_view value) {
  OPTSTATE_RETURN_IF_ERROR(CheckSizes(key, value));
  const std::string path = PathOf(key);
  std::string fresh;
  UniqueFd fd;
  do {
    fresh = absl::StrCat(folder_, "/", FreshName());
    fd.reset(open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                  S_IRUSR | S_IWUSR));
  } while (!fd.ok() && errno == EEXIST);
  if (!fd.ok()) return OsError(errno, absl::StrCat("open(", fresh, ")"));
  absl::Status status = WriteAll(fd.get(), value, fresh);
  // NFS writes at the close.
  if (close(fd.release()) != 0 && status.ok()) {
    status = OsError(errno, absl::StrCat("close(", fresh, ")"));
  }
  if (status.ok() && link(fresh.c_str(), path.c_str()) != 0) {
    status = errno == EEXIST
                 ? absl::AlreadyExistsError(absl::StrCat(
                       path,
                       " is there already: another run has used this "
                       "folder and name. Give each run a fresh one"))
                 : OsError(errno, absl::StrCat("link(", path, ")"));
  }
  unlink(fresh.c_str());
  return status;
}

absl::StatusOr<std::string> FileStore::Get(absl::string_view key,
                                           absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(CheckSizes(key, ""));
  const std::string path = PathOf(key);
  // The kernel (inotify) does not tell of files that other machines make in a
  // folder of NFS, so this looks again and again.
  absl::Duration pause = kPauseMin;
  while (true) {
    OPTSTATE_ASSIGN_OR_RETURN(std::optional<std::string> value,
                              ReadIfThere(path));
    if (value.has_value()) return *std::move(value);
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("no rank has written ", path, " in time"));
    }
    absl::SleepFor(std::min(pause, left));
    pause = std::min(2 * pause, kPauseMax);
  }
}

}  // namespace optstate::client
