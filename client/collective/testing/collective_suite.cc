#include "client/collective/testing/collective_suite.h"

#include <algorithm>
#include <array>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/collective/testing/elements.h"
#include "gmock/gmock.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

using Bytes = std::vector<std::byte>;

// Counts around parts of ranks, blocks of sums, and slices of tcp.
constexpr size_t kCounts[] = {0, 1, 2, 3, 5, 8, 1000, 4097, 70001};

// A value of one rank's element: sums of few ranks are exact in every type.
int ValueOf(uint32_t rank, size_t i) {
  return static_cast<int>((i * 7 + rank * 3) % 11);
}

Bytes InputOf(ElementType type, uint32_t rank, size_t count) {
  return Elements(type, count, [&](size_t i) { return ValueOf(rank, i); });
}

Bytes SumOf(ElementType type, uint32_t ranks, size_t count) {
  return Elements(type, count, [&](size_t i) {
    int sum = 0;
    for (uint32_t rank = 0; rank < ranks; ++rank) sum += ValueOf(rank, i);
    return sum;
  });
}

// Returns an error with the text unless the arrays are equal, so that ranks'
// threads can compare.
absl::Status CheckEqual(const Bytes& actual, const Bytes& expected,
                        absl::string_view what) {
  if (actual == expected) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("wrong result of ", what));
}

void ExpectAllOk(const std::vector<absl::Status>& results) {
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_TRUE(results[rank].ok()) << "rank " << rank << ": " << results[rank];
  }
}

bool IsOfLostRank(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsAborted(status) ||
         absl::IsUnavailable(status);
}

absl::Span<std::byte> PartOf(Bytes& bytes, const Collective& collective) {
  const size_t part = bytes.size() / collective.world_size();
  return absl::MakeSpan(bytes).subspan(collective.rank() * part, part);
}

}  // namespace

Collectives CollectiveSuite::Make(uint32_t ranks, absl::Duration timeout) {
  absl::StatusOr<Collectives> made = GetParam().make(ranks, timeout);
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? *std::move(made) : Collectives();
}

std::string CollectiveWorldName(
    const testing::TestParamInfo<CollectiveWorld>& info) {
  return info.param.name;
}

TEST_P(CollectiveSuite, RanksKnowTheirPlaces) {
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ASSERT_EQ(all.size(), ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(all[rank]->rank(), rank);
      EXPECT_EQ(all[rank]->world_size(), ranks);
      EXPECT_TRUE(all[rank]->failure().ok());
    }
  }
}

TEST_P(CollectiveSuite, AllReduce) {
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      for (const ElementType type : kElementTypes) {
        for (const size_t count : kCounts) {
          const Bytes expected = SumOf(type, ranks, count);
          Bytes in = InputOf(type, each.rank(), count);
          Bytes out(in.size());
          OPTSTATE_RETURN_IF_ERROR(
              each.AllReduce(type, in, absl::MakeSpan(out)));
          OPTSTATE_RETURN_IF_ERROR(
              CheckEqual(out, expected, absl::StrCat(count, " ", Name(type))));
          OPTSTATE_RETURN_IF_ERROR(
              CheckEqual(in, InputOf(type, each.rank(), count), "the input"));
          OPTSTATE_RETURN_IF_ERROR(
              each.AllReduce(type, in, absl::MakeSpan(in)));
          OPTSTATE_RETURN_IF_ERROR(CheckEqual(in, expected, "in place"));
        }
      }
      return absl::OkStatus();
    }));
  }
}

TEST_P(CollectiveSuite, AllReduceEach) {
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      const ElementType type = ElementType::kFloat32;
      std::vector<Bytes> buffers;
      std::vector<SumBuffers> sums;
      for (const size_t count : kCounts) {
        buffers.push_back(InputOf(type, each.rank(), count));
      }
      for (Bytes& buffer : buffers) {
        sums.push_back({.in = buffer, .out = absl::MakeSpan(buffer)});
      }
      OPTSTATE_RETURN_IF_ERROR(each.AllReduceEach(type, sums));
      for (size_t i = 0; i < buffers.size(); ++i) {
        OPTSTATE_RETURN_IF_ERROR(CheckEqual(
            buffers[i], SumOf(type, ranks, kCounts[i]), "one of several"));
      }
      return each.AllReduceEach(type, {});
    }));
  }
}

