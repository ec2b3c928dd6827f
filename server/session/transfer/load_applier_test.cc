#include "server/session/transfer/load_applier.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Notes, at each moment of a load, whether it is sealed and how many loads are
// finished.
class Moments final : public scheduler::StepObserver {
 public:
  explicit Moments(const JobContext* job) : job_(*job) {}
  void OnLoadSealed() override { Note("sealed"); }
  void OnLoadApplied() override { Note("applied"); }
  void OnLoadRecorded() override { Note("recorded"); }
  const std::vector<std::string>& seen() const { return seen_; }

 private:
  void Note(const std::string& moment) {
    seen_.push_back(
        moment + " " +
        (storage::LoadIsSealed(*job_.tier->control()) ? "with" : "without") +
        " seal, " + std::to_string(job_.record().loads_finished));
  }

  const JobContext& job_;
  std::vector<std::string> seen_;
};

class LoadApplierTest : public UpperRoomFixture {
 protected:
  LoadApplierTest() {
    job_.options.observer = &moments_;
    log_.DropLog();
  }

  void StageMaster(uint32_t parameter, float value) {
    const std::vector<float> values(3, value);
    const ElementRange range = {v1::STATE_ARRAY_MASTER, parameter, 0, 3};
    std::byte payload[3 * sizeof(float)];
    const auto is_present =
        load_.staged.Compare(job_.Elements(), range, values.data(), payload);
    ASSERT_TRUE(is_present.ok()) << is_present.status();
    ASSERT_TRUE(load_.staged
                    .Stage(job_.Elements(), range, payload, *is_present,
                           [this](uint64_t bytes) { return log_.Grow(bytes); })
                    .ok());
  }
  // Seals what is staged, as an engine does before it writes to the state.
  void Seal() {
    const storage::LoadLogSeal seal = load_.staged.Seal();
    storage::SealLoad(seal.bytes, seal.crc32c, load_.staged.first_parameter(),
                      job_.tier->control());
  }
  // Seals a log with one entry, whose payload is zeros.
  void SealEntry(const storage::LoadLogEntry& entry) {
    const auto file =
        log_.Grow(sizeof(storage::LoadLogHeader) +
                  sizeof(storage::LoadLogEntry) + entry.payload_bytes);
    ASSERT_TRUE(file.ok()) << file.status();
    storage::LoadLogWriter writer;
    writer.Begin(log_.MakeLogHeader(), *file);
    const uint64_t at = writer.Append(entry);
    std::fill_n(writer.payload(at), entry.payload_bytes, std::byte{0});
    writer.SetChecksum(at);
    const storage::LoadLogSeal seal = writer.Seal();
    storage::SealLoad(seal.bytes, seal.crc32c, 0, job_.tier->control());
  }
  absl::Status CommitLoad() {
    JobCall lock(&job_.lock);
    return applier_.CommitLoad(std::nullopt);
  }
  absl::Status AdoptLoad() {
    JobCall lock(&job_.lock);
    return applier_.AdoptLoad();
  }

  Moments moments_{&job_};
};

TEST_F(LoadApplierTest, SealsAppliesAndRecords) {
  ASSERT_NO_FATAL_FAILURE(StageMaster(0, 3));
  ASSERT_NO_FATAL_FAILURE(StageMaster(1, 4));
  ASSERT_TRUE(CommitLoad().ok());
  EXPECT_THAT(moments_.seen(),
              ElementsAre("sealed with seal, 0", "applied with seal, 0",
                          "recorded without seal, 1"));
  EXPECT_THAT(FirstElements(), ElementsAre(3, 4));
  EXPECT_EQ(job_.record().load_touched_from, storage::kNoParameter);
  EXPECT_TRUE(load_.staged.empty());
  EXPECT_TRUE(job_.tier->load_log().empty());
}

TEST_F(LoadApplierTest, ALoadOfWhatIsThereIsOnlyCounted) {
  ASSERT_NO_FATAL_FAILURE(StageMaster(0, 0));
  ASSERT_TRUE(CommitLoad().ok());
  EXPECT_THAT(moments_.seen(), ElementsAre("recorded without seal, 1"));
}

