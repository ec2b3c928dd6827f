#include "server/session/job_opener.h"

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The rooms of an engine that opens a job.
class OpenedRooms : public UpperRooms {
 public:
  explicit OpenedRooms(Job::Options options)
      : UpperRooms(std::move(options)),
        opener_({.job = &job_,
                 .ranks = &ranks_,
                 .durability = &durability_,
                 .gradients = &gradients_,
                 .recovery = &recovery_,
                 .applier = &applier_,
                 .registrar = &registrar_}) {
    keeper_.Keep(0, 70, 0, -1);
  }
  absl::Status Adopt() {
    JobCall lock(&job_.lock);
    return opener_.Adopt();
  }
  void WriteMaster(uint32_t parameter, float value) {
    EXPECT_TRUE(job_.Elements()
                    .Write({v1::STATE_ARRAY_MASTER, parameter, 0, 1},
                           reinterpret_cast<const std::byte*>(&value))
                    .ok());
  }
  float Parameter(uint32_t parameter) {
    return *reinterpret_cast<const float*>(
        job_.store->parameter_area().data() +
        job_.layout().parameter_offset_bytes(parameter));
  }

  JobOpener opener_;
};

// Opens a job several times, each time with the files that the engine before
// has left.
class JobOpenerTest : public ::testing::Test, protected RoomGround {
 protected:
  absl::Status Open() {
    rooms_.reset();
    Job::Options options = JobOptions();
    if (has_disk_) options.config.mutable_nvme()->add_directories(disk());
    rooms_.emplace(std::move(options));
    return rooms_->Adopt();
  }
  // Makes a job that is READY and whose parameter 1 is 5.
  void Make(const RegisterSpec& spec = TwoRankSpec()) {
    ASSERT_TRUE(Open().ok());
    ASSERT_TRUE(rooms_->Register(spec).ok());
    rooms_->MakeReady();
    rooms_->WriteMaster(1, 5);
  }
  // Makes a job whose steps are durable, and its present state too.
  void MakeDurable() {
    has_disk_ = true;
    std::filesystem::create_directory(disk());
    RegisterSpec spec = TwoRankSpec();
    spec.storage.set_durability(v1::DURABILITY_KIND_STEP);
    ASSERT_NO_FATAL_FAILURE(Make(spec));
    JobCall lock(&job().lock);
    ASSERT_TRUE(rooms_->durability_.MakeDurableIfDue(/*is_load=*/true).ok());
  }
  void LosePower() {
    rooms_.reset();
    std::filesystem::remove_all(directory_ + "/state");
  }
  JobContext& job() { return rooms_->job_; }
  std::string disk() const { return directory_ + "/disk"; }
  std::string restoring() const { return directory_ + "/restoring"; }

  std::optional<OpenedRooms> rooms_;
  bool has_disk_ = false;
};

TEST_F(JobOpenerTest, ADirectoryWithoutAJobIsEmpty) {
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(job().phase(), v1::JOB_PHASE_EMPTY);
  EXPECT_THAT(rooms_->keeper_.kept(), IsEmpty());
}

TEST_F(JobOpenerTest, AdoptsTheFiles) {
  ASSERT_NO_FATAL_FAILURE(Make());
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(job().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(rooms_->Parameter(1), 5);
  EXPECT_EQ(rooms_->ranks_.size(), 2u);
  EXPECT_FALSE(rooms_->ranks_.had_session());
}

TEST_F(JobOpenerTest, LossesAreForgottenWhenNobodyReturns) {
  ASSERT_NO_FATAL_FAILURE(Make());
  job().rank_mark(0).lost_at_step = 1;
  job().rank_mark(1).attached = 1;
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(rooms_->ranks_.had_session());
  EXPECT_EQ(job().rank_mark(0).lost_at_step, 1u);
  job().rank_mark(1).attached = 0;
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(job().rank_mark(0).lost_at_step, 0u);
}

TEST_F(JobOpenerTest, ADamagedDescriptionIsNoJob) {
  ASSERT_NO_FATAL_FAILURE(Make());
  rooms_.reset();
  std::ofstream(directory_ + "/state/job.binpb", std::ios::trunc) << "x";
  EXPECT_EQ(Open().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(job().shape, nullptr);
}

TEST_F(JobOpenerTest, AJobThatHasFailedIsAdopted) {
  ASSERT_NO_FATAL_FAILURE(Make());
  job().tier->control()->step_in_progress = 1;  // without an intent
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(job().phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(job().failure.message(), HasSubstr("died inside step 1"));
}

TEST_F(JobOpenerTest, StepFilesThatWereCutAreNoticed) {
  ASSERT_NO_FATAL_FAILURE(Make());
  job().tier->control()->step_in_progress = 1;
  rooms_.reset();
  std::filesystem::resize_file(directory_ + "/state/undo", 0);
  const absl::Status cut = Open();
  EXPECT_EQ(cut.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(cut.message(), HasSubstr("/undo is missing or empty"));
}

// An engine that dies between the files of a job, or of its new shape, and the
// record of the scale leaves a scale of 0: all gradients would be 0.
TEST_F(JobOpenerTest, AScalerHasAScale) {
  RegisterSpec spec = TwoRankSpec();
  spec.loss_scaler.emplace().set_init_scale(64);
  ASSERT_NO_FATAL_FAILURE(Make(spec));
  storage::StepRecord record = job().record();
  record.loss_scale = 0;
  storage::PublishRecord(record, job().tier->control());
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(job().record().loss_scale, 64);
}

TEST_F(JobOpenerTest, ADurableJobSurvivesALossOfPower) {
  ASSERT_NO_FATAL_FAILURE(MakeDurable());
  LosePower();
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(job().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(rooms_->Parameter(1), 5);
  EXPECT_FALSE(std::filesystem::exists(restoring()));
}

TEST_F(JobOpenerTest, AFolderThatWasNotRestoredToItsEndIsMadeAnew) {
  ASSERT_NO_FATAL_FAILURE(MakeDurable());
  rooms_->WriteMaster(1, 9);  // durable is 5
  rooms_.reset();
  std::ofstream(restoring()) << "";
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(rooms_->Parameter(1), 5);
  EXPECT_FALSE(std::filesystem::exists(restoring()));
}

// The next engine must find neither half a folder nor none.
TEST_F(JobOpenerTest, ARestoreThatFailsIsRepeated) {
  ASSERT_NO_FATAL_FAILURE(MakeDurable());
  LosePower();
  const std::string records = disk() + "/jobs/test/records";
  std::filesystem::rename(records, records + ".away");
  EXPECT_FALSE(Open().ok());
  rooms_.reset();
  std::filesystem::remove(records);
  std::filesystem::rename(records + ".away", records);
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(rooms_->Parameter(1), 5);
}

TEST_F(JobOpenerTest, CommitsThatAreMissingAreNoNewJob) {
  ASSERT_NO_FATAL_FAILURE(MakeDurable());
  LosePower();
  std::filesystem::remove(disk() + "/jobs/test/commits");
  const absl::Status missing = Open();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition) << missing;
  EXPECT_THAT(missing.message(), HasSubstr("is its disk mounted?"));
}

}  // namespace
}  // namespace optstate::session
