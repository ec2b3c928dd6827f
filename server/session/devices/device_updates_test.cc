#include "server/session/devices/device_updates.h"

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/device_gradients.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/unique_fd.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/gradient_log.h"
#include "server/session/testing/room_fixture.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"
#include "storage/format/control_file.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr uint64_t kBudget = uint64_t{64} << 20;

// A node whose devices fail in one way, whatever is asked of them.
class FailingRuntime final : public accelerator::DeviceRuntime {
 public:
  explicit FailingRuntime(absl::Status failure)
      : failure_(std::move(failure)) {}

  absl::StatusOr<std::vector<accelerator::DeviceInfo>> Devices() override {
    return failure_;
  }
  absl::StatusOr<std::unique_ptr<accelerator::Device>> Open(
      size_t /*index*/) override {
    return failure_;
  }

 private:
  const absl::Status failure_;
};

// A job of which devices update a part; the test registers it.
class DeviceUpdatesTest : public ::testing::Test, protected RoomGround {
 protected:
  DeviceUpdatesTest() { SetDevices("emulated:2"); }

  void SetDevices(const std::string& devices) {
    Job::Options options = JobOptions();
    options.config.set_devices(devices);
    rooms_ = std::make_unique<LowerRooms>(std::move(options));
  }
  void SetFailure(absl::Status failure) {
    SetRuntime(std::make_unique<FailingRuntime>(std::move(failure)));
  }
  void SetRuntime(std::unique_ptr<accelerator::DeviceRuntime> runtime) {
    rooms_.reset();  // before its runtime
    runtime_ = std::move(runtime);
    Job::Options options = JobOptions();
    options.device_runtime = runtime_.get();
    rooms_ = std::make_unique<LowerRooms>(std::move(options));
  }
  static v1::StorageSettings Sharing(double fraction, uint64_t budget = 0) {
    v1::StorageSettings storage;
    storage.set_offload_fraction(fraction);
    storage.set_device_budget_bytes(budget);
    return storage;
  }
  static RegisterSpec SpecOf(const v1::StorageSettings& storage) {
    RegisterSpec spec = TwoRankSpec();
    spec.storage = storage;
    return spec;
  }
  static JobDescription Description(const v1::StorageSettings& storage) {
    return *DescriptionOf(SpecOf(storage));
  }
  void Register(const v1::StorageSettings& storage) {
    const auto registered = rooms_->Register(SpecOf(storage));
    ASSERT_TRUE(registered.ok()) << registered.status();
  }
  JobContext& job() { return rooms_->job_; }
  bool MayLag() { return storage::MayLag(*job().tier->control()); }
  v1::Job Described() {
    v1::Job description;
    DescribeDeviceUpdates(job(), &description);
    return description;
  }

  accelerator::EmulatedFaults faults_;                   // outlive the runtime
  std::unique_ptr<accelerator::DeviceRuntime> runtime_;  // outlives the rooms
  std::unique_ptr<LowerRooms> rooms_;
};

TEST_F(DeviceUpdatesTest, AJobOfTheCpuNeedsNone) {
  SetDevices("none");
  EXPECT_TRUE(CheckDeviceUpdates(Description({}), &job()).ok());
  EXPECT_TRUE(CheckDeviceUpdates(Description(Sharing(1)), &job()).ok());
  ASSERT_NO_FATAL_FAILURE(Register({}));
  EXPECT_FALSE(Described().has_device_updates());
}

TEST_F(DeviceUpdatesTest, WhoAsksInVainIsToldWhatToDo) {
  SetDevices("none");
  const absl::Status refused =
      CheckDeviceUpdates(Description(Sharing(0.5)), &job());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr("offload_fraction: a part of the elements is to "
                              "be updated by a device; leave it out"),
                    HasSubstr("--devices")));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      rooms_->Register(SpecOf(Sharing(0.5))).status()));
}

// A device's error is not taken for an absent daemon, an absent job or a
// mistake of optstate.
TEST_F(DeviceUpdatesTest, AFaultOfTheNodeRefusesTheJobWithItsText) {
  for (const absl::StatusCode code :
       {absl::StatusCode::kUnavailable, absl::StatusCode::kNotFound,
        absl::StatusCode::kInternal, absl::StatusCode::kFailedPrecondition}) {
    SetFailure(absl::Status(code, "the MPS server has gone; start it"));
    const absl::Status refused =
        rooms_->Register(SpecOf(Sharing(0.5))).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(refused.message(),
                AllOf(HasSubstr("leave it out"),
                      HasSubstr("the MPS server has gone; start it")));
    EXPECT_TRUE(job().shape == nullptr) << "nothing is left behind";
    EXPECT_FALSE(job().tier.has_value());
  }
  SetFailure(absl::ResourceExhaustedError("no memory"));
  EXPECT_TRUE(absl::IsResourceExhausted(
      rooms_->Register(SpecOf(Sharing(0.5))).status()));
}

