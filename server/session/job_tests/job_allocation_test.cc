// Push and Commit allocate nothing once ranks are attached.

#include <atomic>
#include <cstdlib>
#include <new>

#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/quiet_rank.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};

void* Allocate(std::size_t bytes) {
  if (counting) ++allocations;
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes); }
void* operator new[](std::size_t bytes) { return Allocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return Allocate(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return Allocate(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace optstate::session {
namespace {

void RunSteps(bool accumulate,
              v1::DurabilityKind durability = v1::DURABILITY_KIND_UNSPECIFIED,
              v1::Placement placement = v1::PLACEMENT_HOST) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}, {.options = adam::kAmsgrad}};
  setup.layout.parameters = {
      MakeParameter("a", 60000),
      MakeParameter("b", 90000, 1, DType::kBFloat16, DType::kFloat16)};
  setup.accumulate = accumulate;
  setup.storage.set_durability(durability);
  setup.storage.set_placement(placement);
  if (placement == v1::PLACEMENT_NVME) {
    // Three of 37 records are in memory.
    setup.subgroup_elements = 4096;
    setup.storage.set_host_budget_bytes(3 * 4096 * 20);
  }
  QuietRank rank(setup);
  allocations = 0;
  counting = true;
  for (int i = 0; i < 5; ++i) rank.Step();
  counting = false;
  EXPECT_EQ(allocations, 0);
  EXPECT_TRUE(rank.ok());
}

TEST(JobAllocationTest, Plain) { RunSteps(false); }
TEST(JobAllocationTest, Accumulating) { RunSteps(true); }
TEST(JobAllocationTest, Durable) { RunSteps(false, v1::DURABILITY_KIND_STEP); }
TEST(JobAllocationTest, Swapped) {
  RunSteps(false, v1::DURABILITY_KIND_NONE, v1::PLACEMENT_NVME);
}
TEST(JobAllocationTest, SwappedAndDurable) {
  RunSteps(false, v1::DURABILITY_KIND_STEP, v1::PLACEMENT_NVME);
}

}  // namespace
}  // namespace optstate::session