TEST_F(LoadApplierTest, ALoadThatIsNotSealedIsForgotten) {
  ASSERT_NO_FATAL_FAILURE(StageMaster(0, 3));
  ASSERT_TRUE(AdoptLoad().ok());
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
  EXPECT_EQ(job_.record().loads_finished, 0u);
  EXPECT_TRUE(job_.tier->load_log().empty());
}

TEST_F(LoadApplierTest, ALoadInPlaceIsRequiredAgain) {
  storage::StepRecord record = job_.record();
  record.load_touched_from = 1;
  storage::PublishRecord(record, job_.tier->control());
  ASSERT_TRUE(AdoptLoad().ok());
  EXPECT_EQ(job_.record().load_required_from, 1u);
}

TEST_F(LoadApplierTest, ASealedLoadIsApplied) {
  ASSERT_NO_FATAL_FAILURE(StageMaster(0, 3));
  ASSERT_NO_FATAL_FAILURE(StageMaster(1, 4));
  Seal();
  load_.staged.Reset({});  // another engine
  ASSERT_TRUE(AdoptLoad().ok());
  EXPECT_THAT(FirstElements(), ElementsAre(3, 4));
  EXPECT_EQ(job_.record().loads_finished, 1u);
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY);
  EXPECT_FALSE(storage::LoadIsSealed(*job_.tier->control()));
  EXPECT_TRUE(job_.tier->load_log().empty());
}

TEST_F(LoadApplierTest, ADamagedLogLeavesTheStateAlone) {
  ASSERT_NO_FATAL_FAILURE(StageMaster(0, 3));
  Seal();
  job_.tier->load_log()[job_.record().load_log_bytes - 1] ^= std::byte{1};
  const absl::Status adopted = AdoptLoad();
  EXPECT_EQ(adopted.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(adopted.message(),
              AllOf(HasSubstr(job_.tier->load_log_path()),
                    HasSubstr("cannot be used"), HasSubstr("optctl delete")));
  EXPECT_THAT(FirstElements(), ElementsAre(0, 0));
}

// The checksums are right: the log is of another layout.
TEST_F(LoadApplierTest, EntriesThatDoNotFitTheLayoutAreRefused) {
  const storage::LoadLogEntry entries[] = {
      {v1::STATE_ARRAY_MASTER, /*parameter=*/2, 0, 3, 12},
      {v1::STATE_ARRAY_MASTER, 0, /*begin=*/1, 3, 12},
      {v1::STATE_ARRAY_MASTER, 0, 0, 3, /*payload_bytes=*/8},
      {v1::STATE_ARRAY_STEP_COUNT, 0, /*begin=*/1, 2, 16},
      {v1::STATE_ARRAY_STATE_0 + 9, 0, 0, 3, 12},
  };
  for (const storage::LoadLogEntry& entry : entries) {
    ASSERT_NO_FATAL_FAILURE(SealEntry(entry));
    EXPECT_EQ(AdoptLoad().code(), absl::StatusCode::kDataLoss)
        << "array " << entry.array << " parameter " << entry.parameter;
  }
  ASSERT_NO_FATAL_FAILURE(
      SealEntry({v1::STATE_ARRAY_MASTER, 1, 0, 3, /*payload_bytes=*/12}));
  EXPECT_TRUE(AdoptLoad().ok());
}

TEST_F(LoadApplierTest, MastersOfAFormerBuildsLoadArePutInPlace) {
  storage::ControlFile& control = *job_.tier->control();
  ASSERT_TRUE(applier_.AdoptLoadedMasters().ok()) << "there is none";
  control.parameter_loading = 1 + 1;
  control.loading_begin = 0;
  control.loading_numel = 2;
  control.loading_masters[0] = 5;
  ASSERT_TRUE(applier_.AdoptLoadedMasters().ok());
  EXPECT_THAT(FirstElements(), ElementsAre(0, 5));
  EXPECT_EQ(control.parameter_loading, 0u);
  control.parameter_loading = 1 + 1;
  control.loading_begin = 2;
  const absl::Status behind = applier_.AdoptLoadedMasters();
  EXPECT_EQ(behind.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(behind.message(), HasSubstr("2 elements from 2 of parameter 1"));
  EXPECT_EQ(control.parameter_loading, 2u);
}

}  // namespace
}  // namespace optstate::session