// The node has changed since, so the job goes on by the CPU and says why.
TEST_F(DeviceUpdatesTest, AFaultThatComesLaterIsAProblemAlone) {
  SetFailure(absl::UnavailableError("the MPS server has gone; start it"));
  ASSERT_NO_FATAL_FAILURE(Register({}));
  v1::StorageSettings& storage = job().shape->description.storage;
  storage.set_offload_fraction(0.5);
  const absl::Status failed = ShareUpdates(storage, &job());
  EXPECT_EQ(failed,
            absl::FailedPreconditionError("the MPS server has gone; start it"));
  EXPECT_THAT(Described().device_updates().problem(),
              HasSubstr("the MPS server has gone; start it"));
}

// Returns a layout of one matrix.
Layout LayoutOf(OptimizerKind optimizer) {
  LayoutSpec layout;
  layout.optimizer = optimizer;
  layout.groups.resize(1);
  layout.parameters.push_back({.name = "a", .shape = {3, 5}, .numel = 15});
  return *Layout::Make(std::move(layout));
}

TEST_F(DeviceUpdatesTest, WholeParametersAreSharedAndStay) {
  for (const OptimizerKind optimizer :
       {OptimizerKind::kLamb, OptimizerKind::kAdafactor,
        OptimizerKind::kMuon}) {
    JobDescription description = Description(Sharing(0.5));
    description.layout = LayoutOf(optimizer);
    const absl::Status shared = CheckDeviceUpdates(description, &job());
    EXPECT_TRUE(shared.ok()) << shared;
    const uint64_t bytes = DeviceUpdateBytes(job(), description);
    description = Description(Sharing(0.5, kBudget));
    description.layout = LayoutOf(optimizer);
    const absl::Status stays = CheckDeviceUpdates(description, &job());
    EXPECT_TRUE(stays.ok()) << stays;
    EXPECT_GT(DeviceUpdateBytes(job(), description), bytes);
  }
}

TEST_F(DeviceUpdatesTest, RecordsThatCannotStayOpenNoDevice) {
  JobDescription description = Description(Sharing(0.5, kBudget));
  description.speculative = true;
  const absl::Status refused = CheckDeviceUpdates(description, &job());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("device_budget and speculative"));
  EXPECT_THAT(job().devices.devices(), IsEmpty());
}

TEST_F(DeviceUpdatesTest, OnlyOpenDevicesTakeMemory) {
  const JobDescription shared = Description(Sharing(0.5));
  const JobDescription stays = Description(Sharing(0.5, kBudget));
  EXPECT_EQ(DeviceUpdateBytes(job(), shared), 0u);
  ASSERT_TRUE(CheckDeviceUpdates(shared, &job()).ok());
  EXPECT_EQ(DeviceUpdateBytes(job(), shared),
            scheduler::DeviceUpdateExecutor::HostBytes(2, 0));
  EXPECT_GT(DeviceUpdateBytes(job(), stays), DeviceUpdateBytes(job(), shared));
  EXPECT_EQ(DeviceUpdateBytes(job(), Description({})), 0u);
}

TEST_F(DeviceUpdatesTest, OperatorsSeeTheDevices) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0.25)));
  EXPECT_TRUE(job().device_failure.ok()) << job().device_failure;
  const v1::DeviceUpdates updates = Described().device_updates();
  EXPECT_EQ(updates.offload_fraction(), 0.25);
  EXPECT_EQ(updates.problem(), "");
  EXPECT_EQ(updates.log_bytes(), 0u);
  ASSERT_THAT(updates.devices(), SizeIs(2));
  ASSERT_THAT(updates.uses(), SizeIs(2));
  for (int i = 0; i < 2; ++i) {
    const accelerator::DeviceInfo& info =
        job().devices.devices()[static_cast<size_t>(i)]->info();
    const v1::DeviceUse& use = updates.uses(i);
    EXPECT_EQ(updates.devices(i), info.name);
    EXPECT_EQ(use.name(), info.name);
    EXPECT_EQ(use.index(), static_cast<uint32_t>(i));
    EXPECT_EQ(use.memory_bytes(), info.memory_bytes);
    EXPECT_GT(use.buffers(), 0u);
    EXPECT_GT(use.buffer_bytes(), 0u);
    EXPECT_EQ(use.elements(), 0u);
    EXPECT_EQ(use.resident_elements(), 0u);
    EXPECT_FALSE(use.is_lost());
  }
}

