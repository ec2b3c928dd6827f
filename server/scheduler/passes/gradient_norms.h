#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_GRADIENT_NORMS_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_GRADIENT_NORMS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_addresses.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"

namespace optstate::scheduler {

// The norms of a step's gradients. One number for each run is reduced in two
// levels: over the runs of each parameter, in their order, then over parameters
// in theirs, so that the sums of parameters alone give the same bits.
//
// Threads: one caller at a time.
class GradientNorms {
 public:
  // The arguments must outlive this object.
  GradientNorms(const StepPlan* plan, const StepMemory* memory,
                UpdateExecutor* executor);

  // Returns the sums of squares by run, which staging writes.
  absl::Span<double> sums_of_squares() {
    return absl::MakeSpan(sums_of_squares_);
  }

  // Returns the sum of squares of what was staged for the parameters with
  // updated != 0, and writes that of each group to `by_group`.
  double SumOfSquares(absl::Span<const uint8_t> updated,
                      absl::Span<double> by_group) const;
  // Returns the sum of squares of what was staged for one parameter.
  double SumOfSquaresOf(uint32_t parameter) const {
    return SumOfRuns(sums_of_squares_, parameter);
  }
  // Writes the norm of each parameter, 0 with updated == 0.
  void NormsByParameter(absl::Span<const uint8_t> updated,
                        absl::Span<double> norms) const;
  // Returns the L1 norm (type 1) or the largest absolute value (infinity) of
  // the same gradients, which are read once more.
  double Norm(double type, const StepUpdate& update);

 private:
  // Sums one value per run over the runs of a parameter, in order.
  double SumOfRuns(absl::Span<const double> by_run, uint32_t parameter) const;
  double LargestOfRuns(uint32_t parameter) const;

  const StepPlan& plan_;
  UpdateExecutor& executor_;
  const GradientAddresses addresses_;
  std::vector<double> sums_of_squares_;  // by run
  std::vector<double> others_;           // by run, of another norm
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_GRADIENT_NORMS_H_
