#include "client/views/gradient_views.h"

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/sealed_segment.h"

namespace optstate::client {
namespace {

using ::testing::Each;

constexpr uint64_t kBytes = 64 << 10;
constexpr uint64_t kLead = 4096 + 192;  // the area begins within a page

class GradientViewsTest : public ::testing::Test {
 protected:
  GradientViewsTest()
      : segment_(*shm::SealedSegment::Create(
            "gradients", kBytes, shm::SealedSegment::Pages::kReserved)),
        area_(segment_.data() + kLead, kBytes - kLead - 100) {
    auto views = GradientViews::Map(area_);
    EXPECT_TRUE(views.ok()) << views.status();
    views_ = *std::move(views);
  }

  shm::SealedSegment segment_;
  absl::Span<std::byte> area_;
  std::unique_ptr<GradientViews> views_;
};

TEST_F(GradientViewsTest, ShowTheAreaAndWriteIt) {
  ASSERT_EQ(views_->area().size(), area_.size());
  EXPECT_NE(views_->area().data(), area_.data());
  EXPECT_EQ(reinterpret_cast<intptr_t>(area_.data()) + views_->distance(),
            reinterpret_cast<intptr_t>(views_->area().data()));
  area_.front() = std::byte{1};
  views_->area().back() = std::byte{2};
  EXPECT_EQ(views_->area().front(), std::byte{1});
  EXPECT_EQ(area_.back(), std::byte{2});
}

TEST_F(GradientViewsTest, TakeGradients) {
  const std::vector<std::byte> gradient(5000, std::byte{7});
  ASSERT_TRUE(views_->Put(views_->area().data() + 3, gradient).ok());
  EXPECT_EQ(area_[2], std::byte{0});
  EXPECT_THAT(area_.subspan(3, 5000), Each(std::byte{7}));
  EXPECT_EQ(area_[5003], std::byte{0});
  EXPECT_EQ(views_->Put(&views_->area()[views_->area().size() - 4999], gradient)
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(area_.back(), std::byte{0});
}

TEST_F(GradientViewsTest, OutliveTheSegment) {
  std::memset(area_.data(), 3, area_.size());
  { const shm::SealedSegment ended = std::move(segment_); }
  EXPECT_THAT(views_->area(), Each(std::byte{3}));
  std::memset(views_->area().data(), 4, views_->area().size());
  EXPECT_THAT(views_->area(), Each(std::byte{4}));
}

TEST_F(GradientViewsTest, KeepPartsAtTheirAddress) {
  std::memset(area_.data(), 3, area_.size());
  const std::array<absl::Span<const std::byte>, 2> parts = {
      views_->area().subspan(10, 9000), views_->area().last(7)};
  ASSERT_TRUE(views_->Keep(parts).ok());
  std::memset(area_.data(), 4, area_.size());
  for (const absl::Span<const std::byte> part : parts) {
    EXPECT_THAT(part, Each(std::byte{3}));
  }
  EXPECT_EQ(views_->area()[9], std::byte{0});
  std::memset(views_->area().data(), 5, views_->area().size());
  EXPECT_THAT(area_, Each(std::byte{4}));
  // A second call must not take the area's values.
  ASSERT_TRUE(views_->Keep(parts).ok());
  EXPECT_THAT(views_->area(), Each(std::byte{5}));
  // The area can be mapped anew.
  const auto next = GradientViews::Map(area_);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_THAT((*next)->area(), Each(std::byte{4}));
}

TEST_F(GradientViewsTest, RefusePartsOutside) {
  std::memset(area_.data(), 3, area_.size());
  for (const absl::Span<const std::byte> part :
       {absl::Span<const std::byte>(area_),
        absl::MakeConstSpan(views_->area().data() + 1, area_.size()),
        absl::MakeConstSpan(views_->area().data() - 1, 1)}) {
    EXPECT_EQ(views_->Keep({&part, 1}).code(),
              absl::StatusCode::kInvalidArgument);
  }
  area_.front() = std::byte{4};
  EXPECT_EQ(views_->area().front(), std::byte{4});
}

TEST(GradientViewsOfOtherMemory, AreRefused) {
  std::array<std::byte, 100> memory = {};
  EXPECT_EQ(GradientViews::Map(absl::MakeSpan(memory)).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(GradientViews::Map({}).status().code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace optstate::client
