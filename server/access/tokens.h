#ifndef OPTSTATE_SERVER_ACCESS_TOKENS_H_
#define OPTSTATE_SERVER_ACCESS_TOKENS_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/caller.h"

namespace optstate::access {

// The content of access.tokens_file. Only digests are kept: whoever reads the
// file cannot show a token. A token is long and random (`openssl rand -hex
// 32`), so one SHA-256 is enough.
//
// Threads: immutable and thread-safe.
class Tokens {
 public:
  // Limit of a token that a client shows.
  static constexpr size_t kBytesMax = 4096;

  // Parses a file's text; `file` is for error texts. INVALID_ARGUMENT: bad
  // YAML, no name, no digest, no role; NOT_FOUND: no such user.
  static absl::StatusOr<Tokens> Parse(absl::string_view text,
                                      const std::string& file);

  // Finds who shows `token`, in a time that does not depend on the digests.
  // UNAUTHENTICATED: none of these.
  absl::StatusOr<Caller> Find(absl::string_view token) const;

 private:
  using Digest = std::array<uint8_t, 32>;
  struct Entry {
    Digest digest;
    Caller caller;
  };

  std::vector<Entry> entries_;
};

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_TOKENS_H_
