#include "tests/crash/shared_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"

namespace optstate::crash {
namespace {

constexpr size_t kBytes = 4096;

}  // namespace

absl::StatusOr<SharedPage> SharedPage::Map(const std::string& path,
                                           Access access) {
  const bool write = access == Access::kCreate;
  const UniqueFd fd(open(
      path.c_str(), (write ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  if (write && ftruncate(fd.get(), kBytes) != 0) {
    return OsError(errno, absl::StrCat("ftruncate ", path));
  }
  void* const data =
      mmap(nullptr, kBytes, write ? PROT_READ | PROT_WRITE : PROT_READ,
           MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return OsError(errno, absl::StrCat("mmap ", path));
  return SharedPage(data);
}

SharedPage::SharedPage(SharedPage&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)) {}

SharedPage& SharedPage::operator=(SharedPage&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

SharedPage::~SharedPage() {
  if (data_ != nullptr) munmap(data_, kBytes);
}

}  // namespace optstate::crash
