#include "server/admin/http2_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace optstate::admin {
namespace {

using ::testing::HasSubstr;

constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr int kHeaders = 1;
constexpr int kPing = 6;
constexpr int kContinuation = 9;
constexpr int kEndHeaders = 4;

std::string Frame(int type, int flags, uint32_t stream, size_t payload) {
  std::string frame;
  for (int shift = 16; shift >= 0; shift -= 8) {
    frame += static_cast<char>(payload >> shift);
  }
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (int shift = 24; shift >= 0; shift -= 8) {
    frame += static_cast<char>(stream >> shift);
  }
  return frame + std::string(payload, 'x');
}

TEST(Http2FramesTest, CountsFramesHoweverTheBytesAreCut) {
  const std::string bytes =
      absl::StrCat(kPreface, Frame(4, 0, 0, 0), Frame(kHeaders, 0, 5, 100),
                   Frame(kContinuation, kEndHeaders, 5, 30),
                   Frame(0, 1, 5, 70000), Frame(kPing, 0, 0, 8));
  for (const size_t piece : {1, 2, 9, 31, 1000, 1 << 20}) {
    Http2Frames frames(Http2Frames::Sender::kClient);
    for (size_t at = 0; at < bytes.size(); at += piece) {
      ASSERT_TRUE(frames.Take(absl::string_view(bytes).substr(at, piece)).ok());
    }
    EXPECT_EQ(frames.frame_count(), 5u);
    EXPECT_EQ(frames.opened_stream(), 5u);
    EXPECT_TRUE(frames.at_boundary());
    ASSERT_TRUE(frames.Take("x").ok());
    EXPECT_FALSE(frames.at_boundary());
  }
}

TEST(Http2FramesTest, AServersDirectionHasNoPreface) {
  Http2Frames frames(Http2Frames::Sender::kServer);
  EXPECT_TRUE(frames.Take(Frame(kHeaders, kEndHeaders, 7, 10)).ok());
  EXPECT_EQ(frames.opened_stream(), 7u);
}

TEST(Http2FramesTest, AnotherProtocolIsRefused) {
  Http2Frames frames(Http2Frames::Sender::kClient);
  EXPECT_TRUE(frames.Take("PRI * HTTP").ok());
  EXPECT_TRUE(absl::IsInvalidArgument(frames.Take("/1.1\r\n")));
}

// A header block that is too large is detected by its frame's header, before
// its bytes.
TEST(Http2FramesTest, HeaderBlocksAreBounded) {
  constexpr size_t kMax = Http2Frames::kHeaderBlockBytesMax;
  Http2Frames one(Http2Frames::Sender::kClient);
  ASSERT_TRUE(one.Take(kPreface).ok());
  EXPECT_TRUE(one.Take(Frame(kHeaders, kEndHeaders, 1, kMax)).ok());
  EXPECT_TRUE(one.Take(Frame(kHeaders, kEndHeaders, 3, kMax)).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(
      one.Take(Frame(kHeaders, kEndHeaders, 5, kMax + 1).substr(0, 9))));

  Http2Frames many(Http2Frames::Sender::kClient);
  ASSERT_TRUE(many.Take(kPreface).ok());
  ASSERT_TRUE(many.Take(Frame(kHeaders, 0, 1, kMax / 2)).ok());
  ASSERT_TRUE(many.Take(Frame(kContinuation, 0, 1, kMax / 2)).ok());
  EXPECT_TRUE(
      absl::IsResourceExhausted(many.Take(Frame(kContinuation, 0, 1, 1))));
}

TEST(Http2FramesTest, WhatIsSaidIsWellFormed) {
  const std::string said = absl::StrCat(
      SettingsFrame(), SettingsAckFrame(),
      TrailersOnlyFrame(1, absl::ResourceExhaustedError("100% \n full")),
      GoAwayFrame(1, "why"));
  Http2Frames frames(Http2Frames::Sender::kServer);
  EXPECT_TRUE(frames.Take(said).ok());
  EXPECT_EQ(frames.frame_count(), 4u);
  EXPECT_EQ(frames.opened_stream(), 1u);
  EXPECT_TRUE(frames.at_boundary());
  EXPECT_THAT(said, HasSubstr("100%25 %0A full"));
  // The length takes more than the prefix.
  EXPECT_THAT(TrailersOnlyFrame(1, absl::InternalError(std::string(300, 'y'))),
              HasSubstr(absl::StrCat("\x0cgrpc-message\x7f\xad\x01",
                                     std::string(300, 'y'))));
}

}  // namespace
}  // namespace optstate::admin