TEST_F(DeviceUpdatesTest, SharesChangeBetweenPasses) {
  ASSERT_NO_FATAL_FAILURE(Register({}));
  EXPECT_THAT(job().devices.devices(), IsEmpty());
  v1::StorageSettings& storage = job().shape->description.storage;
  storage.set_offload_fraction(0);
  ASSERT_TRUE(ShareUpdates(storage, &job()).ok());
  EXPECT_THAT(job().executor->counters().devices, SizeIs(2));
  storage.set_offload_fraction(1);
  ASSERT_TRUE(ShareUpdates(storage, &job()).ok());
  EXPECT_FALSE(Described().has_device_updates());
}

// The bits are the same without devices, so that a job goes on.
TEST_F(DeviceUpdatesTest, DevicesThatAreGoneAreAProblemAlone) {
  SetDevices("none");
  ASSERT_NO_FATAL_FAILURE(Register({}));
  v1::StorageSettings& storage = job().shape->description.storage;
  storage.set_offload_fraction(0.5);
  const absl::Status failed = ShareUpdates(storage, &job());
  EXPECT_TRUE(absl::IsFailedPrecondition(failed)) << failed;
  EXPECT_EQ(job().device_failure, failed);
  const v1::DeviceUpdates updates = Described().device_updates();
  EXPECT_THAT(updates.problem(), StartsWith("FAILED_PRECONDITION"));
  EXPECT_THAT(updates.uses(), IsEmpty());
  storage.set_offload_fraction(1);
  EXPECT_TRUE(ShareUpdates(storage, &job()).ok());
  EXPECT_TRUE(job().device_failure.ok());
}

TEST_F(DeviceUpdatesTest, RecordsStayUntilTheyAreReleased) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0, kBudget)));
  EXPECT_TRUE(MayLag());
  EXPECT_EQ(Described().device_updates().log_bytes(),
            job().tier->gradient_log().size());
  EXPECT_FALSE(job().tier->gradient_log().empty());
  EXPECT_TRUE(ReleaseDevices(&job()).ok());
  EXPECT_FALSE(MayLag());
  EXPECT_TRUE(ReleaseDevices(&job()).ok());  // again
  EXPECT_FALSE(MayLag());
  ASSERT_TRUE(ShareUpdates(job().shape->description.storage, &job()).ok());
  EXPECT_TRUE(MayLag());
  // Without a budget the log's memory is given back, but for an empty log.
  const size_t log_bytes = job().tier->gradient_log().size();
  ASSERT_TRUE(ShareUpdates(Sharing(0), &job()).ok());
  EXPECT_FALSE(MayLag());
  EXPECT_LE(job().tier->gradient_log().size(), log_bytes);
  EXPECT_EQ(scheduler::GradientLog(job().tier->gradient_log()).tiles(), 0u);
}

TEST_F(DeviceUpdatesTest, RanksOnADeviceGetItsParameters) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0, kBudget)));
  EXPECT_EQ(Described().device_updates().uses(1).shared_bytes(), 0u);
  const auto shared = ShareParameters("emulated-1", &job());
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_TRUE(shared->table.ok());
  EXPECT_TRUE(shared->memory.ok());
  EXPECT_EQ(shared->device_index, 1u);
  EXPECT_GT(shared->memory_bytes, 0u);
  const v1::DeviceUpdates updates = Described().device_updates();
  EXPECT_EQ(updates.uses(0).shared_bytes(), 0u);
  EXPECT_GT(updates.uses(1).shared_bytes(), 0u);
  EXPECT_LE(updates.uses(1).shared_bytes(), shared->memory_bytes);
  EXPECT_TRUE(ReleaseDevices(&job()).ok());
  EXPECT_EQ(Described().device_updates().uses(1).shared_bytes(), 0u);
  EXPECT_TRUE(absl::IsNotFound(ShareParameters("emulated-1", &job()).status()))
      << "nothing stays until updates are shared anew";
}

TEST_F(DeviceUpdatesTest, ARankElsewhereIsToldWhy) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0, kBudget)));
  const absl::Status elsewhere = ShareParameters("other", &job()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(elsewhere)) << elsewhere;
  EXPECT_THAT(elsewhere.message(), AllOf(HasSubstr("on device other"),
                                         HasSubstr("emulated-0, emulated-1")));
}

// A rank takes INTERNAL for a mistake of optstate, and UNAVAILABLE for a daemon
// that has gone: a device is neither.
TEST_F(DeviceUpdatesTest, ARankIsToldOfALostDevice) {
  SetRuntime(
      accelerator::MakeEmulatedRuntime({.devices = 2, .faults = &faults_}));
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0, kBudget)));
  accelerator::Device& device = *job().devices.devices()[1];
  const auto memory = device.Allocate(64);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto stream = device.MakeStream();
  ASSERT_TRUE(stream.ok()) << stream.status();
  faults_.LoseAfter(0);
  ASSERT_TRUE((*stream)->CopyOnDevice(*memory, *memory + 32, 32).ok());
  ASSERT_TRUE(absl::IsInternal((*stream)->Wait()));
  const absl::Status refused = ShareParameters("emulated-1", &job()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("lost"));
}

