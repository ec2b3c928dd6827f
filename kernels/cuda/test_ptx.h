#ifndef OPTSTATE_KERNELS_CUDA_TEST_PTX_H_
#define OPTSTATE_KERNELS_CUDA_TEST_PTX_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/span.h"
#include "kernels/testing/ptx_module.h"

namespace optstate::kernels::cuda {

// Returns a mangled name as it is written in C++, without spaces.
std::string Demangled(const char* name);

// The kernels in a file that nvcc has written, which a test interprets.
class TestPtx {
 public:
  // `path` is one of the test's data. The test fails when the interpreter does
  // not know all that is there.
  explicit TestPtx(const std::string& path);

  // Returns the kernel whose Demangled() name has a part. Null: there is none,
  // and the test fails.
  const kernels::testing::PtxKernel* Find(const std::string& part) const;

 private:
  std::unique_ptr<kernels::testing::PtxModule> module_;
};

// Runs blocks of kBlockThreads threads. An argument is a number or an
// Argument(). false: the kernel is null, or the test has failed.
bool RunPtx(const kernels::testing::PtxKernel* kernel, uint64_t blocks,
            absl::Span<const uint64_t> arguments);

inline uint64_t Argument(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_TEST_PTX_H_
