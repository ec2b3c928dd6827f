#include "storage/io/benchmark_setup.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "proto/types/unique_fd.h"

namespace optstate::io {

void DieUnless(bool condition, const std::string& text) {
  if (condition) return;
  std::cerr << text << std::endl;
  std::abort();
}

double Median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double WallSeconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double CpuSeconds() {
  struct rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) +
           1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

BenchmarkMemory::BenchmarkMemory(uint64_t bytes) : bytes_(bytes) {
  const UniqueFd fd(::memfd_create("benchmark", MFD_CLOEXEC));
  DieUnless(fd.ok() && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0,
            "memfd_create failed");
  data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  DieUnless(data_ != MAP_FAILED, "mmap failed");
}

BenchmarkMemory::~BenchmarkMemory() { ::munmap(data_, bytes_); }

BenchmarkFolder::BenchmarkFolder() {
  const char* given = std::getenv("OPTSTATE_BENCHMARK_FOLDER");
  path_ = given != nullptr ? std::string(given)
                           : std::filesystem::temp_directory_path().string();
  path_ += "/benchmark_XXXXXX";
  DieUnless(::mkdtemp(path_.data()) != nullptr, "mkdtemp failed: " + path_);
}

BenchmarkFolder::~BenchmarkFolder() { std::filesystem::remove_all(path_); }

}  // namespace optstate::io
