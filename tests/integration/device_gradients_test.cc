// A rank on a device of a real daemon has its gradients in memory of that
// device besides its gradient area: the device takes them from there, and
// whatever becomes of the rank, the engine or that memory, no bit differs from
// a job whose rank has none. With emulated devices, whose memory is a sealed
// file.

#include "client/views/device_gradients.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using client::DeviceGradients;
using client::Session;
using testing::HasSubstr;

constexpr char kDevice[] = "emulated-0";
constexpr uint64_t kBudget = uint64_t{1} << 30;

ParameterSpec Parameter(const std::string& name, int64_t numel, DType dtype) {
  return {.name = name,
          .shape = {numel},
          .numel = numel,
          .dtype = dtype,
          .gradient_dtype = dtype,
          .group = 0};
}

// Parameters that are their own masters and ones that are not, of whole tiles
// and of parts.
LayoutSpec MakeLayout() {
  return {.optimizer = OptimizerKind::kAdamW,
          .groups = {{.options = 0}},
          .parameters = {Parameter("a", 30'000, DType::kFloat32),
                         Parameter("b", 40'001, DType::kBFloat16),
                         Parameter("c", 16, DType::kFloat32),
                         Parameter("d", 3 * kTileElements, DType::kBFloat16)}};
}

// The copies that the rank has on its device.
enum class Copies : uint8_t {
  kNone,
  kRight,
  kOfAnotherStep,  // and the table says so
  kWrong,          // and the table says that they are right
};

class DeviceGradientsTest : public testing::Test {
 protected:
  void SetUp() override {
    TestDaemon::Options options;
    options.flags = {"--devices", "emulated:1"};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    Open(&job_, &session_);
    Open(&plain_job_, &plain_);
    ASSERT_NE(plain_, nullptr);
    for (Session* const each : {session_.get(), plain_.get()}) {
      const absl::Status loaded = LoadConstant(*each, 1);
      ASSERT_TRUE(loaded.ok()) << loaded;
    }
  }
  void Open(client::SessionOptions* job, std::unique_ptr<Session>* session) {
    job->endpoint = daemon_->shm_endpoint();
    job->storage.offload_fraction = 0;
    job->storage.device_budget_bytes = kBudget;
    auto opened = Session::Open(*job);
    ASSERT_TRUE(opened.ok()) << opened.status();
    *session = *std::move(opened);
  }
  // Offers memory for all gradients.
  absl::Status Share() {
    offsets_.clear();
    uint64_t bytes = 0;
    for (const ParameterSpec& spec : session_->layout().parameters()) {
      offsets_.push_back(bytes);
      // Kernels load 16 bytes at once.
      bytes +=
          (static_cast<uint64_t>(spec.numel) * sizeof(float) + 79) / 16 * 16;
    }
    // As an emulated device has it: whole pages.
    bytes = (bytes + 4095) / 4096 * 4096;
    memory_ = *shm::SealedSegment::Create("rank's device", bytes);
    auto gradients =
        session_->ShareGradients(kDevice, memory_.fd(), memory_.size());
    if (!gradients.ok()) return gradients.status();
    gradients_ = *std::move(gradients);
    return absl::OkStatus();
  }
  // Copies the step's gradients to the device, and says so in the table.
  void Copy(const StepScript::Step& step, Copies copies) {
    if (copies == Copies::kNone) return;
    ASSERT_TRUE(gradients_->Clear(step.parameters).ok());
    std::vector<uint64_t> offsets;
    for (size_t i = 0; i < step.parameters.size(); ++i) {
      offsets.push_back(offsets_[step.parameters[i]]);
      const std::vector<std::byte>& gradient = step.gradients[i];
      std::byte* const there = memory_.data() + offsets.back();
      std::memcpy(there, gradient.data(), gradient.size());
      if (copies != Copies::kRight) there[gradient.size() - 1] ^= std::byte{64};
    }
    const uint64_t of = step.commit.step;
    const absl::Status marked =
        gradients_->Mark(copies == Copies::kOfAnotherStep ? of + 1 : of,
                         step.parameters, offsets);
    ASSERT_TRUE(marked.ok()) << marked;
  }
  static uint64_t BytesOf(const StepScript::Step& step) {
    uint64_t bytes = 0;
    for (const auto& gradient : step.gradients) bytes += gradient.size();
    return bytes;
  }
  void StepPlain(uint64_t step) {
    const auto outcome = script_.Run(*plain_, step);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
  }
  // Takes a step in both jobs; returns the bytes of its gradients.
  uint64_t Step(Copies copies) {
    const uint64_t step = session_->committed_step() + 1;
    const StepScript::Step made = script_.Make(step);
    Copy(made, copies);
    const auto outcome = script_.Run(*session_, step);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    StepPlain(step);
    return BytesOf(made);
  }
  v1::DeviceUse Use() {
    const auto job = daemon_->GetJob(job_.job);
    EXPECT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->device_updates().problem(), "");
    return job->device_updates().uses(0);
  }
  void CheckEqual() {
    const auto ours = Snapshot(*session_);
    const auto theirs = Snapshot(*plain_);
    ASSERT_TRUE(ours.ok()) << ours.status();
    ASSERT_TRUE(theirs.ok()) << theirs.status();
    EXPECT_EQ(FirstDifference(*ours, *theirs), "");
  }

  std::unique_ptr<TestDaemon> daemon_;
  const StepScript script_{*Layout::Make(MakeLayout()), ScriptSeed()};
  client::SessionOptions job_ = NewJob(MakeLayout());
  client::SessionOptions plain_job_ = NewJob(MakeLayout());
  std::unique_ptr<Session> session_;
  std::unique_ptr<Session> plain_;  // whose rank has nothing on a device
  shm::SealedSegment memory_;
  std::vector<uint64_t> offsets_;  // in the memory, by parameter
  std::unique_ptr<DeviceGradients> gradients_;
};

TEST_F(DeviceGradientsTest, TheDeviceTakesThemFromTheRank) {
  Step(Copies::kNone);
  EXPECT_EQ(Use().gradient_bytes(), 0u);
  const absl::Status shared = Share();
  ASSERT_TRUE(shared.ok()) << shared;
  EXPECT_TRUE(session_->IsShared(*gradients_));
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) bytes += Step(Copies::kRight);
  EXPECT_EQ(Use().gradient_bytes(), bytes);
  EXPECT_EQ(Use().refused_elements(), 0u);
  CheckEqual();
  // Memory that is given up is not read any more, whatever the table says.
  const absl::Status given_up = session_->GiveUpGradients();
  ASSERT_TRUE(given_up.ok()) << given_up;
  for (int i = 0; i < 2; ++i) Step(Copies::kRight);
  EXPECT_EQ(Use().gradient_bytes(), bytes);
  CheckEqual();
}