TEST_P(CollectiveSuite, ReduceScatter) {
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      for (const ElementType type : kElementTypes) {
        for (const size_t count : kCounts) {
          Bytes sum = SumOf(type, ranks, count * ranks);
          const absl::Span<std::byte> mine = PartOf(sum, each);
          const Bytes expected(mine.begin(), mine.end());
          Bytes in = InputOf(type, each.rank(), count * ranks);
          Bytes out(expected.size());
          OPTSTATE_RETURN_IF_ERROR(
              each.ReduceScatter(type, in, absl::MakeSpan(out)));
          OPTSTATE_RETURN_IF_ERROR(CheckEqual(out, expected, "a part"));
          const absl::Span<std::byte> place = PartOf(in, each);
          OPTSTATE_RETURN_IF_ERROR(each.ReduceScatter(type, in, place));
          OPTSTATE_RETURN_IF_ERROR(CheckEqual(Bytes(place.begin(), place.end()),
                                              expected, "in place"));
        }
      }
      return absl::OkStatus();
    }));
  }
}

TEST_P(CollectiveSuite, ReduceToEachRoot) {
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      for (uint32_t root = 0; root < ranks; ++root) {
        for (const ElementType type : kElementTypes) {
          const Bytes in = InputOf(type, each.rank(), 4097);
          const Bytes before(in.size(), std::byte{0x5A});
          Bytes out = before;
          OPTSTATE_RETURN_IF_ERROR(
              each.Reduce(type, root, in, absl::MakeSpan(out)));
          OPTSTATE_RETURN_IF_ERROR(CheckEqual(
              out, root == each.rank() ? SumOf(type, ranks, 4097) : before,
              "reduce"));
        }
      }
      return absl::OkStatus();
    }));
  }
}

TEST_P(CollectiveSuite, AllGather) {
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      for (const size_t count : kCounts) {
        Bytes expected;
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          const Bytes part = InputOf(ElementType::kUint8, rank, count);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        const Bytes in = InputOf(ElementType::kUint8, each.rank(), count);
        Bytes out(expected.size());
        OPTSTATE_RETURN_IF_ERROR(each.AllGather(in, absl::MakeSpan(out)));
        OPTSTATE_RETURN_IF_ERROR(CheckEqual(out, expected, "all_gather"));
        Bytes whole(expected.size());
        const absl::Span<std::byte> mine = PartOf(whole, each);
        std::copy(in.begin(), in.end(), mine.begin());
        OPTSTATE_RETURN_IF_ERROR(each.AllGather(mine, absl::MakeSpan(whole)));
        OPTSTATE_RETURN_IF_ERROR(CheckEqual(whole, expected, "in place"));
      }
      return absl::OkStatus();
    }));
  }
}

TEST_P(CollectiveSuite, BroadcastFromEachRoot) {
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      for (uint32_t root = 0; root < ranks; ++root) {
        for (const size_t count : kCounts) {
          Bytes buffer = InputOf(ElementType::kUint8, each.rank(), count);
          OPTSTATE_RETURN_IF_ERROR(
              each.Broadcast(root, absl::MakeSpan(buffer)));
          OPTSTATE_RETURN_IF_ERROR(CheckEqual(
              buffer, InputOf(ElementType::kUint8, root, count), "broadcast"));
        }
        OPTSTATE_RETURN_IF_ERROR(each.Barrier());
      }
      return absl::OkStatus();
    }));
  }
}

