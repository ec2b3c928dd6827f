#include "storage/testing/loop_device.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::storage {
namespace {

// Other processes may take the device that was free.
constexpr int kAttempts = 16;

absl::Status CannotMake(const std::string& call) {
  return absl::FailedPreconditionError(OsError(errno, call).message());
}

}  // namespace

absl::StatusOr<LoopDevice> LoopDevice::Make(const std::string& file,
                                            const Options& options) {
  const UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
  if (!control.ok()) return CannotMake("open /dev/loop-control");
  const UniqueFd backing(::open(
      file.c_str(), (options.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC));
  if (!backing.ok()) return OsError(errno, absl::StrCat("open ", file));
  loop_config config = {};
  config.fd = static_cast<uint32_t>(backing.get());
  config.block_size = options.block_bytes;
  config.info.lo_flags = options.read_only ? LO_FLAGS_READ_ONLY : 0;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
    if (number < 0) return CannotMake("ioctl(LOOP_CTL_GET_FREE)");
    const std::string path = absl::StrCat("/dev/loop", number);
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd.ok()) return CannotMake(absl::StrCat("open ", path));
    if (::ioctl(fd.get(), LOOP_CONFIGURE, &config) == 0) {
      return LoopDevice(path, std::move(fd));
    }
    if (errno != EBUSY) return CannotMake("ioctl(LOOP_CONFIGURE)");
  }
  return absl::FailedPreconditionError("other processes take all loop devices");
}

LoopDevice::~LoopDevice() {
  if (fd_.ok()) ::ioctl(fd_.get(), LOOP_CLR_FD, 0);
}

}  // namespace optstate::storage
