#include "kernels/testing/ptx_block.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::kernels::testing {

PtxBlock::PtxBlock(const PtxKernel* kernel, uint32_t threads,
                   absl::Span<const uint64_t> arguments)
    : shared_(kernel->shared_bytes) {
  threads_.reserve(threads);
  for (uint32_t thread = 0; thread < threads; ++thread) {
    threads_.emplace_back(kernel, thread, arguments, shared_.data());
  }
}

absl::Status PtxBlock::Run(uint32_t number) {
  // Shared memory has no defined values at first.
  constexpr std::byte kGarbage{0xa5};
  std::fill(shared_.begin(), shared_.end(), kGarbage);
  for (PtxThread& thread : threads_) thread.Begin(number);
  // The order of threads between two barriers is any.
  const bool is_up = number % 2 == 0;
  bool is_over = threads_.empty();
  while (!is_over) {
    for (size_t k = 0; k < threads_.size(); ++k) {
      PtxThread& thread = threads_[is_up ? k : threads_.size() - 1 - k];
      thread.Run();
      OPTSTATE_RETURN_IF_ERROR(thread.failure());
    }
    OPTSTATE_RETURN_IF_ERROR(CheckBarrier());
    is_over = threads_.front().barrier() == nullptr;
  }
  return absl::OkStatus();
}

absl::Status PtxBlock::CheckBarrier() const {
  const PtxInstruction* barrier = nullptr;
  for (const PtxThread& thread : threads_) {
    if (barrier == nullptr) barrier = thread.barrier();
  }
  if (barrier == nullptr) return absl::OkStatus();
  for (size_t k = 0; k < threads_.size(); ++k) {
    const PtxInstruction* const its = threads_[k].barrier();
    if (its == barrier) continue;
    const std::string what =
        its == nullptr ? "has ended" : absl::StrCat("waits at ", NameOf(*its));
    return absl::InternalError(absl::StrCat(NameOf(*barrier), " (thread ", k,
                                            "): the thread does not reach "
                                            "this barrier, it ",
                                            what));
  }
  return absl::OkStatus();
}

}  // namespace optstate::kernels::testing
