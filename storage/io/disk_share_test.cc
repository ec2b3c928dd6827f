#include "storage/io/disk_share.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace optstate::io {
namespace {

constexpr int64_t kNow = 1'000'000'000'000;
constexpr int64_t kSecond = 1'000'000'000;

class DiskShareTest : public testing::Test {
 protected:
  DiskShareTest() : folder_(testing::TempDir() + "/disk_share-XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
  }
  ~DiskShareTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<DiskShare> Open(uint32_t weight,
                                  DiskShare::User user = {}) const {
    auto share = DiskShare::Open(folder_ + "/shares", weight, user);
    EXPECT_TRUE(share.ok()) << share.status();
    return share.ok() ? *std::move(share) : nullptr;
  }

  std::string folder_;
};

TEST_F(DiskShareTest, PartsAreInProportionToTheWeightsOfWhoIsActive) {
  const auto heavy = Open(300);
  const auto light = Open(100);
  heavy->NoteActive(kNow);
  EXPECT_EQ(heavy->Part(kNow), 1);
  light->NoteActive(kNow);
  EXPECT_EQ(heavy->Part(kNow), 0.75);
  EXPECT_EQ(light->Part(kNow), 0.25);
  {
    const auto third = Open(400);
    third->NoteActive(kNow);
    EXPECT_EQ(light->Part(kNow), 0.125);
  }
  // The third share has ended.
  EXPECT_EQ(light->Part(kNow), 0.25);
  // The heavy one has had nothing to do for a second.
  light->NoteActive(kNow + kSecond);
  EXPECT_EQ(light->Part(kNow + kSecond), 1);
}

// However many processes a user has, and whatever their weights are.
TEST_F(DiskShareTest, UsersDivideTheDisksFirst) {
  const auto alone = Open(100, {.id = 7, .weight = 100});
  alone->NoteActive(kNow);
  std::vector<std::unique_ptr<DiskShare>> flood;
  for (int i = 0; i < 10; ++i) {
    flood.push_back(Open(10000, {.id = 8, .weight = 100}));
    flood.back()->NoteActive(kNow);
  }
  EXPECT_DOUBLE_EQ(alone->Part(kNow), 0.5);
  double parts = 0;
  for (const auto& each : flood) parts += each->Part(kNow);
  EXPECT_DOUBLE_EQ(parts, 0.5);
}

TEST_F(DiskShareTest, UsersAndThenTheirProcessesShareByWeight) {
  const auto heavy = Open(300, {.id = 7, .weight = 200});
  const auto light = Open(100, {.id = 7, .weight = 200});
  const auto other = Open(1, {.id = 8, .weight = 600});
  for (const auto* each : {&heavy, &light, &other}) (*each)->NoteActive(kNow);
  EXPECT_DOUBLE_EQ(heavy->Part(kNow), 0.25 * 0.75);
  EXPECT_DOUBLE_EQ(light->Part(kNow), 0.25 * 0.25);
  EXPECT_DOUBLE_EQ(other->Part(kNow), 0.75);
  // The other user has had nothing to do for a second.
  heavy->NoteActive(kNow + kSecond);
  light->NoteActive(kNow + kSecond);
  EXPECT_DOUBLE_EQ(light->Part(kNow + kSecond), 0.25);
}

// It wrote the first two numbers of its slot alone, as here.
TEST_F(DiskShareTest, AProcessOfAFormerBuildCountsByItsWeight) {
  const auto own = Open(100, {.id = 7, .weight = 100});
  auto former = Open(300);
  former->NoteActive(kNow);
  std::fstream file(folder_ + "/shares",
                    std::ios::in | std::ios::out | std::ios::binary);
  // The second slot's numbers behind its time and weight.
  file.seekp(64 + 12);
  file.write(std::string(8, '\0').data(), 8);
  file.close();
  EXPECT_DOUBLE_EQ(own->Part(kNow), 0.25);
}

TEST_F(DiskShareTest, TheSlotOfAProcessThatWasKilledIsFree) {
  for (int i = 0; i < 300; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto share = DiskShare::Open(folder_ + "/shares", 1000, {});
      if (!share.ok()) ::_exit(1);
      (*share)->NoteActive(kNow);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  }
  // The next process takes the slot, and what its former owner said goes with
  // that.
  const auto share = Open(100);
  const auto other = Open(100);
  EXPECT_EQ(other->Part(kNow), 1);
}

TEST_F(DiskShareTest, NoMoreThanThereAreSlotsAreServed) {
  std::vector<std::unique_ptr<DiskShare>> all;
  for (int i = 0; i < 256; ++i) all.push_back(Open(1));
  EXPECT_TRUE(absl::IsResourceExhausted(
      DiskShare::Open(folder_ + "/shares", 1, {}).status()));
  all.pop_back();
  EXPECT_TRUE(DiskShare::Open(folder_ + "/shares", 1, {}).ok());
}

TEST_F(DiskShareTest, AFolderThatIsNotThereIsSaid) {
  EXPECT_FALSE(DiskShare::Open(folder_ + "/absent/shares", 1, {}).ok());
}

}  // namespace
}  // namespace optstate::io
