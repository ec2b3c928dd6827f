// Tests of the files undo, redo and speculation, cut or missing.

#include <signal.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_scheduler.h"
#include "server/session/testing/job_crash_fixture.h"
#include "storage/format/control_file.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

JobHarness::Setup Whole() {
  JobHarness::Setup setup = TwoRanks();
  setup.layout.optimizer = OptimizerKind::kLamb;
  setup.layout.groups = {{}, {}};
  return setup;
}

JobHarness::Setup Speculative() {
  JobHarness::Setup setup = TwoRanks();
  setup.speculative = true;
  return setup;
}

class StepFilesTest : public JobCrashTest {
 protected:
  explicit StepFilesTest(const JobHarness::Setup& setup = TwoRanks())
      : JobCrashTest(setup) {}

  // Expects repeated refusals, and no change.
  void ExpectRefused(const std::string& file, const std::string& text,
                     uint64_t needed) {
    const bool is_there = fs::exists(Path(file));
    const uint64_t bytes = is_there ? fs::file_size(Path(file)) : 0;
    for (int attempt = 0; attempt < 2; ++attempt) {
      const absl::Status status = harness_.Open();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(status.message(),
                  AllOf(HasSubstr(absl::StrCat(Path(file), text)),
                        HasSubstr(absl::StrCat("it must have ", needed, ":")),
                        HasSubstr("Last good step: 2")));
      ASSERT_EQ(fs::exists(Path(file)), is_there);
      if (!is_there) continue;
      EXPECT_EQ(fs::file_size(Path(file)), bytes);
    }
  }
  // Expects a refusal with the file cut to each size, and without it; then
  // restores the file.
  void ExpectNeeded(const std::string& file, const std::vector<uint64_t>& cuts,
                    uint64_t needed) {
    harness_.Close();
    fs::copy_file(Path(file), Path("aside"));
    for (const uint64_t bytes : cuts) {
      fs::resize_file(Path(file), bytes);
      ExpectRefused(file, absl::StrCat(" has ", bytes, " bytes"), needed);
      fs::copy_file(Path("aside"), Path(file),
                    fs::copy_options::overwrite_existing);
    }
    fs::resize_file(Path(file), 0);
    ExpectRefused(file, " is missing or empty", needed);
    fs::remove(Path(file));
    ExpectRefused(file, " is missing or empty", needed);
    fs::rename(Path("aside"), Path(file));
  }
  void ExpectFinished() {
    ASSERT_TRUE(harness_.Open().ok());
    RememberGradients();
    harness_.AttachAll();
    EXPECT_EQ(committed_step(), 3);
    EXPECT_TRUE(harness_.StateBytes() == expected_);
  }
  void Overwrite(const std::string& file, size_t offset, uint64_t value) {
    std::FILE* const stream = std::fopen(Path(file).c_str(), "r+");
    ASSERT_NE(stream, nullptr);
    std::fseek(stream, static_cast<long>(offset), SEEK_SET);
    EXPECT_EQ(std::fwrite(&value, sizeof(value), 1, stream), 1);
    std::fclose(stream);
  }

  const uint64_t slot_ = scheduler::StepScheduler::WorkerUndoBytes(1);
};

// The engine that dies has one worker, the one before it had two.
TEST_F(StepFilesTest, UndoInsideAStep) {
  DieInStep3(Instant::kFirstRun);
  ExpectNeeded("undo", {2 * slot_ - 1, slot_, 64}, 2 * slot_);
  ExpectFinished();
}

TEST_F(StepFilesTest, UndoOfAnEngineThatDoesNotSayHowLargeItIs) {
  DieInStep3(Instant::kFirstRun);
  Overwrite("control", offsetof(storage::ControlFile, undo_bytes), 0);
  ExpectNeeded("undo", {slot_ - 1, 64}, slot_);
  ExpectFinished();
}