// Sums of these values in float32 depend on the order.
TEST_P(CollectiveSuite, SumsAreInTheOrderOfTheRanks) {
  constexpr std::array<float, 5> kValues = {1e8f, 1.25f, -1e8f, 3.5f, 1e-3f};
  for (const uint32_t ranks : world_sizes()) {
    ASSERT_LE(ranks, kValues.size());
    float expected = kValues[0];
    for (uint32_t rank = 1; rank < ranks; ++rank) expected += kValues[rank];
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      Bytes bytes = Elements(ElementType::kFloat32, 2000,
                             [&](size_t) { return kValues[each.rank()]; });
      OPTSTATE_RETURN_IF_ERROR(
          each.AllReduce(ElementType::kFloat32, bytes, absl::MakeSpan(bytes)));
      return CheckEqual(bytes,
                        Elements(ElementType::kFloat32, 2000,
                                 [&](size_t) { return expected; }),
                        "sums in order");
    }));
  }
}

// Additions in bfloat16 would lose the small values one by one.
TEST_P(CollectiveSuite, BFloat16IsRoundedOnce) {
  for (const uint32_t ranks : world_sizes()) {
    float expected = 256;
    for (uint32_t rank = 1; rank < ranks; ++rank) expected += 0.75f;
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      Bytes bytes = Elements(ElementType::kBFloat16, 10, [&](size_t) {
        return each.rank() == 0 ? 256.0f : 0.75f;
      });
      OPTSTATE_RETURN_IF_ERROR(
          each.AllReduce(ElementType::kBFloat16, bytes, absl::MakeSpan(bytes)));
      return CheckEqual(bytes,
                        Elements(ElementType::kBFloat16, 10,
                                 [&](size_t) { return expected; }),
                        "bfloat16");
    }));
  }
}

TEST_P(CollectiveSuite, BadArgumentsLeaveItUsable) {
  const uint32_t ranks = largest();
  const Collectives all = Make(ranks);
  ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
    Bytes whole(16 * size_t{ranks} + 16);
    const absl::Span<std::byte> bytes = absl::MakeSpan(whole);
    const auto type = ElementType::kFloat32;
    const std::vector<absl::Status> refused = {
        each.AllReduce(type, bytes.subspan(0, 6), bytes.subspan(0, 6)),
        each.AllReduce(type, bytes.subspan(1, 4), bytes.subspan(1, 4)),
        each.AllReduce(type, bytes.subspan(0, 8), bytes.subspan(8, 4)),
        each.AllReduce(type, bytes.subspan(0, 8), bytes.subspan(4, 8)),
        each.AllReduce(static_cast<ElementType>(77), bytes, bytes),
        each.ReduceScatter(type, bytes.subspan(0, 4 * ranks),
                           bytes.subspan(0, 8)),
        each.Reduce(type, ranks, bytes, bytes),
        each.AllGather(bytes.subspan(0, 2), bytes.subspan(4, 2 * ranks + 1)),
        each.Broadcast(ranks, bytes)};
    for (size_t i = 0; i < refused.size(); ++i) {
      if (absl::IsInvalidArgument(refused[i])) continue;
      return absl::InternalError(absl::StrCat("call ", i, " was taken"));
    }
    OPTSTATE_RETURN_IF_ERROR(each.failure());
    return each.Barrier();
  }));
}

TEST_P(CollectiveSuite, AnAbortedOneStaysSo) {
  const Collectives all = Make(1);
  ASSERT_EQ(all.size(), 1u);
  all[0]->Abort("the first");
  all[0]->Abort("the second");
  const absl::Status status = all[0]->Barrier();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("the first"));
  EXPECT_EQ(all[0]->failure(), status);
  Bytes bytes(8);
  EXPECT_EQ(
      all[0]->AllReduce(ElementType::kFloat64, bytes, absl::MakeSpan(bytes)),
      status);
}

