#include "server/upgrade/next_config.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/config/nvme_directory.h"

namespace optstate::upgrade {
namespace {

constexpr char kStartAgain[] = ": stop it and start it again for that";

}  // namespace

absl::Status CheckSamePlace(const v1::DaemonConfig& own,
                            const v1::DaemonConfig& next) {
  if (next.state_dir() != own.state_dir() || next.socket() != own.socket()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the configuration names state_dir ", next.state_dir(),
                     " and socket ", next.socket(), ", the daemon runs with ",
                     own.state_dir(), " and ", own.socket(), kStartAgain));
  }
  const auto own_disks = config::DirectoryTexts(own.nvme());
  const auto next_disks = config::DirectoryTexts(next.nvme());
  if (next_disks != own_disks) {
    return absl::FailedPreconditionError(
        absl::StrCat("the configuration names nvme.directories ",
                     absl::StrJoin(next_disks, " "), ", the daemon runs with ",
                     absl::StrJoin(own_disks, " "), kStartAgain));
  }
  if (next.huge_pages() == v1::HUGE_PAGES_MOUNT &&
      own.huge_pages() != v1::HUGE_PAGES_MOUNT) {
    return absl::FailedPreconditionError(
        "huge_pages: mount would hide the jobs that there are: stop the daemon "
        "and start it again for that");
  }
  return absl::OkStatus();
}

absl::Status AsRefusal(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) && !absl::IsNotFound(status)) {
    return status;
  }
  return absl::FailedPreconditionError(status.message());
}

}  // namespace optstate::upgrade