TEST_F(DeviceGradientsTest, WhatIsOfAnotherStepIsNotUsed) {
  ASSERT_TRUE(Share().ok());
  for (int i = 0; i < 4; ++i) Step(Copies::kOfAnotherStep);
  EXPECT_EQ(Use().gradient_bytes(), 0u);
  EXPECT_EQ(Use().refused_elements(), 0u);
  CheckEqual();
  const uint64_t bytes = Step(Copies::kRight);
  EXPECT_EQ(Use().gradient_bytes(), bytes);
  CheckEqual();
}

TEST_F(DeviceGradientsTest, WrongOnesAreFoundAndTheAreaCounts) {
  ASSERT_TRUE(Share().ok());
  Step(Copies::kRight);
  uint64_t bytes = 0;
  while (bytes == 0) bytes = Step(Copies::kWrong);
  EXPECT_GT(Use().refused_elements(), 0u);
  CheckEqual();
  const uint64_t refused = Use().refused_elements();
  for (int i = 0; i < 3; ++i) Step(Copies::kWrong);
  EXPECT_EQ(Use().refused_elements(), refused) << "nothing is taken any more";
  CheckEqual();
}

TEST_F(DeviceGradientsTest, AnEngineThatIsKilledInTheStep) {
  ASSERT_TRUE(Share().ok());
  for (int i = 0; i < 3; ++i) Step(Copies::kRight);
  const uint64_t step = session_->committed_step() + 1;
  const StepScript::Step made = script_.Make(step);
  Copy(made, Copies::kRight);
  ASSERT_TRUE(StepScript::Push(*session_, made).ok());
  const absl::Status killed = daemon_->KillEngine(job_.job);
  ASSERT_TRUE(killed.ok()) << killed;
  // The next engine finishes the step from the gradient area.
  const auto outcome = session_->Commit(made.commit);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  StepPlain(step);
  EXPECT_EQ(Use().gradient_bytes(), 0u);
  EXPECT_FALSE(session_->IsShared(*gradients_));
  CheckEqual();
  ASSERT_TRUE(Share().ok());
  uint64_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes += Step(Copies::kRight);
  EXPECT_EQ(Use().gradient_bytes(), bytes);
  CheckEqual();
}

