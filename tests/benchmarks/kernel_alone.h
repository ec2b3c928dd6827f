#ifndef OPTSTATE_TESTS_BENCHMARKS_KERNEL_ALONE_H_
#define OPTSTATE_TESTS_BENCHMARKS_KERNEL_ALONE_H_

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/update_kernel.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/dtype.h"

namespace optstate {

// The arithmetic of an AdamW step and nothing else: what a step through the
// daemon is measured against. As many threads as an engine has, tile by tile,
// on memory of the kind that an engine's is (memfd, with the pages that the
// system gives it).
//
// Threads: one at a time.
class KernelAlone {
 public:
  static absl::StatusOr<std::unique_ptr<KernelAlone>> Create(DType dtype,
                                                             size_t numel,
                                                             size_t threads);
  ~KernelAlone();

  // Returns the seconds of one update of all elements.
  double Update();
  // Returns the seconds of the sum of squares of the gradient, which a step
  // needs for its norm and for found_inf.
  double SumOfSquares();

 private:
  enum class Work { kUpdate, kSumOfSquares, kEnd };

  KernelAlone(DType dtype, size_t numel, size_t threads);
  double Run(Work work);
  void Serve(size_t thread);
  void UpdateTile(size_t begin, size_t numel);

  const DType dtype_;
  const size_t numel_;
  const size_t threads_;
  const kernels::UpdateKernel* kernel_ = nullptr;
  kernels::UpdateFactors factors_;
  // The arrays: gradient, parameter, master, exp_avg, exp_avg_sq.
  std::vector<shm::SealedSegment> arrays_;
  std::vector<double> sums_;
  Work work_ = Work::kUpdate;
  std::barrier<> barrier_;  // the caller and the threads
  std::vector<std::thread> team_;
};

}  // namespace optstate

#endif  // OPTSTATE_TESTS_BENCHMARKS_KERNEL_ALONE_H_