TEST_F(DeviceUpdatesTest, PartsBetweenTilesOfTheCpuAreNotShared) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0.25, kBudget)));
  const absl::Status refused = ShareParameters("emulated-0", &job()).status();
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("offload_fraction=0"));
  EXPECT_EQ(Described().device_updates().uses(0).shared_bytes(), 0u);
}

TEST_F(DeviceUpdatesTest, WithoutABudgetNoParametersAreShared) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0)));
  const absl::Status refused = ShareParameters("emulated-0", &job()).status();
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("device_budget"));
}

// Returns memory of an emulated device, and a table, as a rank offers them.
DeviceGradients OfferOf(uint64_t parameters) {
  const auto runtime = accelerator::MakeEmulatedRuntime({});
  const auto device = *runtime->Open(0);
  auto exported = *device->Export(*device->AllocateShareable(4096));
  const shm::SealedSegment table = *shm::SealedSegment::Create(
      "table", shm::DeviceGradientsBytes(parameters));
  auto* const header =
      reinterpret_cast<shm::DeviceGradientsHeader*>(table.data());
  header->magic = shm::kDeviceGradientsMagic;
  header->version = shm::kDeviceGradientsVersion;
  header->segment_bytes = table.size();
  header->parameter_count = parameters;
  DeviceGradients offer;
  offer.memory = std::move(exported.file);
  offer.memory_bytes = exported.bytes;
  offer.table = UniqueFd(::fcntl(table.fd(), F_DUPFD_CLOEXEC, 0));
  return offer;
}

TEST_F(DeviceUpdatesTest, ARankGivesTheGradientsThatItHasOnADevice) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0, kBudget)));
  const std::byte area[64] = {};
  const scheduler::SharedGradients& gradients = job().executor->gradients();
  const absl::Status taken =
      ShareGradients({1, area, "emulated-1"}, OfferOf(2), &job());
  EXPECT_TRUE(taken.ok()) << taken;
  EXPECT_FALSE(gradients.empty());
  // Live changes of what stays leave the rank's memory alone.
  EXPECT_TRUE(ReleaseDevices(&job()).ok());
  ASSERT_TRUE(ShareUpdates(job().shape->description.storage, &job()).ok());
  EXPECT_FALSE(gradients.empty());
  // It is given up, also by an offer that is refused.
  EXPECT_TRUE(
      ShareGradients({1, area, "emulated-1"}, DeviceGradients(), &job()).ok());
  EXPECT_TRUE(gradients.empty());
  ASSERT_TRUE(ShareGradients({1, area, "emulated-1"}, OfferOf(2), &job()).ok());
  const absl::Status elsewhere =
      ShareGradients({1, area, "other"}, OfferOf(2), &job());
  EXPECT_TRUE(absl::IsFailedPrecondition(elsewhere)) << elsewhere;
  EXPECT_THAT(elsewhere.message(), HasSubstr("on device other"));
  EXPECT_TRUE(gradients.empty());
  const absl::Status wrong =
      ShareGradients({1, area, "emulated-0"}, OfferOf(3), &job());
  EXPECT_TRUE(absl::IsInvalidArgument(wrong)) << wrong;
  EXPECT_THAT(wrong.message(), HasSubstr("3 parameters"));
}

TEST_F(DeviceUpdatesTest, WhereNothingStaysNoGradientsAreTaken) {
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0)));
  const std::byte area[64] = {};
  const absl::Status refused =
      ShareGradients({0, area, "emulated-0"}, OfferOf(2), &job());
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("device_budget"));
}

TEST_F(DeviceUpdatesTest, SumsAreNotOnADevice) {
  RegisterSpec spec = SpecOf(Sharing(0, kBudget));
  spec.accumulate = true;
  const auto registered = rooms_->Register(spec);
  ASSERT_TRUE(registered.ok()) << registered.status();
  const std::byte area[64] = {};
  const absl::Status refused =
      ShareGradients({0, area, "emulated-0"}, OfferOf(2), &job());
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("sums"));
}

// A job without a layout has no executor and no store.
TEST_F(DeviceUpdatesTest, WithoutAJobThereIsNothingToRelease) {
  EXPECT_TRUE(ReleaseDevices(&job()).ok());
  ASSERT_NO_FATAL_FAILURE(Register(Sharing(0, kBudget)));
  EXPECT_TRUE(ReleaseDevices(&job()).ok());
  job().scheduler.reset();  // its user
  MakeExecutor(&job());
  EXPECT_THAT(job().executor->counters().devices, IsEmpty())
      << "the CPU does all until it shares";
}

}  // namespace
}  // namespace optstate::session
