// At each point at which recovery relies on the order of stores, looks into the
// job's files: what the stores before the point have written is there, what
// comes after it is not. A test fails when a point that it expects is not
// reached, and the last one when no test expects some point.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_crash_fixture.h"
#include "server/session/testing/job_harness.h"
#include "storage/format/control_file.h"
#include "storage/format/load_log.h"
#include "storage/format/rank_mark.h"
#include "storage/format/step_intent.h"
#include "storage/persist_in_order.h"

namespace optstate::session {
namespace {

using storage::PersistPoint;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAreArray;
using ::testing::Ne;

constexpr std::array kPoints = {
    PersistPoint::kRankProcessStart,   PersistPoint::kRankProcessId,
    PersistPoint::kRankAttached,       PersistPoint::kInstanceDrop,
    PersistPoint::kClientInstance,     PersistPoint::kLossDrop,
    PersistPoint::kRankDetached,       PersistPoint::kStagingEpoch,
    PersistPoint::kStagingEpochStored, PersistPoint::kMicroStepEnded,
    PersistPoint::kMicroStepAnswer,    PersistPoint::kStepInProgress,
    PersistPoint::kStepPrepared,       PersistPoint::kStepClipped,
    PersistPoint::kFirstTile,          PersistPoint::kStepGivenUp,
    PersistPoint::kLoadSeal,           PersistPoint::kLoadInPlace,
    PersistPoint::kLoadRecord,         PersistPoint::kParameterLoading,
};

// A pid that no process has: it is above the largest one.
constexpr int32_t kNoProcess = 2147483600;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A copy of the control file.
class Control {
 public:
  explicit Control(const std::string& bytes) {
    EXPECT_EQ(bytes.size(), sizeof(bytes_));
    std::memcpy(bytes_, bytes.data(), std::min(bytes.size(), sizeof(bytes_)));
  }
  const storage::ControlFile* operator->() const { return &get(); }
  const storage::ControlFile& get() const {
    return *reinterpret_cast<const storage::ControlFile*>(bytes_);
  }

 private:
  alignas(storage::ControlFile) char bytes_[sizeof(storage::ControlFile)] = {};
};

// Looks into the files of one job while it lives; one at a time.
class Watch {
 public:
  using Look = std::function<void(PersistPoint)>;

  Watch(const JobHarness& harness, Look look)
      : directory_(harness.directory() + "/state/"), look_(std::move(look)) {
    current_ = this;
    storage::persist_hook = &Watch::OnPoint;
  }
  ~Watch() {
    storage::persist_hook = nullptr;
    current_ = nullptr;
  }

  // The points that were reached so far, in order.
  const std::vector<PersistPoint>& reached() const { return reached_; }
  static const std::set<PersistPoint>& reached_by_all() { return all_; }

  std::string File(const std::string& name) const {
    return ReadAll(directory_ + name);
  }
  Control ReadControl() const { return Control(File("control")); }
  storage::RankMark Mark(uint32_t rank) const {
    const std::string bytes = File("rank_marks");
    storage::RankMark mark = {};
    EXPECT_GE(bytes.size(), (rank + 1) * sizeof(mark));
    std::memcpy(&mark, bytes.data() + rank * sizeof(mark), sizeof(mark));
    return mark;
  }
  std::vector<uint64_t> RunStamps() const {
    const std::string bytes = File("run_stamps.u64");
    std::vector<uint64_t> stamps(bytes.size() / sizeof(uint64_t));
    std::memcpy(stamps.data(), bytes.data(), stamps.size() * sizeof(uint64_t));
    return stamps;
  }

 private:
  // The points of other folders may be reached by any thread, these only by the
  // one that calls the job.
  static void OnPoint(PersistPoint point) {
    if (std::find(kPoints.begin(), kPoints.end(), point) == kPoints.end()) {
      return;
    }
    current_->reached_.push_back(point);
    all_.insert(point);
    current_->look_(point);
  }

