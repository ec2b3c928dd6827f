#include "server/access/live_access.h"

#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/os/small_file.h"

namespace optstate::access {
namespace {

constexpr size_t kFileBytesMax = 4 << 20;

// Returns FAILED_PRECONDITION when the file's permissions have bits of
// `forbidden`.
absl::Status CheckMode(const std::string& path, mode_t forbidden,
                       absl::string_view advice) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return OsError(errno, path);
  if ((info.st_mode & forbidden) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(path, " is accessible by others: ", advice));
}

}  // namespace

absl::StatusOr<Caller> AccessRules::FindByNames(
    const std::vector<std::string>& names) const {
  if (!asks_for_certificates_) return Caller{.via = Via::kTls};
  return identities_.Find(names);
}

absl::StatusOr<std::unique_ptr<LiveAccess>> LiveAccess::Load(
    const v1::DaemonConfig& config, Clock clock) {
  std::unique_ptr<LiveAccess> access(new LiveAccess(config, std::move(clock)));
  absl::MutexLock lock(&access->mutex_);
  access->stamps_ = access->Stamps();
  OPTSTATE_ASSIGN_OR_RETURN(access->rules_, access->Read());
  access->looked_at_ = access->clock_();
  return access;
}

std::vector<LiveAccess::Stamp> LiveAccess::Stamps() const {
  std::vector<Stamp> stamps;
  for (const std::string* path :
       {&tls_.certificate_file(), &tls_.key_file(), &tls_.client_ca_file(),
        &access_.identities_file(), &access_.tokens_file()}) {
    Stamp stamp;
    struct stat info;
    if (!path->empty() && ::stat(path->c_str(), &info) == 0) {
      stamp = {
          info.st_dev, info.st_ino,
          int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec,
          info.st_size};
    }
    stamps.push_back(stamp);
  }
  return stamps;
}

absl::StatusOr<std::shared_ptr<const AccessRules>> LiveAccess::Read() const {
  OPTSTATE_RETURN_IF_ERROR(CheckMode(
      tls_.key_file(), S_IRWXO,
      "chmod o= it (in Kubernetes: defaultMode: 0440 of the secret's volume)"));
  OPTSTATE_ASSIGN_OR_RETURN(
      auto context,
      tls::TlsContext::Server({.certificate = tls_.certificate_file(),
                               .key = tls_.key_file(),
                               .ca = tls_.client_ca_file()}));
  const bool asks_for_certificates = !tls_.client_ca_file().empty();
  std::string trust;
  Identities identities;
  if (asks_for_certificates) {
    OPTSTATE_ASSIGN_OR_RETURN(
        trust, os::ReadSmallFile(tls_.client_ca_file(), kFileBytesMax));
    const std::string& file = access_.identities_file();
    OPTSTATE_ASSIGN_OR_RETURN(const std::string text,
                              os::ReadSmallFile(file, kFileBytesMax));
    OPTSTATE_ASSIGN_OR_RETURN(identities, Identities::Parse(text, file));
  }
  Tokens tokens;
  if (!access_.tokens_file().empty()) {
    const std::string& file = access_.tokens_file();
    OPTSTATE_RETURN_IF_ERROR(
        CheckMode(file, S_IRWXG | S_IRWXO, "chmod 0600 it"));
    OPTSTATE_ASSIGN_OR_RETURN(trust, os::ReadSmallFile(file, kFileBytesMax));
    OPTSTATE_ASSIGN_OR_RETURN(tokens, Tokens::Parse(trust, file));
  }
  return std::make_shared<const AccessRules>(
      std::move(context), std::move(identities), std::move(tokens),
      std::move(trust), asks_for_certificates);
}

std::shared_ptr<const AccessRules> LiveAccess::Current() {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = clock_();
  if (now - looked_at_ < kLookEvery) return rules_;
  looked_at_ = now;
  // The stamps are taken before the content: what changes meanwhile is seen at
  // the next look.
  std::vector<Stamp> stamps = Stamps();
  if (stamps == stamps_) return rules_;
  stamps_ = std::move(stamps);
  auto read = Read();
  if (read.ok()) {
    rules_ = *std::move(read);
    spdlog::info("the files of tls and access have changed and are in force");
  } else {
    spdlog::error(
        "the files of tls and access have changed, and what they were before "
        "stays in force: {}",
        read.status().ToString());
  }
  return rules_;
}

}  // namespace optstate::access
