#include "server/accept/hello_check.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/shm/frame.h"
#include "proto/types/status_macros.h"

namespace optstate::accept {
namespace {

constexpr size_t kJobNameBytesMax = 128;
constexpr size_t kClientVersionBytesMax = 128;
constexpr size_t kQuotedBytesMax = 64;

// Quotes a stranger's text for a log line and an error text.
std::string Quoted(absl::string_view text) {
  const bool cut = text.size() > kQuotedBytesMax;
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kQuotedBytesMax)),
                      cut ? "...\"" : "\"");
}

absl::StatusOr<uint32_t> AgreeOnVersion(const v1::Hello& hello) {
  if (hello.protocol_version_min() <= shm::kProtocolVersion &&
      hello.protocol_version_max() >= kProtocolVersionMin &&
      hello.protocol_version_min() <= hello.protocol_version_max()) {
    return std::min(hello.protocol_version_max(), shm::kProtocolVersion);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the client (version ", Quoted(hello.client_version()),
                   ") speaks session protocols ", hello.protocol_version_min(),
                   " to ", hello.protocol_version_max(), ", this daemon ",
                   kProtocolVersionMin, " to ", shm::kProtocolVersion,
                   ": install matching versions of optstate on both sides"));
}

}  // namespace

absl::Status CheckJobName(absl::string_view name) {
  if (name.empty()) {
    return absl::InvalidArgumentError(
        "the job has no name: give one, as job=\"my-run\"");
  }
  if (name.size() > kJobNameBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("job name ", Quoted(name), " has ", name.size(),
                     " characters; at most ", kJobNameBytesMax));
  }
  for (const char c : name) {
    if (absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-') continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "job name ", Quoted(name), ": only A-Z a-z 0-9 . _ - are allowed"));
  }
  if (!absl::ascii_isalnum(name[0])) {
    return absl::InvalidArgumentError(absl::StrCat(
        "job name ", Quoted(name), " must start with a letter or a digit"));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> CheckHello(const v1::Hello& hello,
                                    const PeerCredentials& peer) {
  // The version is checked first: in another protocol the other fields may have
  // another meaning.
  OPTSTATE_ASSIGN_OR_RETURN(const uint32_t version, AgreeOnVersion(hello));
  OPTSTATE_RETURN_IF_ERROR(CheckJobName(hello.job()));
  if (hello.client_version().size() > kClientVersionBytesMax) {
    return absl::InvalidArgumentError("client_version is too long");
  }
  if (hello.wire() != v1::WIRE_SHM && hello.wire() != v1::WIRE_GRPC) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown wire ", static_cast<int>(hello.wire())));
  }
  if (hello.wire() == v1::WIRE_SHM && !peer.is_unix()) {
    return absl::InvalidArgumentError(
        "shared memory needs a unix socket, and this connection is TCP: use "
        "the endpoint unix:PATH on the daemon's node, or grpc:HOST:PORT");
  }
  return version;
}

}  // namespace optstate::accept
