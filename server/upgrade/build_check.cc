#include "server/upgrade/build_check.h"

#include <google/protobuf/text_format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/shm/frame.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"
#include "server/accept/hello_check.h"
#include "server/config/own_flags.h"
#include "server/engine/versions.h"
#include "server/os/run_program.h"
#include "server/upgrade/handover.h"

namespace optstate::upgrade {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

constexpr char kStopFirst[] = "or stop the daemon first";
// Advice for a next build that would find jobs that it cannot open.
constexpr char kSaveFirst[] =
    "or save checkpoints of all jobs, delete these and stop the daemon first: "
    "it cannot open state of that format";

absl::Status CheckExecutable(const std::string& path) {
  if (!absl::StartsWith(path, "/")) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", path, "\" is no absolute path"));
  }
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) {
    return OsError(errno, absl::StrCat("stat ", path));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is no file"));
  }
  if ((info.st_mode & 0111) == 0 || ::access(path.c_str(), X_OK) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(path, " is not executable: chmod +x"));
  }
  return absl::OkStatus();
}

bool Overlap(uint32_t min_a, uint32_t max_a, uint32_t min_b, uint32_t max_b) {
  return std::max(min_a, min_b) <= std::min(max_a, max_b);
}

absl::Status Mismatch(const v1::FormatVersions& current,
                      const v1::FormatVersions& next, absl::string_view what,
                      const std::string& ours, const std::string& theirs,
                      absl::string_view otherwise = kStopFirst) {
  return absl::FailedPreconditionError(absl::StrCat(
      "optstated ", next.version(), " cannot take over from optstated ",
      current.version(), ": ", what, ", which is ", ours, " here and there ",
      theirs, ". Upgrade to a version that shares it, ", otherwise));
}

std::string Range(uint32_t min, uint32_t max) {
  return min == max ? absl::StrCat(min) : absl::StrCat(min, " to ", max);
}

}  // namespace

v1::FormatVersions OwnFormatVersions() {
  v1::FormatVersions versions;
  versions.set_version(std::string(kVersion));
  versions.set_session_min(accept::kProtocolVersionMin);
  versions.set_session_max(shm::kProtocolVersion);
  versions.set_control_min(engine::kControlVersionMin);
  versions.set_control_max(engine::kControlVersion);
  versions.set_state_min(engine::kStateFormatVersionMin);
  versions.set_state_max(engine::kStateFormatVersion);
  versions.set_handover(kHandoverVersion);
  return versions;
}

absl::Status CheckCanTakeOver(const v1::FormatVersions& current,
                              const v1::FormatVersions& next) {
  // The jobs have the newest state version that the current build writes.
  if (current.state_max() < next.state_min() ||
      current.state_max() > next.state_max()) {
    return Mismatch(current, next, "it does not read the jobs' state format",
                    absl::StrCat(current.state_max()),
                    Range(next.state_min(), next.state_max()), kSaveFirst);
  }
  // Attached ranks may speak the newest protocol of the current build, and come
  // back.
  if (current.session_max() < next.session_min() ||
      current.session_max() > next.session_max()) {
    return Mismatch(current, next, "it does not speak the ranks' protocol",
                    Range(current.session_min(), current.session_max()),
                    Range(next.session_min(), next.session_max()));
  }
  if (!Overlap(current.control_min(), current.control_max(), next.control_min(),
               next.control_max())) {
    return Mismatch(current, next, "it does not speak the engines' protocol",
                    Range(current.control_min(), current.control_max()),
                    Range(next.control_min(), next.control_max()));
  }
  if (current.handover() != next.handover()) {
    return Mismatch(current, next, "it does not read the handover",
                    absl::StrCat(current.handover()),
                    absl::StrCat(next.handover()));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::FormatVersions> CheckBuild(
    const std::string& path, const std::vector<std::string>& args) {
  OPTSTATE_RETURN_IF_ERROR(CheckExecutable(path));
  OPTSTATE_ASSIGN_OR_RETURN(
      const os::ProgramResult said,
      os::RunProgram(path, {args[0], config::kFormatVersionsFlag}, kTimeout));
  v1::FormatVersions versions;
  google::protobuf::TextFormat::Parser parser;
  parser.AllowUnknownField(true);  // a later build may say more
  if (said.exit_status != 0 ||
      !parser.ParseFromString(said.output, &versions) ||
      versions.version().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " is no optstated that could take over from this one: ",
        config::kFormatVersionsFlag, " gives exit status ", said.exit_status));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckCanTakeOver(OwnFormatVersions(), versions));
  std::vector<std::string> check = args;
  check.push_back("--check-config");
  OPTSTATE_ASSIGN_OR_RETURN(const os::ProgramResult checked,
                            os::RunProgram(path, check, kTimeout));
  if (checked.exit_status != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "optstated ", versions.version(), " refuses the configuration: ",
        absl::StripAsciiWhitespace(checked.output)));
  }
  return versions;
}

absl::StatusOr<std::string> OwnPath() {
  std::error_code error;
  std::string path =
      std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (error) return OsError(error.value(), "readlink /proc/self/exe");
  // " (deleted)" is the kernel's mark for a file that was replaced.
  return std::string(absl::StripSuffix(path, " (deleted)"));
}

}  // namespace optstate::upgrade
