#ifndef OPTSTATE_SERVER_SESSION_TESTING_ROOM_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_ROOM_FIXTURE_H_

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/session/durability/job_durability.h"
#include "server/session/job_context.h"
#include "server/session/job_registrar.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/state_lock.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_state.h"

namespace optstate::session {

// The surroundings of a test's job: a scratch directory, which is removed at
// the end, and a clock that stops unless the test moves it.
class RoomGround {
 protected:
  RoomGround() {
    std::string directory = ::testing::TempDir() + "/optstate-room-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = std::move(directory);
  }
  ~RoomGround() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  Job::Options JobOptions() {
    Job::Options options;
    options.name = "test";
    options.directory = directory_;
    options.config.mutable_engine()->set_workers(1);
    options.config.set_devices("emulated:2");  // for jobs that ask for them
    options.clock = [this] { return now_; };
    return options;
  }

  std::string directory_;
  absl::Time now_ = absl::UnixEpoch();
};

// The rooms at the bottom of a job, with real files. Destroying them keeps the
// files, as the end of an engine does.
class LowerRooms {
 public:
  explicit LowerRooms(Job::Options options)
      : job_(std::move(options)),
        ranks_(&job_),
        step_(&job_),
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
                    .state_lock = &state_lock_}) {}

  absl::StatusOr<RegisterResult> Register(const RegisterSpec& spec) {
    return registrar_.Register(spec, *DescriptionOf(spec));
  }
  // Says that every parameter has a valid state, as a load does.
  void MakeReady() {
    storage::StepRecord record = job_.record();
    record.load_required_from = job_.parameter_count();
    storage::PublishRecord(record, job_.tier->control());
  }

  JobContext job_;
  RankRoster ranks_;
  StepState step_;
  LoadState load_;
  JobDurability durability_;
  StateLock state_lock_;
  StepDecider decider_;
  Speculator speculator_;
  JobRegistrar registrar_;
};

// The registration of a job whose ranks have a parameter of three elements
// each, "a" in group 0 and "b" in group 1.
inline RegisterSpec TwoRankSpec() {
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

// A test of a room above `Rooms`. The fixture is the only thread that knows the
// job, so tests take its lock only where the room waits.
template <class Rooms>
class RoomTest : public ::testing::Test, protected RoomGround, protected Rooms {
 protected:
  static RegisterSpec TwoRanks() { return TwoRankSpec(); }

  // Registers the job; nullopt: the test does.
  explicit RoomTest(const std::optional<RegisterSpec>& spec = TwoRankSpec())
      : Rooms(JobOptions()) {
    if (!spec.has_value()) return;
    const absl::Status registered = this->Register(*spec).status();
    EXPECT_TRUE(registered.ok()) << registered;
  }
};

using RoomFixture = RoomTest<LowerRooms>;

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_ROOM_FIXTURE_H_
