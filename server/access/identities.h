#ifndef OPTSTATE_SERVER_ACCESS_IDENTITIES_H_
#define OPTSTATE_SERVER_ACCESS_IDENTITIES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/caller.h"

namespace optstate::access {

// The content of access.identities_file: who a certificate's names stand for.
//
// Threads: immutable and thread-safe.
class Identities {
 public:
  // Parses a file's text; `file` is for error texts. INVALID_ARGUMENT: bad
  // YAML, a name without its kind, no role; NOT_FOUND: no such user.
  static absl::StatusOr<Identities> Parse(absl::string_view text,
                                          const std::string& file);

  // Finds who the holder of a certificate with `names` is ("URI:...",
  // "DNS:...", see proto/tls/peer_names.h). UNAUTHENTICATED names them when no
  // identity fits.
  absl::StatusOr<Caller> Find(const std::vector<std::string>& names) const;

 private:
  struct Entry {
    std::string name;        // without the *
    bool is_prefix = false;  // names that begin with `name` fit
    uid_t uid = 0;
    Role role = Role::kNone;
  };

  std::vector<Entry> entries_;
};

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_IDENTITIES_H_
