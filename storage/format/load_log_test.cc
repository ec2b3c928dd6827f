#include "storage/format/load_log.h"

#include <cstring>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

using ::testing::HasSubstr;

class LoadLogTest : public ::testing::Test {
 protected:
  LoadLogTest() {
    log_.Begin(header_, absl::MakeSpan(file_));
    Put(log_.Append(
            {.array = 1, .parameter = 3, .numel = 5, .payload_bytes = 5}),
        "fives");
    const uint64_t second =
        log_.Append({.array = 2, .begin = 7, .numel = 2, .payload_bytes = 2});
    Put(second, "ab");
    log_.Extend(3, 3);
    Put(second, "abcde");
    seal_ = log_.Seal();
  }

  void Put(uint64_t entry, const std::string& payload) {
    std::memcpy(log_.payload(entry), payload.data(), payload.size());
    log_.SetChecksum(entry);
  }
  absl::StatusOr<std::vector<LoadLogRecord>> Read() const {
    return ReadLoadLog(file_, header_, seal_);
  }
  void ExpectDataLoss(const std::string& text) const {
    const absl::Status status = Read().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(status.message(), HasSubstr(text));
  }

  const LoadLogHeader header_ = {
      .loads_finished = 4, .incarnation = 77, .committed_step = 9};
  std::vector<std::byte> file_ = std::vector<std::byte>(256);
  LoadLogWriter log_;
  LoadLogSeal seal_;
};

TEST_F(LoadLogTest, WhatWasSealedComesBack) {
  const auto records = Read();
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 2u);
  const auto payload_of = [&](size_t i) {
    return std::string(reinterpret_cast<const char*>((*records)[i].payload),
                       (*records)[i].entry.payload_bytes);
  };
  EXPECT_EQ((*records)[0].entry.parameter, 3u);
  EXPECT_EQ(payload_of(0), "fives");
  EXPECT_EQ((*records)[1].entry.begin, 7u);
  EXPECT_EQ((*records)[1].entry.numel, 5u);
  EXPECT_EQ(payload_of(1), "abcde");
}

// The padding between entries is not checked, for it means nothing.
TEST_F(LoadLogTest, EveryBitThatIsFlippedIsSeen) {
  const uint64_t padding = 32 + 40 + 5;
  for (uint64_t bit = 0; bit < seal_.bytes * 8; ++bit) {
    if (bit / 8 >= padding && bit / 8 < padding + 3) continue;
    file_[bit / 8] ^= std::byte(1 << bit % 8);
    EXPECT_EQ(Read().status().code(), absl::StatusCode::kDataLoss) << bit;
    file_[bit / 8] ^= std::byte(1 << bit % 8);
  }
  EXPECT_TRUE(Read().ok());
}

TEST_F(LoadLogTest, AShorterFile) {
  for (uint64_t bytes = 0; bytes < seal_.bytes; ++bytes) {
    std::vector<std::byte> cut(file_.begin(), file_.begin() + bytes);
    EXPECT_EQ(ReadLoadLog(cut, header_, seal_).status().code(),
              absl::StatusCode::kDataLoss);
  }
}

TEST_F(LoadLogTest, TheLogOfAnotherLoad) {
  LoadLogHeader other = header_;
  ++other.loads_finished;
  log_.Begin(other, absl::MakeSpan(file_));
  ExpectDataLoss("step 9, after 5 loads; expected");
  other = header_;
  ++other.incarnation;
  log_.Begin(other, absl::MakeSpan(file_));
  ExpectDataLoss("incarnation");
}

}  // namespace
}  // namespace optstate::storage
