#include "storage/format/control_file.h"

#include <atomic>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

class ControlFileTest : public ::testing::Test {
 protected:
  ControlFileTest() {
    std::memset(static_cast<void*>(&control_), 0, sizeof(control_));
    StepRecord record = {};
    record.committed_step = 7;
    InitControlFile(42, 1000, record, &control_);
  }
  absl::StatusCode Check(uint64_t incarnation = 42) const {
    return CheckControlFile(control_, incarnation, kParameters).code();
  }

  void ExpectAtMost(std::atomic<uint64_t>* field, const char* name,
                    uint64_t most) {
    *field = most;
    EXPECT_EQ(Check(), absl::StatusCode::kOk);
    *field = most + 1;
    const absl::Status status = CheckControlFile(control_, 42, kParameters);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(status.message(), absl::StrCat(name, " is ", most + 1,
                                             ", it can be ", most, " at most"));
    *field = 0;
  }

  static constexpr uint64_t kParameters = 3;
  alignas(64) ControlFile control_;
};

TEST_F(ControlFileTest, RecordsReplaceEachOther) {
  EXPECT_EQ(Check(), absl::StatusCode::kOk);
  EXPECT_EQ(CurrentRecord(control_).committed_step, 7);
  for (uint64_t step = 8; step < 12; ++step) {
    StepRecord record = CurrentRecord(control_);
    record.committed_step = step;
    PublishRecord(record, &control_);
    EXPECT_EQ(CurrentRecord(control_).committed_step, step);
    EXPECT_EQ(Check(), absl::StatusCode::kOk);
  }
}

// A process that dies while it writes the next record leaves the current one.
TEST_F(ControlFileTest, AHalfWrittenRecordDoesNotCount) {
  StepRecord* next = &control_.records[(control_.sequence + 1) % 2];
  std::memset(static_cast<void*>(next), 0x55, sizeof(*next));
  EXPECT_EQ(Check(), absl::StatusCode::kOk);
  EXPECT_EQ(CurrentRecord(control_).committed_step, 7);
}

TEST_F(ControlFileTest, MarksNextToTheCommittedStepAreValid) {
  for (const uint64_t mark : {0, 7, 8}) {
    control_.step_in_progress = mark;
    EXPECT_EQ(Check(), absl::StatusCode::kOk);
  }
  for (const uint64_t mark : {1, 6, 9}) {
    control_.step_in_progress = mark;
    EXPECT_EQ(Check(), absl::StatusCode::kDataLoss);
  }
}

TEST_F(ControlFileTest, WhatIsUsedAsAnIndexHasABound) {
  ExpectAtMost(&control_.counts_begun, "counts_begun", kParameters);
  ExpectAtMost(&control_.parameter_loading, "parameter_loading", kParameters);
  ExpectAtMost(&control_.step_speculated, "step_speculated", 8);
  ExpectAtMost(&control_.step_given_up, "step_given_up", 8);
  StepRecord record = CurrentRecord(control_);
  record.load_required_from = kParameters;
  record.load_touched_from = kNoParameter;
  PublishRecord(record, &control_);
  EXPECT_EQ(Check(), absl::StatusCode::kOk);
  record.load_required_from = kParameters + 1;
  PublishRecord(record, &control_);
  EXPECT_EQ(Check(), absl::StatusCode::kDataLoss);
  record.load_required_from = 0;
  record.load_touched_from = kParameters + 1;
  PublishRecord(record, &control_);
  EXPECT_EQ(Check(), absl::StatusCode::kDataLoss);
}

TEST_F(ControlFileTest, EveryFlippedBitThatCountsIsNoticed) {
  auto* bytes = reinterpret_cast<unsigned char*>(&control_);
  const size_t current = offsetof(ControlFile, records) +
                         sizeof(StepRecord) * (control_.sequence % 2);
  const auto expect_noticed = [&](size_t begin, size_t end) {
    for (size_t bit = begin * 8; bit < end * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<unsigned char>(1 << (bit % 8));
      EXPECT_EQ(Check(), absl::StatusCode::kDataLoss) << "bit " << bit;
      bytes[bit / 8] ^= static_cast<unsigned char>(1 << (bit % 8));
    }
  };
  expect_noticed(0, 32);
  expect_noticed(current, current + sizeof(StepRecord));
  EXPECT_EQ(Check(43), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Check(), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace optstate::storage
