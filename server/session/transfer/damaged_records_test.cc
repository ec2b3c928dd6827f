#include "server/session/transfer/damaged_records.h"

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/damageable_store.h"
#include "server/session/transfer/element_access.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kMaster = v1::STATE_ARRAY_MASTER;
constexpr auto kState0 = v1::STATE_ARRAY_STATE_0;
constexpr auto kState1 = v1::STATE_ARRAY_STATE_1;

ParameterSpec Parameter(const char* name, int64_t numel, uint32_t group,
                        DType dtype) {
  ParameterSpec parameter;
  parameter.name = name;
  parameter.shape = {numel};
  parameter.numel = numel;
  parameter.group = group;
  parameter.dtype = dtype;
  return parameter;
}

// Four records of AdamW: 0 and 1 have the two tiles of "a" and "b", record 2
// has "c" with amsgrad, and record 3 "d", which is its own master.
Layout FourRecords() {
  LayoutSpec spec;
  spec.groups = {{}, {adam::kAmsgrad}, {}};
  spec.parameters = {Parameter("a", 4000, 0, DType::kBFloat16),
                     Parameter("b", 1000, 0, DType::kBFloat16),
                     Parameter("c", 50, 1, DType::kBFloat16),
                     Parameter("d", 60, 2, DType::kFloat32)};
  return *Layout::Make(std::move(spec));
}

class DamagedRecordsTest : public ::testing::Test {
 protected:
  void Load(v1::StateArray array, uint32_t parameter, uint64_t begin,
            uint64_t numel) {
    storage::LoadLogRecord record;
    record.entry.array = array;
    record.entry.parameter = parameter;
    record.entry.begin = begin;
    record.entry.numel = numel;
    load_.push_back(record);
  }
  // Loads all arrays of "a" and "b", but for a range of "b".
  void LoadAllBut(uint64_t begin, uint64_t numel) {
    for (const auto array : {kMaster, kState0, kState1}) {
      Load(array, 0, 0, 4000);
      Load(array, 1, 0, begin);
      Load(array, 1, begin + numel, 1000 - begin - numel);
    }
  }
  absl::Status CheckReplaces(const std::set<size_t>& damaged) {
    return CheckReplaced(damaged, store_, load_);
  }
  absl::Status Replace() {
    replaced_.clear();
    return ReplaceDamaged(&store_, load_, &replaced_);
  }

  const Layout layout_ = FourRecords();
  DamageableStore store_{&layout_};
  std::vector<storage::LoadLogRecord> load_;
  std::set<size_t> replaced_;
};

TEST_F(DamagedRecordsTest, WithoutDamageALoadMayHaveAnything) {
  EXPECT_TRUE(CheckReplaces({}).ok());
  Load(kMaster, 0, 7, 1);
  EXPECT_TRUE(CheckReplaces({}).ok());
  EXPECT_TRUE(Replace().ok());
  EXPECT_THAT(replaced_, IsEmpty());
}

// "b" begins at 4,000 and is cut at 4,096.
TEST_F(DamagedRecordsTest, AllElementsOfTheRecordAreNeeded) {
  LoadAllBut(96, 0);
  EXPECT_TRUE(CheckReplaces({0, 1}).ok());
  load_.clear();
  LoadAllBut(95, 1);
  EXPECT_TRUE(CheckReplaces({1}).ok());
  const absl::Status lacks = CheckReplaces({0, 1});
  EXPECT_TRUE(absl::IsDataLoss(lacks)) << lacks;
  EXPECT_EQ(lacks.message(),
            "the record of parameters \"a\" to \"b\" is damaged, and the load "
            "has 12285 of its 12288 elements: masters and all state arrays of "
            "all these parameters are needed to replace it");
  load_.clear();
  LoadAllBut(999, 1);
  EXPECT_TRUE(CheckReplaces({0}).ok());
  EXPECT_THAT(CheckReplaces({0, 1}).message(),
              HasSubstr("the record of parameters \"b\" to \"b\""));
}

TEST_F(DamagedRecordsTest, AllArraysOfTheGroupAreNeeded) {
  for (const auto array : {kMaster, kState0, kState1}) Load(array, 2, 0, 50);
  EXPECT_THAT(CheckReplaces({2}).message(),
              HasSubstr("the load has 150 of its 200 elements"));
  Load(v1::STATE_ARRAY_STATE_2, 2, 0, 50);
  EXPECT_TRUE(CheckReplaces({2}).ok());
}

// Numbers by parameter are not in records.
TEST_F(DamagedRecordsTest, StepCountsReplaceNothing) {
  for (const auto array : {kMaster, kState0}) Load(array, 2, 0, 50);
  Load(v1::STATE_ARRAY_STEP_COUNT, 0, 0, 4);
  Load(v1::STATE_ARRAY_SCALAR, 0, 0, 4);
  EXPECT_THAT(CheckReplaces({2}).message(), HasSubstr("has 100 of its 200"));
  store_.Damage(0);
  EXPECT_TRUE(Replace().ok()) << "nothing of it is loaded";
}

