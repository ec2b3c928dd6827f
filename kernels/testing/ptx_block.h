#ifndef OPTSTATE_KERNELS_TESTING_PTX_BLOCK_H_
#define OPTSTATE_KERNELS_TESTING_PTX_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/testing/ptx_module.h"
#include "kernels/testing/ptx_thread.h"

namespace optstate::kernels::testing {

// The threads of a block and the memory that they share. One object runs the
// blocks of a launch, one after the other. Registers are not cleared between
// them: PTX gives them no first value, and a launch has many blocks.
class PtxBlock {
 public:
  PtxBlock(const PtxKernel* kernel, uint32_t threads,
           absl::Span<const uint64_t> arguments);
  PtxBlock(const PtxBlock&) = delete;
  PtxBlock& operator=(const PtxBlock&) = delete;

  // Runs the block of this number from its beginning to its end. Errors are
  // those of PtxModule::Run.
  absl::Status Run(uint32_t number);

 private:
  // Returns OK when all threads wait at one barrier, or none waits; otherwise
  // an error that names the barrier and a thread that does not reach it. They
  // must wait at one instruction: the PTX ISA lets threads meet at two barriers
  // with one number, but to CUDA that is undefined, and a device would go on as
  // if nothing were wrong.
  absl::Status CheckBarrier() const;

  std::vector<std::byte> shared_;
  std::vector<PtxThread> threads_;
};

}  // namespace optstate::kernels::testing

#endif  // OPTSTATE_KERNELS_TESTING_PTX_BLOCK_H_
