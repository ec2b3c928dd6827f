#include "client/collective/gather.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/collective/printable.h"
#include "client/session/content_digest.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The part of a difference that an error shows.
constexpr size_t kShownBytes = 160;

absl::Span<const std::byte> BytesOf(absl::string_view text) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()),
                             text.size());
}

absl::Status CheckHost(const Collective& collective) {
  if (collective.memory() == MemoryKind::kHost) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "ranks agree over host memory, which the ", collective.name(),
      " collective does not take: make a tcp one for it"));
}

// Returns how many bytes the texts of rank 0 and of `rank` have in common at
// their beginning: a binary search over digests, so that texts of any length
// take a few numbers of each rank.
absl::StatusOr<uint64_t> CountCommon(Collective& collective,
                                     absl::string_view mine, uint32_t rank) {
  const uint64_t size = mine.size();
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::vector<uint64_t> sizes,
      GatherNumbers(collective, absl::MakeConstSpan(&size, 1)));
  // So many bytes are in common, and so many are not all.
  uint64_t common = 0;
  uint64_t beyond = std::min(sizes[0], sizes[rank]) + 1;
  while (beyond - common > 1) {
    const uint64_t middle = common + (beyond - common) / 2;
    const uint64_t digest =
        ContentDigest(BytesOf(mine.substr(0, middle)), /*seed=*/0);
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::vector<uint64_t> digests,
        GatherNumbers(collective, absl::MakeConstSpan(&digest, 1)));
    (digests[0] == digests[rank] ? common : beyond) = middle;
  }
  return common;
}

// Returns what follows in a text, from the beginning of the word that has byte
// `at` to the end of its line.
absl::string_view WordAt(absl::string_view text, size_t at) {
  at = std::min(at, text.size());
  const size_t separator = text.substr(0, at).find_last_of(",;\n");
  if (separator != absl::string_view::npos) {
    text.remove_prefix(separator + 1);
  }
  text = text.substr(0, kShownBytes);
  return absl::StripAsciiWhitespace(text.substr(0, text.find('\n')));
}

std::string ShownOf(absl::string_view word) {
  return word.empty() ? std::string("nothing more") : Printable(word);
}

}  // namespace

absl::StatusOr<std::vector<uint64_t>> GatherNumbers(
    Collective& collective, absl::Span<const uint64_t> mine) {
  OPTSTATE_RETURN_IF_ERROR(CheckHost(collective));
  std::vector<uint64_t> all(mine.size() * collective.world_size());
  OPTSTATE_RETURN_IF_ERROR(collective.AllGather(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(mine.data()),
                          mine.size() * sizeof(uint64_t)),
      absl::MakeSpan(reinterpret_cast<std::byte*>(all.data()),
                     all.size() * sizeof(uint64_t))));
  return all;
}

absl::StatusOr<std::vector<std::string>> GatherTexts(Collective& collective,
                                                     absl::string_view mine) {
  mine = mine.substr(0, kGatheredTextBytesMax);
  const uint64_t size = mine.size();
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::vector<uint64_t> sizes,
      GatherNumbers(collective, absl::MakeConstSpan(&size, 1)));
  const uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (longest > kGatheredTextBytesMax) {
    return absl::DataLossError(absl::StrCat("a rank has announced a text of ",
                                            longest, " bytes, the limit is ",
                                            kGatheredTextBytesMax));
  }
  std::vector<std::byte> padded(longest);
  if (!mine.empty()) std::memcpy(padded.data(), mine.data(), mine.size());
  std::vector<std::byte> all(longest * collective.world_size());
  OPTSTATE_RETURN_IF_ERROR(collective.AllGather(padded, absl::MakeSpan(all)));
  std::vector<std::string> texts;
  texts.reserve(sizes.size());
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    texts.emplace_back(
        reinterpret_cast<const char*>(all.data()) + rank * longest,
        sizes[rank]);
  }
  return texts;
}

absl::StatusOr<std::optional<Unlike>> FindUnlike(Collective& collective,
                                                 absl::string_view mine) {
  const uint64_t digest = ContentDigest(BytesOf(mine), /*seed=*/0);
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::vector<uint64_t> digests,
      GatherNumbers(collective, absl::MakeConstSpan(&digest, 1)));
  const auto other =
      std::find_if(digests.begin(), digests.end(),
                   [&](uint64_t each) { return each != digests[0]; });
  if (other == digests.end()) return std::nullopt;
  const auto rank = static_cast<uint32_t>(other - digests.begin());
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t common,
                            CountCommon(collective, mine, rank));
  const bool is_shown = collective.rank() == 0 || collective.rank() == rank;
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::vector<std::string> words,
      GatherTexts(collective, is_shown ? WordAt(mine, common) : ""));
  return Unlike{.rank = rank,
                .of_first = ShownOf(words[0]),
                .of_other = ShownOf(words[rank])};
}

absl::Status AgreeOn(Collective& collective, const absl::Status& mine) {
  const auto code = static_cast<uint64_t>(mine.code());
  const absl::StatusOr<std::vector<uint64_t>> codes =
      GatherNumbers(collective, absl::MakeConstSpan(&code, 1));
  if (!codes.ok()) return mine.ok() ? codes.status() : mine;
  const auto failed = std::find_if(codes->begin(), codes->end(),
                                   [](uint64_t each) { return each != 0; });
  if (failed == codes->end()) return absl::OkStatus();
  const absl::StatusOr<std::vector<std::string>> texts =
      GatherTexts(collective, mine.message());
  if (!mine.ok()) return mine;
  OPTSTATE_RETURN_IF_ERROR(texts.status());
  const auto rank = static_cast<size_t>(failed - codes->begin());
  // Codes that absl does not know become UNKNOWN.
  const bool is_code =
      *failed <= static_cast<uint64_t>(absl::StatusCode::kUnauthenticated);
  return absl::Status(
      is_code ? static_cast<absl::StatusCode>(*failed)
              : absl::StatusCode::kUnknown,
      absl::StrCat("rank ", rank, ": ", Printable((*texts)[rank])));
}

}  // namespace optstate::client