TEST_F(StepFilesTest, BetweenStepsTheyAreMadeAnew) {
  harness_.Close();
  for (const uint64_t bytes : {slot_, uint64_t{64}, uint64_t{0}}) {
    fs::resize_file(Path("undo"), bytes);
    ASSERT_TRUE(harness_.Open().ok());
    EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
    EXPECT_TRUE(harness_.StateBytes() == committed_);
    harness_.Close();
    EXPECT_EQ(fs::file_size(Path("undo")), 2 * slot_);
  }
  fs::remove(Path("undo"));
  ASSERT_TRUE(harness_.Open().ok());
  harness_.AttachAll();
  TakeStep3(&harness_);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

// An engine that never speculated has no such file.
TEST_F(StepFilesTest, ASpeculatedStepWithoutTheFile) {
  harness_.Close();
  Overwrite("control", offsetof(storage::ControlFile, step_speculated), 3);
  const absl::Status status = harness_.Open();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.message(), HasSubstr("speculation is missing or empty"));
}

class SumFilesTest : public StepFilesTest {
 protected:
  SumFilesTest() : StepFilesTest(TwoRanks(Case::kAccumulate)) {}
};

// An interrupted addition to a sum is rolled back from `undo`.
TEST_F(SumFilesTest, UndoBetweenStepsWhenSumsAreStaged) {
  DieIn([&] {
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    PushStep3(&harness_);
    ::kill(::getpid(), SIGKILL);
  });
  ExpectNeeded("undo", {slot_}, 2 * slot_);
  ASSERT_TRUE(harness_.Open().ok());
  harness_.AttachAll();
  harness_.CommitAll(CommitOf(3));
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

class WholeFilesTest : public StepFilesTest {
 protected:
  WholeFilesTest() : StepFilesTest(Whole()) {}
};

// The file has two workers' parts, of which the first is in use.
TEST_F(WholeFilesTest, RedoOfAParameterThatIsNotInPlace) {
  DieInStep3(Instant::kFirstRun);
  const uint64_t part = fs::file_size(Path("redo")) / 2;
  ExpectNeeded("redo", {part - 1, 4096}, part);
  fs::resize_file(Path("redo"), part);
  ExpectFinished();
}

TEST_F(WholeFilesTest, NothingOfRedoIsNeededBeforeTheFirstParameter) {
  DieInStep3(Instant::kMarked);
  fs::remove(Path("redo"));
  ExpectFinished();
}

TEST_F(WholeFilesTest, ASpeculatedStepIsImpossible) {
  harness_.Close();
  Overwrite("control", offsetof(storage::ControlFile, step_speculated), 3);
  const absl::Status status = harness_.Open();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.message(), HasSubstr("step_speculated is 3"));
}

TEST_F(WholeFilesTest, AnUpdateOfOneRunIsImpossible) {
  DieInStep3(Instant::kFirstRun);
  Overwrite("undo", 0, 1);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(harness_.job().Describe().reason(),
              HasSubstr("undo: a slot names run 0 of"));
}

class SpeculationFileTest : public StepFilesTest {
 protected:
  SpeculationFileTest() : StepFilesTest(Speculative()) {}
};

TEST_F(SpeculationFileTest, WhatWasOverwrittenBeforeTheDecision) {
  DieIn([&] {
    if (!harness_.Open().ok()) ::_exit(1);
    harness_.AttachAll();
    PushStep3(&harness_);
    harness_.Commit(0, CommitOf(3));
    ::kill(::getpid(), SIGKILL);
  });
  const uint64_t bytes = fs::file_size(Path("speculation"));
  ExpectNeeded("speculation", {bytes - 1, bytes / 2, 4096}, bytes);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_TRUE(harness_.StateBytes() == committed_);
}

TEST_F(SpeculationFileTest, BetweenStepsItIsMadeAnew) {
  harness_.Close();
  fs::resize_file(Path("speculation"), 4096);
  ASSERT_TRUE(harness_.Open().ok());
  harness_.AttachAll();
  TakeStep3(&harness_);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
}

}  // namespace
}  // namespace optstate::session
