#include "server/scheduler/passes/state_clearing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/scheduler/scheduler_test_job.h"

namespace optstate::scheduler {
namespace {

// Calls visit(bytes) for all state of a parameter.
template <typename Visitor>
void ForEachArray(SchedulerTestJob* job, uint32_t p, const Visitor& visit) {
  for (uint64_t begin = 0; begin < job->plan().numel(p);) {
    const storage::RecordView record = job->RecordOf(p, begin);
    const uint64_t end =
        std::min(job->plan().numel(p),
                 record.sub_group().end - job->layout().flat_offset(p));
    record.ForEachMasterPart(p, begin, end - begin, visit);
    if (!job->layout().optimizer_info().has_prefixes()) {
      record.ForEachStatePart(
          p, begin, end - begin,
          [&](int /*part*/, absl::Span<std::byte> bytes) { visit(bytes); });
    } else {
      for (int k = 0; k < kStateArraysMax; ++k) {
        if (record.state(k, p, begin) == nullptr) continue;
        const uint64_t elements =
            StateElements(job->layout().optimizer_info(), k,
                          job->layout().parameters()[p].shape);
        visit(absl::MakeSpan(record.state(k, p, 0), elements * sizeof(float)));
      }
    }
    begin = end;
  }
}

TEST(StateClearingTest, ClearsFromAParameterOn) {
  for (const SchedulerTestJob::Setup& setup :
       {SchedulerTestJob::Setup{},
        SchedulerTestJob::Setup{.state = StateFormat::kDynamic8,
        .master = MasterFormat::kSplit},
        SchedulerTestJob::Setup{.optimizer = OptimizerKind::kNadam},
        SchedulerTestJob::Setup{.optimizer = OptimizerKind::kAdafactor}}) {
    SchedulerTestJob job(setup);
    const auto count = static_cast<uint32_t>(job.layout().parameters().size());
    for (uint32_t p = 0; p < count; ++p) {
      ForEachArray(&job, p, [](absl::Span<std::byte> bytes) {
        std::memset(bytes.data(), 0x11, bytes.size());
      });
      job.step_counts()[p] = 5;
      if (!job.store().scalars().empty()) job.store().scalars()[p] = 5;
    }
    constexpr uint32_t kFirst = 3;
    ASSERT_TRUE(ClearState(job.plan(), job.memory(), &job.pool(), kFirst).ok());
    for (uint32_t p = 0; p < count; ++p) {
      const std::byte expected{p < kFirst ? uint8_t{0x11} : uint8_t{0}};
      ForEachArray(&job, p, [&](absl::Span<std::byte> bytes) {
        for (const std::byte byte : bytes) ASSERT_EQ(byte, expected) << p;
      });
      EXPECT_EQ(job.step_counts()[p], p < kFirst ? 5 : 0);
      if (!job.store().scalars().empty()) {
        EXPECT_EQ(job.store().scalars()[p], p < kFirst ? 5 : 0);
      }
    }
  }
}

}  // namespace
}  // namespace optstate::scheduler
