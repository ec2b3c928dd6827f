#ifndef OPTSTATE_SERVER_SESSION_TESTING_ROOM_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_ROOM_FIXTURE_H_

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/session/job_context.h"
#include "server/session/job_durability.h"
#include "server/session/job_registrar.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/state_lock.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_state.h"

namespace optstate {

// The rooms at the bottom of a job that was just registered, with real files in
// a scratch directory, for tests of the room above them. Time stands still
// unless the test moves it. The fixture is the only thread that knows the job,
// so tests take its lock only where the room waits.
class RoomFixture : public ::testing::Test {
 protected:
  static RegisterSpec TwoRanks() {
    LayoutSpec layout;
    layout.groups.resize(2);
    for (uint32_t group = 0; group < 2; ++group) {
      ParameterSpec parameter;
      parameter.name = group == 0 ? "a" : "b";
      parameter.shape = {3};
      parameter.numel = 3;
      parameter.group = group;
      layout.parameters.push_back(parameter);
    }
    RegisterSpec spec;
    spec.layout = *Layout::Make(layout);
    spec.world_size = 2;
    spec.local_world_size = 2;
    spec.host_id = "host";
    return spec;
  }

  explicit RoomFixture(const RegisterSpec& spec = TwoRanks())
      : job_(OptionsOf(this)),
        ranks_(&job_),
        durability_(&job_),
        state_lock_(&job_),
        decider_(&job_, &ranks_, &step_),
        speculator_(&job_, &ranks_, &step_, &decider_),
        registrar_({.job = &job_,
                    .ranks = &ranks_,
                    .step = &step_,
                    .decider = &decider_,
                    .speculator = &speculator_,
                    .load = &load_,
                    .durability = &durability_,
                    .state_lock = &state_lock_}) {
    const absl::Status registered =
        registrar_.Register(spec, *DescriptionOf(spec)).status();
    EXPECT_TRUE(registered.ok()) << registered;
  }
  ~RoomFixture() override {
    std::error_code ignored;
    std::filesystem::remove_all(job_.options.directory, ignored);
  }

  absl::Time now_ = absl::UnixEpoch();
  JobContext job_;
  RankRoster ranks_;
  StepState step_;
  LoadState load_;
  JobDurability durability_;
  StateLock state_lock_;
  StepDecider decider_;
  Speculator speculator_;
  JobRegistrar registrar_;

 private:
  static Job::Options OptionsOf(RoomFixture* self) {
    std::string directory = ::testing::TempDir() + "/optstate-room-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    Job::Options options;
    options.name = "test";
    options.directory = std::move(directory);
    options.config.mutable_engine()->set_workers(1);
    options.clock = [self] { return self->now_; };
    return options;
  }
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_TESTING_ROOM_FIXTURE_H_
