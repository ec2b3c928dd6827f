// Recording a span takes no memory, be a trace under way or not.

#include <atomic>
#include <cstdlib>
#include <new>

#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/trace_recorder.h"

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

namespace optstate::observe {
namespace {

// A step, with more spans than a ring has room for.
void Step(TraceRecorder* recorder, TraceSource* source) {
  recorder->BeginStep(1);
  for (size_t i = 0; i < TraceRecorder::kRingSpansMax + 100; ++i) {
    const ScopedSpan span(source, "update", static_cast<uint32_t>(i % 4));
    source->RecordSince(source->Begin(), "push", 4, 64);
  }
  recorder->EndStep();
  recorder->DropStep();
}

int AllocationsOf(TraceRecorder* recorder, TraceSource* source) {
  allocations = 0;
  counting = true;
  Step(recorder, source);
  counting = false;
  return allocations;
}

TEST(TraceAllocationTest, NoneWhileNoTraceIsUnderWay) {
  TraceRecorder recorder;
  TraceSource source(&recorder, [](uint32_t) -> LaneName {
    return {"g", "n"};
  });
  EXPECT_EQ(AllocationsOf(&recorder, &source), 0);
}

TEST(TraceAllocationTest, NoneWhileOneIs) {
  TraceRecorder recorder;
  TraceSource source(&recorder, [](uint32_t) -> LaneName {
    return {"g", "n"};
  });
  ASSERT_TRUE(recorder.Begin(10).ok());
  recorder.Arm();
  EXPECT_EQ(AllocationsOf(&recorder, &source), 0);
  v1::TraceChunk chunk;
  recorder.Take(&chunk);
  EXPECT_GT(chunk.spans_size(), 0);  // it was on
  EXPECT_GT(chunk.lost_spans(), 0u);
  recorder.Disarm();
  recorder.End();
}

}  // namespace
}  // namespace optstate::observe
