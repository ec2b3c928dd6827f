#ifndef OPTSTATE_CLIENT_COLLECTIVE_GATHER_H_
#define OPTSTATE_CLIENT_COLLECTIVE_GATHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/collective/collective.h"

namespace optstate::client {

// Small messages among ranks, over a collective in host memory: for what they
// agree about, as opposed to gradients. All of them are collective.

// The longest text that a rank sends; what is longer is cut.
inline constexpr size_t kGatheredTextBytesMax = size_t{1} << 20;

// Returns each rank's numbers, of which all have equally many, one rank after
// the other.
absl::StatusOr<std::vector<uint64_t>> GatherNumbers(
    Collective& collective, absl::Span<const uint64_t> mine);

// Returns each rank's text, by rank.
absl::StatusOr<std::vector<std::string>> GatherTexts(Collective& collective,
                                                     absl::string_view mine);

// The first difference of two ranks' texts: what follows in each of them, from
// the beginning of the word in which they part.
struct Unlike {
  uint32_t rank = 0;  // the first one that differs from rank 0
  std::string of_first;
  std::string of_other;
};

// Returns where ranks have other texts than rank 0, the same on every rank;
// nothing: all are equal. Texts may have any length: digests are exchanged, and
// the words that differ.
absl::StatusOr<std::optional<Unlike>> FindUnlike(Collective& collective,
                                                 absl::string_view mine);

// Returns OK when no rank has an error; else this rank's own or, on a rank that
// has none, that of the first rank that has one, with its code and text.
absl::Status AgreeOn(Collective& collective, const absl::Status& mine);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_GATHER_H_
