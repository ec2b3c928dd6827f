#ifndef OPTSTATE_TESTS_FAULTS_FAULT_FIXTURE_H_
#define OPTSTATE_TESTS_FAULTS_FAULT_FIXTURE_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/rank_process.h"

namespace optstate::faults {

enum class Wire { kShm, kGrpc };

// One job on a daemon of its own, and what it should look like.
//
// Threads: one at a time.
class FaultTest : public testing::Test {
 protected:
  void SetUp() override { seed_ = ScriptSeed(); }
  void TearDown() override;

  void StartDaemon(TestDaemon::Options options = {});
  std::string endpoint() const;
  client::SessionOptions Options(uint32_t rank = 0,
                                 uint32_t world_size = 1) const;
  // Opens a session. Null when that fails, which fails the test.
  std::unique_ptr<client::Session> Open(client::SessionOptions options) const;
  // Starts a rank at endpoint(), unless another is given.
  std::unique_ptr<RankProcess> StartRank(uint32_t rank, uint32_t world_size,
                                         const std::string& at = "") const;

  StepScript Script() const {
    return StepScript(*Layout::Make(layout_), seed_);
  }
  void RunSteps(client::Session& session, uint64_t first, uint64_t last) const;
  // Expects the state after `steps` steps in which nothing happened.
  void ExpectUndisturbed(client::Session& session, uint64_t steps) const;

  // Returns the engine's pid; 0: there is none.
  pid_t engine() const;
  // Takes steps from `first` on, kills the engine while it applies one of them,
  // and returns the last step, which the next engine has finished.
  void KillEngineInsideStep(client::Session& session, uint64_t first,
                            uint64_t* last) const;
  size_t TimesLogged(absl::string_view text) const;

  std::string JobDirectory() const {
    return daemon_->state_dir() + "/jobs/job";
  }

  Wire wire_ = Wire::kShm;
  LayoutSpec layout_ = MixedLayout();  // the layout of every RankProcess
  std::unique_ptr<TestDaemon> daemon_;
  uint64_t seed_ = 0;
};

class WireFaultTest : public FaultTest,
                      public testing::WithParamInterface<Wire> {
 protected:
  void SetUp() override {
    FaultTest::SetUp();
    wire_ = GetParam();
  }
};

std::string WireName(const testing::TestParamInfo<Wire>& wire);

// Returns a layout so large that an engine can be caught inside a step.
LayoutSpec LargeLayout();
// Returns a configuration of one worker, which is inside a step for longer.
std::string OneWorker();

}  // namespace optstate::faults

#endif  // OPTSTATE_TESTS_FAULTS_FAULT_FIXTURE_H_