// No rank waits for ever, however it learns of the abort.
TEST_P(CollectiveSuite, AnAbortEndsEveryRank) {
  const uint32_t ranks = largest();
  if (ranks == 1) GTEST_SKIP() << "there is no other rank";
  const Collectives all = Make(ranks, absl::Milliseconds(500));
  const std::vector<absl::Status> results = OnRanks(all, [](Collective& each) {
    if (each.rank() != 1) return each.Barrier();
    each.Abort("out of memory");
    return each.failure();
  });
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(IsOfLostRank(results[rank])) << rank << ": " << results[rank];
    EXPECT_EQ(all[rank]->failure(), results[rank]);
    EXPECT_EQ(all[rank]->Barrier(), results[rank]);
  }
}

TEST_P(CollectiveSuite, AbortWakesTheOperationOfAnotherThread) {
  const uint32_t ranks = largest();
  if (ranks == 1) GTEST_SKIP() << "nothing waits";
  const Collectives all = Make(ranks);
  // Rank 0 never comes; one thread waits in a barrier, or is about to.
  const std::vector<absl::Status> results = OnRanks(2, [&](uint32_t thread) {
    if (thread == 0) return all[1]->Barrier();
    all[1]->Abort("enough");
    return all[1]->failure();
  });
  EXPECT_TRUE(absl::IsAborted(results[0])) << results[0];
  EXPECT_EQ(results[0], results[1]);
}

TEST_P(CollectiveSuite, ARankThatDoesNotComeEndsEveryRank) {
  const uint32_t ranks = largest();
  if (ranks == 1) GTEST_SKIP() << "there is no other rank";
  const Collectives all = Make(ranks, absl::Milliseconds(300));
  const std::vector<absl::Status> results = OnRanks(all, [](Collective& each) {
    if (each.rank() == 0) return absl::OkStatus();
    std::vector<float> values(1000, 1.0f);
    const auto bytes =
        absl::MakeSpan(reinterpret_cast<std::byte*>(values.data()), 4000);
    return each.AllReduce(ElementType::kFloat32, bytes, bytes);
  });
  bool has_timed_out = false;
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    EXPECT_TRUE(IsOfLostRank(results[rank])) << rank << ": " << results[rank];
    has_timed_out |= absl::IsDeadlineExceeded(results[rank]);
  }
  EXPECT_TRUE(has_timed_out);
  // Which error it is depends on what the others have sent before they ended.
  EXPECT_FALSE(all[0]->Barrier().ok());
}

// Ranks make the same random calls, and find what they would have computed.
TEST_P(CollectiveSuite, RandomOperations) {
  const uint64_t seed = ScriptSeed();
  for (const uint32_t ranks : world_sizes()) {
    const Collectives all = Make(ranks);
    ExpectAllOk(OnRanks(all, [&](Collective& each) -> absl::Status {
      std::mt19937_64 draw(seed);
      for (int i = 0; i < 60; ++i) {
        const ElementType type = kElementTypes[draw() % 4];
        const size_t count = draw() % 3000;
        const auto root = static_cast<uint32_t>(draw() % ranks);
        const uint64_t kind = draw() % 4;
        Bytes bytes = InputOf(type, each.rank(), count);
        const absl::Span<std::byte> out = absl::MakeSpan(bytes);
        Bytes expected = SumOf(type, ranks, count);
        if (kind == 0) {
          OPTSTATE_RETURN_IF_ERROR(each.AllReduce(type, bytes, out));
        } else if (kind == 1) {
          OPTSTATE_RETURN_IF_ERROR(each.Reduce(type, root, bytes, out));
          if (root != each.rank()) expected = bytes;
        } else if (kind == 2) {
          OPTSTATE_RETURN_IF_ERROR(each.Broadcast(root, out));
          expected = InputOf(type, root, count);
        } else {
          OPTSTATE_RETURN_IF_ERROR(each.Barrier());
          expected = bytes;
        }
        OPTSTATE_RETURN_IF_ERROR(
            CheckEqual(bytes, expected, absl::StrCat("call ", i)));
      }
      return absl::OkStatus();
    }));
  }
}

}  // namespace optstate::client
