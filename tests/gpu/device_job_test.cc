// A job on a real daemon whose updates are shared with devices: the bits of a
// job that the CPU updates, whatever the share, while it changes live, and when
// its engine is killed. With a GPU's devices it skips where there is none.

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/random_layout.h"
#include "storage/accelerator/cuda_runtime.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using client::Session;

// Returns why there is no GPU; empty: there is.
std::string WhyNoCuda() {
  const auto devices = accelerator::MakeCudaRuntime()->Devices();
  if (!devices.ok()) return devices.status().ToString();
  return devices->empty() ? "this machine has no device of CUDA" : "";
}

struct Devices {
  const char* name;
  const char* setting;  // of --devices
};

// Returns the layout with another optimizer, and no options; Muon takes only
// matrices.
LayoutSpec With(OptimizerKind optimizer, LayoutSpec layout) {
  layout.optimizer = optimizer;
  for (GroupSpec& group : layout.groups) group.options = 0;
  if (optimizer != OptimizerKind::kMuon) return layout;
  for (ParameterSpec& parameter : layout.parameters) {
    parameter.shape = {parameter.numel % 40 + 1, parameter.numel % 50 + 2};
    parameter.numel = parameter.shape[0] * parameter.shape[1];
  }
  return layout;
}

// Returns a random layout of this optimizer, with any options and formats.
LayoutSpec NextLayout(const OptimizerInfo& info, RandomLayouts* layouts) {
  LayoutSpec layout = With(info.kind, layouts->Next(12));
  const uint32_t options_max = (1u << info.options.size()) - 1;
  for (GroupSpec& group : layout.groups) {
    group.options = static_cast<uint32_t>(layouts->Uniform(0, options_max));
  }
  layout.state_format = static_cast<StateFormat>(layouts->Uniform(1, 3));
  layout.master_format = static_cast<MasterFormat>(layouts->Uniform(1, 2));
  if (layout.master_format != MasterFormat::kSplit) return layout;
  for (ParameterSpec& parameter : layout.parameters) {
    // There are no halves of a float16 parameter's master.
    if (parameter.dtype == DType::kFloat16) parameter.dtype = DType::kBFloat16;
  }
  return layout;
}

class DeviceJobTest : public testing::TestWithParam<Devices> {
 protected:
  void SetUp() override {
    if (std::string(GetParam().setting) == "cuda") {
      if (const std::string why = WhyNoCuda(); !why.empty()) {
        GTEST_SKIP() << why;
      }
    }
    TestDaemon::Options options;
    options.flags = {"--devices", GetParam().setting};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }

  // A change is made before a step of a job.
  struct Change {
    double fraction = -1;  // offload_fraction; negative: it stays
    bool is_engine_killed = false;
    const char* budget = "";  // device_budget; empty: it stays
  };

  // Takes a step for each change, and returns what is to be seen at the end.
  // `devices_did` is set to the elements that devices have updated since the
  // last engine began.
  absl::StatusOr<StateSnapshot> Run(const LayoutSpec& layout, uint64_t seed,
                                    const std::vector<Change>& changes,
                                    uint64_t* devices_did) {
    client::SessionOptions options = NewJob(layout);
    options.endpoint = daemon_->shm_endpoint();
    auto session = Session::Open(options);
    if (!session.ok()) return session.status();
    const StepScript script((*session)->layout(), seed);
    absl::Status status = script.Load(**session);
    for (size_t k = 0; k < changes.size() && status.ok(); ++k) {
      if (changes[k].fraction >= 0) {
        Set(options.job, changes[k]);
      }
      if (changes[k].is_engine_killed) {
        EXPECT_TRUE(daemon_->KillEngine(options.job).ok());
      }
      status = script.Run(**session, k + 1).status();
    }
    if (!status.ok()) return status;
    const auto job = daemon_->GetJob(options.job);
    if (!job.ok()) return job.status();
    EXPECT_EQ(job->device_updates().problem(), "");
    *devices_did = job->device_updates().device_elements();
    return Snapshot(**session);
  }

