#include "server/scheduler/passes/gradient_norms.h"

#include <algorithm>
#include <cmath>

#include "proto/types/runs.h"

namespace optstate::scheduler {

GradientNorms::GradientNorms(const StepPlan* plan, const StepMemory* memory,
                             UpdateExecutor* executor)
    : plan_(*plan),
      executor_(*executor),
      addresses_(plan, memory->store),
      sums_of_squares_(plan->layout().run_count(), 0),
      others_(plan->layout().run_count(), 0) {}

double GradientNorms::SumOfRuns(absl::Span<const double> by_run,
                                uint32_t parameter) const {
  double sum = 0;
  for (uint64_t run = plan_.layout().first_run(parameter);
       run < plan_.layout().first_run(parameter + 1); ++run) {
    sum += by_run[run];
  }
  return sum;
}

double GradientNorms::LargestOfRuns(uint32_t parameter) const {
  double largest = 0;
  for (uint64_t run = plan_.layout().first_run(parameter);
       run < plan_.layout().first_run(parameter + 1); ++run) {
    largest = std::max(largest, others_[run]);
  }
  return largest;
}

double GradientNorms::SumOfSquares(absl::Span<const uint8_t> updated,
                                   absl::Span<double> by_group) const {
  std::fill(by_group.begin(), by_group.end(), 0);
  double sum = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] == 0) continue;
    const double of_parameter = SumOfRuns(sums_of_squares_, p);
    sum += of_parameter;
    by_group[plan_.layout().parameters()[p].group] += of_parameter;
  }
  return sum;
}

void GradientNorms::NormsByParameter(absl::Span<const uint8_t> updated,
                                     absl::Span<double> norms) const {
  for (uint32_t p = 0; p < updated.size(); ++p) {
    norms[p] = updated[p] == 0 ? 0 : std::sqrt(SumOfRuns(sums_of_squares_, p));
  }
}

double GradientNorms::Norm(double type, const StepUpdate& update) {
  const absl::Span<const uint8_t> updated = update.updated;
  const bool largest = type != 1;
  executor_.Reduce(
      {0, updated.size(), updated.size()},
      [&](size_t i, absl::FunctionRef<void(const ReduceTask&)> visit) {
        const auto p = static_cast<uint32_t>(i);
        if (updated[p] == 0) return;
        GradientAddresses::Buffer buffer;
        ReduceTask task;
        task.gradient_dtype = plan_.sum_dtype(p);
        task.reduction = largest ? kernels::Reduction::kLargestAbsolute
                                 : kernels::Reduction::kSumOfAbsolutes;
        for (const PieceTable::Entry& piece : plan_.OwnersOf(p)) {
          ForEachRun(plan_.layout(), p, piece.begin, piece.end,
                     [&](uint64_t run, uint64_t begin, uint64_t numel) {
                       task.run = run;
                       task.numel = numel;
                       task.result = &others_[run];
                       task.gradients = addresses_.OfUpdate(p, piece, begin,
                                                            update, &buffer);
                       visit(task);
                     });
        }
      });
  double norm = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] == 0) continue;
    if (largest) {
      norm = std::max(norm, LargestOfRuns(p));
    } else {
      norm += SumOfRuns(others_, p);
    }
  }
  return norm;
}

}  // namespace optstate::scheduler