TEST_F(DamagedRecordsTest, AParameterThatRanksMapIsNotInItsRecord) {
  for (const auto array : {kState0, kState1}) Load(array, 3, 0, 60);
  EXPECT_TRUE(CheckReplaces({3}).ok());
  Load(kMaster, 3, 0, 60);
  EXPECT_TRUE(CheckReplaces({3}).ok());
  const DamageableStore holds_parameters(&layout_, kTileElements,
                                         /*has_parameter_area=*/false);
  EXPECT_TRUE(CheckReplaced({3}, holds_parameters, load_).ok());
  load_.pop_back();
  EXPECT_THAT(CheckReplaced({3}, holds_parameters, load_).message(),
              HasSubstr("has 120 of its 180"));
}

// Records of whole matrices, whose arrays are prefixes of them.
TEST_F(DamagedRecordsTest, ArraysHaveTheElementsOfTheirExtent) {
  LayoutSpec spec;
  spec.optimizer = OptimizerKind::kAdafactor;
  spec.groups.resize(1);
  spec.parameters = {Parameter("matrix", 600, 0, DType::kBFloat16)};
  spec.parameters[0].shape = {30, 20};
  const Layout layout = *Layout::Make(std::move(spec));
  const DamageableStore store(&layout);
  Load(kMaster, 0, 0, 600);
  Load(kState0, 0, 0, 30);
  EXPECT_THAT(CheckReplaced({0}, store, load_).message(),
              HasSubstr("has 630 of its 650"));
  Load(kState1, 0, 0, 20);
  EXPECT_TRUE(CheckReplaced({0}, store, load_).ok());
}

TEST_F(DamagedRecordsTest, TheAbortSaysWhatToDo) {
  const absl::Status aborted = LeftOutOfDamaged(absl::DataLossError("here"));
  EXPECT_TRUE(absl::IsAborted(aborted)) << aborted;
  EXPECT_THAT(aborted.message(),
              AllOf(HasSubstr("left out as equal"), HasSubstr("load again"),
                    HasSubstr("The damage: here")));
}

TEST_F(DamagedRecordsTest, WhatWasLeftOutIsReadWhereTheLoadChangesIt) {
  Load(kMaster, 0, 0, 10);  // of record 0 alone
  EXPECT_TRUE(CheckLeftOut({}, &store_, load_).ok());
  EXPECT_EQ(store_.pins(), 0u);
  EXPECT_TRUE(CheckLeftOut({0, 1}, &store_, load_).ok());
  EXPECT_EQ(store_.pins(), 1u);
  store_.Damage(1);
  EXPECT_TRUE(CheckLeftOut({0, 1}, &store_, load_).ok()) << "it stays as it is";
  store_.Damage(0);
  EXPECT_TRUE(CheckLeftOut({1}, &store_, load_).ok());
  const absl::Status damaged = CheckLeftOut({0, 1}, &store_, load_);
  EXPECT_TRUE(absl::IsAborted(damaged)) << damaged;
  EXPECT_THAT(damaged.message(), HasSubstr("a bit is wrong"));
  store_.Fail(0, absl::UnavailableError("no disk"));
  EXPECT_EQ(CheckLeftOut({0}, &store_, load_),
            absl::UnavailableError("no disk"));
}

TEST_F(DamagedRecordsTest, ADamagedRecordIsZerosUntilItIsLoaded) {
  LoadAllBut(96, 0);
  for (size_t i = 0; i < 2; ++i) {
    store_.record(i).part(storage::kStatePart0)[0] = std::byte{9};
  }
  store_.Damage(0);
  ASSERT_TRUE(Replace().ok());
  EXPECT_THAT(replaced_, ElementsAre(0));
  EXPECT_TRUE(store_.PinSubGroup(0, storage::StateStore::Access::kRead).ok());
  EXPECT_THAT(store_.record(0).part(storage::kStatePart0), Each(std::byte{0}));
  EXPECT_EQ(store_.record(1).part(storage::kStatePart0)[0], std::byte{9})
      << "whole records stay";
}

TEST_F(DamagedRecordsTest, RecordsBesideTheLoadAreLeftAlone) {
  Load(kMaster, 0, 0, 10);
  store_.Damage(2);
  EXPECT_TRUE(Replace().ok());
  EXPECT_THAT(replaced_, IsEmpty());
  EXPECT_EQ(store_.pins(), 1u);
}

TEST_F(DamagedRecordsTest, APartOfADamagedRecordIsRefused) {
  LoadAllBut(95, 1);
  store_.Damage(0);
  const absl::Status refused = Replace();
  EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("12285 of its 12288"));
  EXPECT_THAT(replaced_, IsEmpty());
  EXPECT_FALSE(store_.PinSubGroup(0, storage::StateStore::Access::kRead).ok())
      << "it is as it was";
}

TEST_F(DamagedRecordsTest, OtherErrorsAreTheStores) {
  LoadAllBut(96, 0);
  store_.Fail(1, absl::UnavailableError("no disk"));
  EXPECT_EQ(Replace(), absl::UnavailableError("no disk"));
}

}  // namespace
}  // namespace optstate::session