  // Changes the fraction, and perhaps the budget, as an operator does.
  void Set(const std::string& job, const Change& change) const {
    const std::string budget = change.budget;
    const std::string command = absl::StrCat(
        "client/ctl/optctl --endpoint ", daemon_->shm_endpoint(), " set job ",
        job, " offload_fraction=", change.fraction,
        budget.empty() ? "" : " device_budget=", budget, " > /dev/null");
    // The names are the test's own.
    EXPECT_EQ(std::system(command.c_str()), 0) << command;  // NOLINT
  }

  // Returns what devices have updated, as Run() does.
  uint64_t ExpectBitsOfTheCpu(const LayoutSpec& layout, uint64_t seed,
                              const std::vector<Change>& changes) {
    uint64_t by_devices = 0;
    const auto expected =
        Run(layout, seed, std::vector<Change>(changes.size()), &by_devices);
    EXPECT_EQ(by_devices, 0u);
    const auto shared = Run(layout, seed, changes, &by_devices);
    for (const auto& one : {expected, shared}) {
      EXPECT_TRUE(one.ok()) << one.status();
      if (!one.ok()) return 0;
    }
    EXPECT_EQ(FirstDifference(*shared, *expected), "");
    return by_devices;
  }

  std::unique_ptr<TestDaemon> daemon_;
};

TEST_P(DeviceJobTest, EveryFractionGivesTheBitsOfTheCpu) {
  const uint64_t seed = ScriptSeed();
  for (const double fraction : {0.0, 0.3, 1.0}) {
    for (const LayoutSpec& layout : {UniformLayout(4, 50'001), MixedLayout()}) {
      const uint64_t by_devices = ExpectBitsOfTheCpu(
          layout, seed, std::vector<Change>(4, {.fraction = fraction}));
      EXPECT_EQ(by_devices > 0, fraction < 1) << fraction;
    }
  }
}

TEST_P(DeviceJobTest, TheFractionChangesLiveAndTheEngineIsKilled) {
  const uint64_t by_devices =
      ExpectBitsOfTheCpu(UniformLayout(4, 50'001), ScriptSeed(),
                         {{.fraction = 0},
                          {.fraction = 0.3},
                          {.is_engine_killed = true},
                          {.fraction = 1},
                          {},
                          {.fraction = 0.7, .is_engine_killed = true},
                          {.fraction = 0}});
  EXPECT_GT(by_devices, 0u);
}

TEST_P(DeviceJobTest, RecordsThatStayHaveTheBitsOfTheCpu) {
  const uint64_t seed = ScriptSeed();
  // LAMB needs whole parameters, of which not all have copies within 1 MiB.
  const LayoutSpec lamb = With(OptimizerKind::kLamb, UniformLayout(4, 50'001));
  for (const char* budget : {"1MiB", "1GiB"}) {
    for (const LayoutSpec& layout :
         {UniformLayout(4, 50'001), MixedLayout(), lamb}) {
      ExpectBitsOfTheCpu(layout, seed,
                         {{.fraction = 0.3, .budget = budget},
                          {},
                          {},
                          {.is_engine_killed = true},
                          {},
                          {},
                          {},
                          {},
                          {.is_engine_killed = true},
                          {.fraction = 0},
                          {},
                          {.fraction = 0, .budget = "0"},
                          {}});
    }
  }
}

TEST_P(DeviceJobTest, RandomLayoutsGiveTheBitsOfTheCpu) {
  RandomLayouts layouts;
  for (const OptimizerInfo& info : Optimizers()) {
    SCOPED_TRACE(info.name);
    const LayoutSpec layout = NextLayout(info, &layouts);
    ExpectBitsOfTheCpu(layout, layouts.Uniform(0, 1 << 30),
                       {{.fraction = 0.3}, {}, {.fraction = 0}});
    ExpectBitsOfTheCpu(layout, layouts.Uniform(0, 1 << 30),
                       {{.fraction = 0.3, .budget = "64MiB"},
                        {},
                        {.is_engine_killed = true},
                        {},
                        {.fraction = 0}});
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceJobTest,
                         testing::Values(Devices{"Emulated", "emulated:2"},
                                         Devices{"Cuda", "cuda"}),
                         [](const auto& tested) {
                           return std::string(tested.param.name);
                         });

}  // namespace
}  // namespace optstate
