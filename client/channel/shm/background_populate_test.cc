#include "client/channel/shm/background_populate.h"

#include <atomic>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr uint64_t kSlice = 4 << 20;

bool Never() { return false; }

class BackgroundPopulateTest : public testing::Test {
 protected:
  // Populates the first slice, and the second one when it may; the third fails.
  PopulateFunction Populate() {
    return [this](std::byte* data, uint64_t bytes) {
      EXPECT_EQ(bytes, kSlice);
      const uint64_t slice =
          static_cast<uint64_t>(data - memory_.data()) / kSlice;
      if (slice == 1) at_second_.Notify();
      if (slice >= 1) go_on_.WaitForNotification();
      return slice == 2 ? absl::ResourceExhaustedError("none left")
                        : absl::OkStatus();
    };
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(3 * kSlice);
  // The thread, not one that helps, is held up when a test waits for this.
  absl::Notification at_second_;
  absl::Notification go_on_;
};

TEST_F(BackgroundPopulateTest, EachWaitsForItsOwnPart) {
  BackgroundPopulate populate(Populate());
  populate.Start(absl::MakeSpan(memory_));
  at_second_.WaitForNotification();
  EXPECT_TRUE(populate.Await(0, Never).ok());
  EXPECT_TRUE(populate.Await(kSlice, Never).ok());
  EXPECT_TRUE(populate.Has(kSlice));
  EXPECT_FALSE(populate.Has(kSlice + 1)) << "the second slice is held up";
  // A wait that lasts asks now and then whether it is interrupted.
  const auto lets_it_go_on = [this] {
    go_on_.Notify();
    return false;
  };
  EXPECT_TRUE(populate.Await(kSlice + 1, lets_it_go_on).ok());
  EXPECT_TRUE(populate.Has(2 * kSlice));
}

TEST_F(BackgroundPopulateTest, AFailureConcernsThePartThatLacksPages) {
  go_on_.Notify();
  BackgroundPopulate populate(Populate());
  populate.Start(absl::MakeSpan(memory_));
  EXPECT_TRUE(populate.Await(2 * kSlice, Never).ok());
  const absl::Status status = populate.Await(3 * kSlice, Never);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("none left"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("of 12582912 bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("free memory"));
  EXPECT_EQ(populate.Await(3 * kSlice, Never), status) << "and again";
  EXPECT_TRUE(populate.Await(2 * kSlice, Never).ok());
}

TEST_F(BackgroundPopulateTest, AWaitMayBeInterrupted) {
  BackgroundPopulate populate(Populate());
  populate.Start(absl::MakeSpan(memory_));
  at_second_.WaitForNotification();
  const absl::Status status = populate.Await(2 * kSlice, [] { return true; });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  go_on_.Notify();
}

// The thread is held up in the second slice, and the first is done; who waits
// does what is left.
TEST(BackgroundPopulateHelpTest, WhoWaitsHelps) {
  std::vector<std::byte> memory(4 * kSlice);
  absl::Notification at_second;
  absl::Notification helped;
  const std::thread::id waiting = std::this_thread::get_id();
  std::atomic<int> by_waiting = 0;
  BackgroundPopulate populate([&](std::byte* data, uint64_t) {
    if (std::this_thread::get_id() == waiting) {
      if (++by_waiting == 2) helped.Notify();
    } else if (data == memory.data() + kSlice) {
      at_second.Notify();
      helped.WaitForNotification();
    }
    return absl::OkStatus();
  });
  populate.Start(absl::MakeSpan(memory));
  at_second.WaitForNotification();
  EXPECT_TRUE(populate.Await(memory.size(), Never).ok());
  EXPECT_EQ(by_waiting, 2);
}

}  // namespace
}  // namespace optstate::client