  static Watch* current_;
  static std::set<PersistPoint> all_;
  const std::string directory_;
  const Look look_;
  std::vector<PersistPoint> reached_;
};

Watch* Watch::current_ = nullptr;
std::set<PersistPoint> Watch::all_;

TEST(PersistOrderTest, AnotherSessionAttaches) {
  JobHarness::Setup setup = TwoRanks();
  setup.processes = {{.pid = kNoProcess, .start_ticks = 7}};
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  ASSERT_TRUE(harness.Push(0, 1, 0, 1).ok());
  harness.Close();
  ASSERT_TRUE(harness.Open().ok());
  ASSERT_TRUE(harness.Register(0).ok());
  AttachSpec spec = harness.AttachSpecOf(0);
  spec.client_instance = 500;
  spec.process = {.pid = ::getpid(), .start_ticks = 42};
  const Watch watch(harness, [&](PersistPoint point) {
    const storage::RankMark mark = watch.Mark(0);
    // An engine that finds the rank attached takes instance and process for
    // that rank's.
    EXPECT_EQ(mark.attached, 0u);
    const bool is_replaced = point != PersistPoint::kInstanceDrop &&
                             point != PersistPoint::kClientInstance;
    EXPECT_EQ(mark.client_instance, is_replaced ? 500u : kInstance);
    // Gradients that the former instance staged never count for the new one.
    EXPECT_EQ(mark.step, point == PersistPoint::kInstanceDrop ? 1u : 0u);
    switch (point) {
      case PersistPoint::kRankProcessStart:
        EXPECT_EQ(mark.pid, 0);
        EXPECT_EQ(mark.process_start_ticks, 7u);
        break;
      case PersistPoint::kRankProcessId:
        EXPECT_EQ(mark.pid, 0);
        EXPECT_EQ(mark.process_start_ticks, 42u);
        break;
      case PersistPoint::kRankAttached:
        EXPECT_EQ(mark.pid, ::getpid());
        EXPECT_EQ(mark.process_start_ticks, 42u);
        break;
      default:
        EXPECT_EQ(mark.pid, kNoProcess);
    }
  });
  ASSERT_TRUE(harness.job().Attach(spec).ok());
  EXPECT_THAT(watch.reached(),
              ElementsAreArray(
                  {PersistPoint::kInstanceDrop, PersistPoint::kClientInstance,
                   PersistPoint::kRankProcessStart,
                   PersistPoint::kRankProcessId, PersistPoint::kRankAttached}));
  EXPECT_EQ(watch.Mark(0).attached, 1u);
}

TEST(PersistOrderTest, ARankIsLostInAStep) {
  JobHarness harness(TwoRanks());
  harness.Start(harness.RandomTensors(1));
  harness.PushAll(1);
  const Watch watch(harness, [&](PersistPoint point) {
    const storage::RankMark mark = watch.Mark(1);
    // An engine that finds the rank attached repeats the loss, and one that
    // does not finds it recorded and nothing staged.
    EXPECT_EQ(mark.attached, 1u);
    EXPECT_EQ(mark.loss_unacknowledged, 1u);
    EXPECT_EQ(mark.lost_at_step, 1u);
    EXPECT_EQ(mark.step, point == PersistPoint::kLossDrop ? 1u : 0u);
  });
  harness.Detach(1);
  EXPECT_THAT(watch.reached(), ElementsAreArray({PersistPoint::kLossDrop,
                                                 PersistPoint::kRankDetached}));
  EXPECT_EQ(watch.Mark(1).attached, 0u);
}

TEST(PersistOrderTest, ARankBeginsToStage) {
  JobHarness harness(TwoRanks());
  harness.Start(harness.RandomTensors(1));
  uint32_t epoch = 0;
  const Watch watch(harness, [&](PersistPoint point) {
    const storage::RankMark mark = watch.Mark(0);
    // Marks of an earlier step never count for this one.
    EXPECT_EQ(mark.step, 0u);
    EXPECT_EQ(mark.epoch, point == PersistPoint::kStagingEpoch
                              ? epoch
                              : storage::EpochAfter(epoch));
  });
  epoch = watch.Mark(0).epoch;
  ASSERT_TRUE(harness.Push(0, 1, 0, 1).ok());
  EXPECT_THAT(watch.reached(),
              ElementsAreArray({PersistPoint::kStagingEpoch,
                                PersistPoint::kStagingEpochStored}));
  EXPECT_EQ(watch.Mark(0).step, 1u);
}

class PersistOrderInMicroStepsTest : public ::testing::Test {
 protected:
  static JobHarness::Setup Accumulating() {
    JobHarness::Setup setup = TwoRanks(Case::kRanksLackGradients);
    setup.accumulate = true;
    return setup;
  }
  PersistOrderInMicroStepsTest() : harness_(Accumulating()) {
    harness_.Start(harness_.RandomTensors(1));
    harness_.SetGradients(harness_.RandomTensors(2));
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, AdamHyperparams());
  JobHarness harness_;
};

TEST_F(PersistOrderInMicroStepsTest, RanksEndAMicroStep) {
  // Micro-steps that the ranks have ended in step 1 do not count in step 2.
  harness_.PushAll(1);
  for (uint32_t rank = 0; rank < 2; ++rank) harness_.EndMicroStep(rank, 1, 0);
  CommitSpec commit;
  commit.step = 1;
  commit.groups = groups_;
  ASSERT_TRUE(harness_.CommitAll(commit).status.ok());
  ASSERT_TRUE(harness_.Push(0, 2, 0, 3, 1).ok());
  const uint64_t waiting = harness_.EndMicroStep(0, 2, 1);
  ASSERT_EQ(harness_.AnswerTo(0, waiting), nullptr);
  ASSERT_TRUE(harness_.Push(1, 2, 0, 2, 1).ok());
  const Watch watch(harness_, [&](PersistPoint point) {
    const storage::RankMark mark = watch.Mark(0);
    const uint32_t epoch = mark.epoch;
    if (watch.reached().size() > 2) return;  // of rank 1, likewise
    // Before it is answered, the rank's mark says to the next engine that it
    // is past the micro-step; and the mark counts last.
    EXPECT_EQ(mark.ended, 2u);
    EXPECT_EQ(harness_.AnswerTo(0, waiting), nullptr);
    if (point == PersistPoint::kMicroStepEnded) {
      EXPECT_NE(mark.ended_epoch, epoch);
    } else {
      EXPECT_EQ(mark.ended_epoch, epoch);
    }
  });
  harness_.EndMicroStep(1, 2, 1);
  EXPECT_THAT(
      watch.reached(),
      ElementsAreArray(
          {PersistPoint::kMicroStepEnded, PersistPoint::kMicroStepAnswer,
           PersistPoint::kMicroStepEnded, PersistPoint::kMicroStepAnswer}));
  ASSERT_NE(harness_.AnswerTo(0, waiting), nullptr);
}

TEST_F(PersistOrderInMicroStepsTest, EndsAreCarriedIntoTheNextEpoch) {
  const uint64_t ended = harness_.EndMicroStep(0, 1, 0);
  ASSERT_NE(harness_.AnswerTo(0, ended), nullptr);
  uint32_t epoch = 0;
  const Watch watch(harness_, [&](PersistPoint point) {
    // A mark of the next epoch counts already: see RankMark::ended_epoch.
    EXPECT_EQ(watch.Mark(0).ended_epoch, storage::EpochAfter(epoch));
    EXPECT_EQ(watch.Mark(0).epoch, point == PersistPoint::kStagingEpoch
                                       ? epoch
                                       : storage::EpochAfter(epoch));
  });
  epoch = watch.Mark(0).epoch;
  ASSERT_EQ(watch.Mark(0).ended_epoch, epoch);
  ASSERT_TRUE(harness_.job().Abort(1, 1).ok());
  EXPECT_THAT(watch.reached(),
              ElementsAreArray({PersistPoint::kStagingEpoch,
                                PersistPoint::kStagingEpochStored}));
}

class PersistOrderInCrashTest : public JobCrashTest {};

TEST_F(PersistOrderInCrashTest, AStepIsMarked) {
  PushStep3(&harness_);
  const Watch watch(harness_, [&](PersistPoint point) {
    // The next engine finishes a marked step from its intent.
    const std::string intent_bytes = watch.File("step_intent");
    storage::StepIntent intent;
    EXPECT_TRUE(storage::ReadStepIntent(
                    absl::MakeConstSpan(
                        reinterpret_cast<const std::byte*>(intent_bytes.data()),
                        intent_bytes.size()),
                    3, groups_.size(), 3, &intent)
                    .ok());
    const Control control = watch.ReadControl();
    EXPECT_EQ(control->counts_begun.load(), 0u);
    EXPECT_EQ(control->step_in_progress.load(),
              point == PersistPoint::kStepInProgress ? 0u : 3u);
    EXPECT_THAT(watch.RunStamps(), Each(Ne(3u)));
  });
  ASSERT_NE(watch.ReadControl()->counts_begun.load(), 0u);  // of step 2
  harness_.CommitAll(CommitOf(3));
  EXPECT_THAT(watch.reached(), ElementsAreArray({PersistPoint::kStepInProgress,
                                                 PersistPoint::kFirstTile}));
  EXPECT_THAT(watch.RunStamps(), Contains(3u));
}

TEST_F(PersistOrderInCrashTest, AStepIsPrepared) {
  PushStep3(&harness_);
  const Watch watch(harness_, [&](PersistPoint) {
    const std::string intent_bytes = watch.File("step_intent");
    storage::StepIntent intent;
    EXPECT_TRUE(storage::ReadStepIntent(
                    absl::MakeConstSpan(
                        reinterpret_cast<const std::byte*>(intent_bytes.data()),
                        intent_bytes.size()),
                    3, groups_.size(), 3, &intent)
                    .ok());
    EXPECT_EQ(watch.ReadControl()->step_prepared.load(), 0u);
    EXPECT_EQ(watch.ReadControl()->step_in_progress.load(), 0u);
  });
  CommitSpec commit = CommitOf(3);
  commit.two_phase = true;
  harness_.CommitAll(commit);
  EXPECT_THAT(watch.reached(), ElementsAreArray({PersistPoint::kStepPrepared}));
  EXPECT_EQ(watch.ReadControl()->step_prepared.load(), 3u);
  EXPECT_THAT(watch.RunStamps(), Each(Ne(3u)));
}

TEST_F(PersistOrderInCrashTest, APreparedStepIsClipped) {
  PushStep3(&harness_);
  CommitSpec commit = CommitOf(3);
  commit.two_phase = true;
  commit.max_norm = 0;
  const uint64_t digest = harness_.CommitAll(commit).outcome.digest;
  const Watch watch(harness_, [&](PersistPoint point) {
    const Control control = watch.ReadControl();
    EXPECT_EQ(control->nodes_gradient_norm, 7);
    EXPECT_EQ(control->nodes_clip_coefficient, 0.5);
    EXPECT_EQ(control->step_clipped.load(),
              point == PersistPoint::kStepClipped ? 0u : 3u);
    EXPECT_EQ(control->step_in_progress.load(),
              point == PersistPoint::kFirstTile ? 3u : 0u);
  });
  harness_.job().Decide(0, 1000,
                        {.step = 3,
                         .digest = digest,
                         .verdict = Verdict::kClip,
                         .gradient_norm = 7,
                         .clip_coefficient = 0.5});
  EXPECT_EQ(watch.ReadControl()->step_prepared.load(), 3u);
  harness_.job().Decide(0, 1001,
                        {.step = 3, .digest = ClippedDigest(digest, 7, 0.5)});
  EXPECT_THAT(watch.reached(), ElementsAreArray({PersistPoint::kStepClipped,
                                                 PersistPoint::kStepInProgress,
                                                 PersistPoint::kFirstTile}));
}

TEST_F(PersistOrderInCrashTest, AStepIsGivenUp) {
  DieInStep3(Instant::kFirstRun);
  const Watch watch(harness_, [&](PersistPoint point) {
    if (point != PersistPoint::kStepGivenUp) return;
    EXPECT_EQ(watch.ReadControl()->given_up_for_rank, 1u);
    EXPECT_EQ(watch.ReadControl()->step_given_up.load(), 0u);
  });
  ASSERT_NO_FATAL_FAILURE(FailWithRank0());
  EXPECT_THAT(watch.reached(), Contains(PersistPoint::kStepGivenUp));
  EXPECT_EQ(watch.ReadControl()->step_given_up.load(), 3u);
}

TEST_F(PersistOrderInCrashTest, ALoadIsSealedAppliedAndRecorded) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
  }
  const Tensors values = harness_.RandomTensors(99);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (uint32_t p = 0; p < values.size(); ++p) {
      ASSERT_TRUE(harness_.LoadMaster(rank, p, values[p]).ok());
    }
  }
  std::string log;
  std::string former;
  std::string loaded;
  const Watch watch(harness_, [&](PersistPoint point) {
    const Control control = watch.ReadControl();
    const storage::StepRecord& record = storage::CurrentRecord(control.get());
    const std::string parameters = watch.File("parameters");
    switch (point) {
      case PersistPoint::kLoadSeal:
        EXPECT_FALSE(storage::LoadIsSealed(control.get()));
        EXPECT_EQ(parameters, former);
        log = watch.File("load");
        break;
      case PersistPoint::kLoadInPlace: {
        EXPECT_TRUE(storage::LoadIsSealed(control.get()));
        EXPECT_EQ(parameters, former);
        // The log was whole before its seal was there.
        storage::LoadLogHeader header;
        header.loads_finished = record.loads_finished;
        header.incarnation = control->incarnation;
        header.committed_step = record.committed_step;
        const auto read = storage::ReadLoadLog(
            absl::MakeConstSpan(reinterpret_cast<const std::byte*>(log.data()),
                                log.size()),
            header,
            {.bytes = record.load_log_bytes, .crc32c = record.load_log_crc32c});
        EXPECT_TRUE(read.ok()) << read.status();
        break;
      }
      default:
        EXPECT_EQ(point, PersistPoint::kLoadRecord);
        EXPECT_TRUE(storage::LoadIsSealed(control.get()));
        loaded = parameters;
    }
  });
  former = watch.File("parameters");
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_THAT(watch.reached(), ElementsAreArray({PersistPoint::kLoadSeal,
                                                 PersistPoint::kLoadInPlace,
                                                 PersistPoint::kLoadRecord}));
  EXPECT_NE(loaded, former);
  EXPECT_EQ(loaded, watch.File("parameters"));
  EXPECT_FALSE(storage::LoadIsSealed(watch.ReadControl().get()));
}

