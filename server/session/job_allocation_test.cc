// Push and Commit allocate nothing once ranks are attached.

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "gtest/gtest.h"
#include "server/session/job_harness.h"

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

namespace optstate {
namespace {

class QuietListener final : public SessionListener {
 public:
  void OnStepDone(uint64_t, const absl::Status& status,
                  const StepOutcome& outcome) override {
    if (status.ok() && outcome.applied) ++applied_;
  }
  int applied() const { return applied_; }

 private:
  int applied_ = 0;
};

void RunSteps(bool accumulate) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}, {.options = adam::kAmsgrad}};
  setup.layout.parameters = {
      MakeParameter("a", 60000),
      MakeParameter("b", 90000, 1, DType::kBFloat16, DType::kFloat16)};
  setup.accumulate = accumulate;
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  harness.Detach(0);
  QuietListener listener;
  std::vector<std::byte> area(1 << 20);
  AttachSpec attach;
  attach.layout_hash = harness.layout().hash();
  attach.gradient_area = area.data();
  attach.gradient_area_bytes = area.size();
  attach.listener = &listener;
  ASSERT_TRUE(harness.job().Attach(attach).ok());
  const std::vector<Hyperparams> groups(2, AdamHyperparams());
  CommitSpec spec;
  spec.groups = groups;
  spec.max_norm = 1;
  allocations = 0;
  counting = true;
  for (uint64_t step = 1; step <= 5; ++step) {
    spec.step = step;
    const absl::Status first = harness.job().Push(0, step, 0, 0, 1);
    const absl::Status second = harness.job().Push(0, step, 0, 1, 1);
    if (!first.ok() || !second.ok()) break;
    if (accumulate && !harness.job().Push(0, step, 1, 0, 2).ok()) break;
    harness.job().Commit(0, step, spec);
  }
  counting = false;
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(listener.applied(), 5);
}

TEST(JobAllocationTest, Plain) { RunSteps(false); }
TEST(JobAllocationTest, Accumulating) { RunSteps(true); }

}  // namespace
}  // namespace optstate