// It dies behind the copy and before the push: nothing of the step is left. The
// rank that comes after it has other gradients of the same step.
TEST_F(DeviceGradientsTest, ARankThatLeavesBeforeItPushes) {
  ASSERT_TRUE(Share().ok());
  for (int i = 0; i < 2; ++i) Step(Copies::kRight);
  const uint64_t before = Use().gradient_bytes();
  StepScript::Step made = script_.Make(session_->committed_step() + 1);
  for (auto& gradient : made.gradients) gradient[0] ^= std::byte{1};
  Copy(made, Copies::kRight);
  session_.reset();
  Open(&job_, &session_);
  ASSERT_NE(session_, nullptr);
  Step(Copies::kNone);
  EXPECT_EQ(Use().gradient_bytes(), before);
  EXPECT_EQ(Use().refused_elements(), 0u);
  ASSERT_TRUE(Share().ok());
  const uint64_t bytes = Step(Copies::kRight);
  EXPECT_EQ(Use().gradient_bytes(), before + bytes);
  CheckEqual();
}

// The step is taken again with other gradients, which come from the area.
TEST_F(DeviceGradientsTest, AStepThatIsAbortedAndTakenAgain) {
  ASSERT_TRUE(Share().ok());
  Step(Copies::kRight);
  StepScript::Step made = script_.Make(session_->committed_step() + 1);
  for (auto& gradient : made.gradients) gradient[0] ^= std::byte{1};
  Copy(made, Copies::kRight);
  ASSERT_TRUE(StepScript::Push(*session_, made).ok());
  ASSERT_TRUE(session_->Abort(made.commit.step).ok());
  ASSERT_TRUE(gradients_->Clear(made.parameters).ok());
  const uint64_t before = Use().gradient_bytes();
  Step(Copies::kNone);
  EXPECT_EQ(Use().gradient_bytes(), before);
  EXPECT_EQ(Use().refused_elements(), 0u);
  CheckEqual();
}

TEST_F(DeviceGradientsTest, WhoCannotShareThemIsToldWhy) {
  memory_ = *shm::SealedSegment::Create("rank's device", 4096);
  const absl::Status elsewhere =
      session_->ShareGradients("another", memory_.fd(), 4096).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(elsewhere)) << elsewhere;
  EXPECT_THAT(elsewhere.message(), HasSubstr(kDevice));
  const absl::Status short_memory =
      session_->ShareGradients(kDevice, memory_.fd(), 8192).status();
  EXPECT_TRUE(absl::IsInvalidArgument(short_memory)) << short_memory;
  Step(Copies::kNone);
  CheckEqual();
}

}  // namespace
}  // namespace optstate
