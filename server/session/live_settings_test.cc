#include "server/session/live_settings.h"

#include <filesystem>
#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/room_fixture.h"
#include "storage/host_tier.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

class LiveSettingsTest : public RoomTest<LowerRooms> {
 protected:
  LiveSettingsTest() : RoomTest(std::nullopt) {
    std::filesystem::create_directory(directory_ + "/disk");
    job_.options.config.mutable_nvme()->add_directories(directory_ + "/disk");
    job_.options.config.mutable_nvme()->set_io_engine(
        v1::IO_ENGINE_KIND_BLOCKING);
  }

  void Make(v1::Placement placement, v1::DurabilityKind durability) {
    RegisterSpec spec = TwoRanks();
    spec.storage.set_placement(placement);
    spec.storage.set_durability(durability);
    const absl::Status made = Register(spec).status();
    ASSERT_TRUE(made.ok()) << made;
    MakeReady();
    scheduler_was_ = job_.scheduler.get();
  }
  absl::StatusOr<v1::SetJobReply> Set(const v1::SetJobRequest& request) {
    JobCall lock(&job_.lock);
    return settings_.Set(request);
  }
  absl::StatusOr<v1::SetJobReply> SetEvery(uint64_t steps) {
    v1::SetJobRequest request;
    request.set_durability(v1::DURABILITY_KIND_EVERY);
    request.set_every_steps(steps);
    return Set(request);
  }
  // Returns the description in the job's files, which the next engine reads.
  std::string Published() const {
    const auto description = storage::HostTier::ReadDescription(directory_);
    EXPECT_TRUE(description.ok()) << description.status();
    return description.ok() ? description->payload : "";
  }

  LiveSettings settings_{{.job = &job_,
                          .durability = &durability_,
                          .registrar = &registrar_,
                          .state_lock = &state_lock_}};
  const scheduler::StepScheduler* scheduler_was_ = nullptr;
};

TEST_F(LiveSettingsTest, WhatIsInForceIsPublished) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP));
  const std::string before = Published();
  const auto reply = SetEvery(7);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->storage().every_steps(), 7u);
  EXPECT_EQ(reply->storage().made_with().durability(), v1::DURABILITY_KIND_STEP)
      << "sessions that were made with that are still the job's";
  EXPECT_EQ(reply->records(), 2u);
  EXPECT_EQ(job_.shape->description.storage.every_steps(), 7u);
  EXPECT_NE(Published(), before);
  EXPECT_EQ(Published(), job_.shape->text);
  EXPECT_EQ(job_.scheduler.get(), scheduler_was_) << "training goes on";
}

TEST_F(LiveSettingsTest, ADurabilityHoldsFromThePresentStepOn) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP));
  storage::StepRecord record = job_.record();
  record.committed_step = 4;
  storage::PublishRecord(record, job_.tier->control());
  ASSERT_TRUE(SetEvery(7).ok());
  EXPECT_EQ(job_.store->durable_step(), 4u) << "7 is the next one";
}

TEST_F(LiveSettingsTest, ARefusalChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP));
  const std::string before = Published();
  EXPECT_TRUE(absl::IsInvalidArgument(Set({}).status()));
  v1::SetJobRequest request;
  request.set_host_budget_bytes(1);
  const absl::Status little = Set(request).status();
  EXPECT_TRUE(absl::IsInvalidArgument(little)) << little;
  EXPECT_THAT(little.message(), HasSubstr("least"));
  request.Clear();
  request.set_durability(v1::DURABILITY_KIND_NONE);
  const absl::Status undone = Set(request).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(undone)) << undone;
  EXPECT_EQ(Published(), before);
  EXPECT_EQ(job_.shape->description.storage.durability(),
            v1::DURABILITY_KIND_STEP);
}

TEST_F(LiveSettingsTest, AJobInMemoryHasNoBudget) {
  ASSERT_NO_FATAL_FAILURE(
      Make(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED));
  v1::SetJobRequest request;
  request.set_host_budget_bytes(1 << 20);
  EXPECT_TRUE(absl::IsFailedPrecondition(Set(request).status()))
      << Set(request).status();
}

TEST_F(LiveSettingsTest, ADeviceBudgetIsForRecordsOnDiskToo) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP));
  v1::SetJobRequest request;
  request.set_device_budget_bytes(1 << 20);
  request.set_offload_fraction(0.5);
  const auto reply = Set(request);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->storage().device_budget_bytes(), 1u << 20);
  EXPECT_FALSE(job_.tier->gradient_log().empty());
}

TEST_F(LiveSettingsTest, ADeviceBudgetIsForWhatDevicesUpdate) {
  ASSERT_NO_FATAL_FAILURE(
      Make(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED));
  v1::SetJobRequest request;
  request.set_device_budget_bytes(1 << 20);
  EXPECT_TRUE(absl::IsInvalidArgument(Set(request).status()))
      << "the CPU updates all";
  request.set_device_budget_bytes(0);
  const auto reply = Set(request);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->storage().device_budget_bytes(), 0u);
}

TEST_F(LiveSettingsTest, OnlyAJobThatTrainsIsSet) {
  EXPECT_TRUE(absl::IsFailedPrecondition(SetEvery(7).status()))
      << "it has no layout";
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP));
  job_.recovery.emplace();
  EXPECT_TRUE(absl::IsUnavailable(SetEvery(7).status()));
  job_.failure = absl::DataLossError("why");
  EXPECT_EQ(SetEvery(7).status(), job_.failure);
}

}  // namespace
}  // namespace optstate::session
