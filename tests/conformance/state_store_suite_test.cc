// Runs the suite over every store.

#include "tests/conformance/state_store_suite.h"

#include <stdlib.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/testing/evicting_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate {
namespace {

class HostWorld final : public StateStoreWorld {
 public:
  explicit HostWorld(const Setup& setup)
      : setup_(setup), memory_(*setup.layout) {
    HostWorld::Reopen();
  }
  storage::StateStore& store() override { return *store_; }
  void Reopen() override {
    store_ = std::make_unique<storage::HostStore>(
        setup_.layout, setup_.sub_group_elements, memory_.arrays());
  }

 private:
  const Setup setup_;
  StateMemory memory_;
  std::unique_ptr<storage::HostStore> store_;
};

class EvictingWorld final : public StateStoreWorld {
 public:
  explicit EvictingWorld(const Setup& setup)
      : setup_(setup),
        memory_(*setup.layout),
        folder_(testing::TempDir() + "/evicting_store_XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
    EvictingWorld::Reopen();
  }
  ~EvictingWorld() override {
    store_ = nullptr;
    std::filesystem::remove_all(folder_);
  }
  storage::StateStore& store() override { return *store_; }
  uint64_t evictions() const { return store_->evictions(); }
  void Reopen() override {
    store_ = nullptr;
    store_ = *storage::EvictingStore::Open(
        setup_.layout, setup_.sub_group_elements, memory_.arrays(),
        {.path = folder_ + "/frames",
         .incarnation = 1,
         .seed = setup_.seed + opened_++});
  }

 private:
  const Setup setup_;
  StateMemory memory_;
  std::string folder_;
  uint64_t opened_ = 0;
  std::unique_ptr<storage::EvictingStore> store_;
};

// Records with parameters or without, in a file or on a device.
template <bool kHoldsParameters, bool kOnDevice>
class NvmeWorld final : public StateStoreWorld {
 public:
  explicit NvmeWorld(const Setup& setup)
      : disk_(io::SimulatedDiskOptions{
            .seed = setup.seed, .latency_us_max = 100, .folders = {"/disk"}}) {
    nvme::NvmeTestJob::Setup job;
    job.layout = *setup.layout;
    job.sub_group_elements = setup.sub_group_elements;
    job.is_durable = false;
    job.holds_parameters = kHoldsParameters;
    job.make_engine = [this] { return io::MakeSimulatedIoEngine(&disk_); };
    if (kOnDevice) job.device = "/disk/device";
    job_ = std::make_unique<nvme::NvmeTestJob>(std::move(job));
    if (kOnDevice && !job_->MakeDevice().ok()) std::abort();
    NvmeWorld::Reopen();
  }
  storage::StateStore& store() override { return job_->store(); }
  void Reopen() override {
    job_->Close();
    if (!job_->Open().ok()) std::abort();
  }

 private:
  io::SimulatedDisk disk_;
  std::unique_ptr<nvme::NvmeTestJob> job_;
};

// Tests on this store prove nothing unless it evicts.
TEST(EvictingWorldTest, RecordsAreEvicted) {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {{.name = "a", .shape = {20000}, .numel = 20000}};
  const auto layout = Layout::Make(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EvictingWorld world(
      {.layout = &*layout, .sub_group_elements = kTileElements, .seed = 1});
  for (int pin = 0; pin < 1000; ++pin) {
    ASSERT_TRUE(
        world.store().PinSubGroup(0, storage::StateStore::Access::kRead).ok());
  }
  EXPECT_GT(world.evictions(), 0u);
}

template <typename World>
std::unique_ptr<StateStoreWorld> Make(const StateStoreWorld::Setup& setup) {
  return std::make_unique<World>(setup);
}

INSTANTIATE_TEST_SUITE_P(
    Stores, StateStoreSuite,
    testing::Values(StateStoreWorldParam{"host", Make<HostWorld>},
                    StateStoreWorldParam{"evicting", Make<EvictingWorld>},
                    StateStoreWorldParam{"nvme", Make<NvmeWorld<false, false>>},
                    StateStoreWorldParam{"nvme_with_parameters",
                                         Make<NvmeWorld<true, false>>},
                    StateStoreWorldParam{"nvme_device",
                                         Make<NvmeWorld<false, true>>}),
    StateStoreWorldName);

}  // namespace
}  // namespace optstate
