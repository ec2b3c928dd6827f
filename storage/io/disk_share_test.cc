#include "storage/io/disk_share.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
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

  std::unique_ptr<DiskShare> Open(uint32_t weight) const {
    auto share = DiskShare::Open(folder_ + "/shares", weight);
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

TEST_F(DiskShareTest, TheSlotOfAProcessThatWasKilledIsFree) {
  for (int i = 0; i < 300; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto share = DiskShare::Open(folder_ + "/shares", 1000);
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
      DiskShare::Open(folder_ + "/shares", 1).status()));
  all.pop_back();
  EXPECT_TRUE(DiskShare::Open(folder_ + "/shares", 1).ok());
}

TEST_F(DiskShareTest, AFolderThatIsNotThereIsSaid) {
  EXPECT_FALSE(DiskShare::Open(folder_ + "/absent/shares", 1).ok());
}

}  // namespace
}  // namespace optstate::io
