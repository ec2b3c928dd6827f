#include "client/ctl/endpoints.h"

#include <cerrno>
#include <fstream>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/endpoint/endpoint.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Endpoints in order, each with the place that names it.
class Collected {
 public:
  absl::Status Add(absl::string_view text, const std::string& place) {
    const auto parsed = client::ParseEndpoint(text);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(place, ": ", parsed.status().message()));
    }
    if (!known_.insert(parsed->ToString()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(place, ": ", text, " is named twice"));
    }
    endpoints_.emplace_back(text);
    return absl::OkStatus();
  }

  std::vector<std::string> endpoints() && { return std::move(endpoints_); }

 private:
  std::vector<std::string> endpoints_;
  absl::flat_hash_set<std::string> known_;
};

absl::Status AddFile(const std::string& path, Collected* collected) {
  errno = 0;
  std::ifstream file(path);
  if (!file) {
    return OsError(errno == 0 ? EIO : errno,
                   absl::StrCat("--endpoints-file ", path));
  }
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty() || text.front() == '#') continue;
    OPTSTATE_RETURN_IF_ERROR(
        collected->Add(text, absl::StrCat(path, ":", number)));
  }
  if (file.bad()) {
    return OsError(errno == 0 ? EIO : errno,
                   absl::StrCat("--endpoints-file ", path));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> NamedEndpoints(
    const std::vector<std::string>& endpoints, const std::string& file) {
  Collected collected;
  for (const std::string& endpoint : endpoints) {
    OPTSTATE_RETURN_IF_ERROR(collected.Add(endpoint, "--endpoint"));
  }
  if (!file.empty()) OPTSTATE_RETURN_IF_ERROR(AddFile(file, &collected));
  return std::move(collected).endpoints();
}

}  // namespace optstate::ctl