TEST_F(PersistOrderInCrashTest, AFormerBuildsLoadIsPutInPlace) {
  harness_.Close();
  const std::string path = Path("control");
  const std::string bytes = ReadAll(path);
  Control copy(bytes);
  auto& control = const_cast<storage::ControlFile&>(copy.get());
  control.loading_begin = 100;
  control.loading_numel = 1;
  control.loading_masters[0] = 7;
  control.parameter_loading.store(1);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::pwrite(fd, &control, sizeof(control), 0),
            static_cast<ssize_t>(sizeof(control)));
  ::close(fd);
  const auto parameter = [&](const Watch& watch) {
    float value = 0;
    std::memcpy(&value, watch.File("parameters").data() + 100 * sizeof(float),
                sizeof(value));
    return value;
  };
  const Watch watch(harness_, [&](PersistPoint point) {
    if (point != PersistPoint::kParameterLoading) return;
    EXPECT_EQ(watch.ReadControl()->parameter_loading.load(), 1u);
    EXPECT_EQ(parameter(watch), 7);
  });
  ASSERT_NE(parameter(watch), 7);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_THAT(watch.reached(), Contains(PersistPoint::kParameterLoading));
  EXPECT_EQ(watch.ReadControl()->parameter_loading.load(), 0u);
}

// Runs last; needs the tests before it.
TEST(PersistPointsTest, EachWasReached) {
  const auto& tests = *::testing::UnitTest::GetInstance();
  if (tests.test_to_run_count() != tests.total_test_count()) {
    GTEST_SKIP() << "some tests were filtered out";
  }
  for (const PersistPoint point : kPoints) {
    EXPECT_THAT(Watch::reached_by_all(), Contains(point))
        << static_cast<int>(point);
  }
}

}  // namespace
}  // namespace optstate::session
