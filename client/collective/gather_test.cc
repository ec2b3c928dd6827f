#include "client/collective/gather.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/collective/single_rank.h"
#include "client/collective/testing/ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

using testing::ElementsAre;

std::vector<absl::Status> OnThree(
    const std::function<absl::Status(Collective&)>& what) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(3);
  EXPECT_TRUE(all.ok()) << all.status();
  return all.ok() ? OnRanks(*all, what)
                  : std::vector<absl::Status>{all.status()};
}

TEST(Gather, NumbersAndTexts) {
  for (const absl::Status& each :
       OnThree([](Collective& collective) -> absl::Status {
         const std::vector<uint64_t> mine = {collective.rank(),
                                             ~uint64_t{collective.rank()}};
         OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> numbers,
                                   GatherNumbers(collective, mine));
         EXPECT_THAT(numbers, ElementsAre(0, ~uint64_t{0}, 1, ~uint64_t{1}, 2,
                                          ~uint64_t{2}));
         const std::string text(collective.rank() * 5, 'x');
         OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                                   GatherTexts(collective, text));
         EXPECT_THAT(texts, ElementsAre("", "xxxxx", "xxxxxxxxxx"));
         OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::string> empty,
                                   GatherTexts(collective, ""));
         EXPECT_THAT(empty, ElementsAre("", "", ""));
         return absl::OkStatus();
       })) {
    EXPECT_TRUE(each.ok()) << each;
  }
}

TEST(Gather, TheFirstDifferenceIsFound) {
  for (const absl::Status& each :
       OnThree([](Collective& collective) -> absl::Status {
         OPTSTATE_ASSIGN_OR_RETURN(
             const std::optional<Unlike> none,
             FindUnlike(collective, "the same\non all\n"));
         EXPECT_FALSE(none.has_value());
         const std::string mine =
             absl::StrCat("first line\nworth ",
                          collective.rank() == 2 ? "4\x01" : "5", "\nlast\n");
         OPTSTATE_ASSIGN_OR_RETURN(const std::optional<Unlike> unlike,
                                   FindUnlike(collective, mine));
         if (!unlike.has_value()) return absl::InternalError("not found");
         EXPECT_EQ(unlike->rank, 2u);
         EXPECT_EQ(unlike->of_first, "worth 5");
         EXPECT_EQ(unlike->of_other, "worth 4?");
         OPTSTATE_ASSIGN_OR_RETURN(
             const std::optional<Unlike> shorter,
             FindUnlike(collective, collective.rank() == 0 ? "a\nb\n" : "a\n"));
         if (!shorter.has_value()) return absl::InternalError("not found");
         EXPECT_EQ(shorter->rank, 1u);
         EXPECT_EQ(shorter->of_first, "b");
         EXPECT_EQ(shorter->of_other, "nothing more");
         return absl::OkStatus();
       })) {
    EXPECT_TRUE(each.ok()) << each;
  }
}

// The texts are longer than what a rank may send.
TEST(Gather, ADifferenceIsFoundFarBehind) {
  for (const absl::Status& each :
       OnThree([](Collective& collective) -> absl::Status {
         std::string mine;
         while (mine.size() < kGatheredTextBytesMax + 100) mine += "a line\n";
         absl::StrAppend(&mine, "of rank ", collective.rank() == 0 ? 0 : 1,
                         "\nlast\n");
         OPTSTATE_ASSIGN_OR_RETURN(const std::optional<Unlike> unlike,
                                   FindUnlike(collective, mine));
         if (!unlike.has_value()) return absl::InternalError("not found");
         EXPECT_EQ(unlike->rank, 1u);
         EXPECT_EQ(unlike->of_first, "of rank 0");
         EXPECT_EQ(unlike->of_other, "of rank 1");
         return absl::OkStatus();
       })) {
    EXPECT_TRUE(each.ok()) << each;
  }
}

TEST(Gather, AnErrorOfOneIsThatOfAll) {
  const std::vector<absl::Status> results =
      OnThree([](Collective& collective) -> absl::Status {
        OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective, absl::OkStatus()));
        const absl::Status mine = collective.rank() == 1
                                      ? absl::DataLossError("a disk\nis broken")
                                      : absl::OkStatus();
        return AgreeOn(collective, mine);
      });
  ASSERT_EQ(results.size(), 3u);
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsDataLoss(each)) << each;
  }
  EXPECT_EQ(results[0].message(), "rank 1: a disk?is broken");
  EXPECT_EQ(results[1].message(), "a disk\nis broken");  // its own
}

TEST(Gather, ALostRankLeavesOnesOwnError) {
  const std::unique_ptr<Collective> single = MakeSingleRank();
  single->Abort("over");
  EXPECT_TRUE(absl::IsAborted(AgreeOn(*single, absl::OkStatus())));
  EXPECT_TRUE(absl::IsNotFound(AgreeOn(*single, absl::NotFoundError("mine"))));
}

}  // namespace
}  // namespace optstate::client
