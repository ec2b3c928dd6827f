#ifndef OPTSTATE_STORAGE_IO_BENCHMARK_SETUP_H_
#define OPTSTATE_STORAGE_IO_BENCHMARK_SETUP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

// The set-up that the benchmarks of a disk share.

namespace optstate::io {

// Ends the process with this text unless the condition holds.
void DieUnless(bool condition, const std::string& text);

// Returns the middle one of the values, which are not none.
double Median(std::vector<double> values);

double WallSeconds();
// Returns the CPU time of the process.
double CpuSeconds();

// A shared mapping of tmpfs, as that of the state.
class BenchmarkMemory {
 public:
  explicit BenchmarkMemory(uint64_t bytes);
  BenchmarkMemory(const BenchmarkMemory&) = delete;
  BenchmarkMemory& operator=(const BenchmarkMemory&) = delete;
  ~BenchmarkMemory();
  absl::Span<std::byte> span() const {
    return {static_cast<std::byte*>(data_), bytes_};
  }

 private:
  const uint64_t bytes_;
  void* data_;
};

// A new folder in OPTSTATE_BENCHMARK_FOLDER, or in that of temporary files;
// removed at the end.
class BenchmarkFolder {
 public:
  BenchmarkFolder();
  BenchmarkFolder(const BenchmarkFolder&) = delete;
  BenchmarkFolder& operator=(const BenchmarkFolder&) = delete;
  ~BenchmarkFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_BENCHMARK_SETUP_H_
