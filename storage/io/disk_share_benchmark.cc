// Measures how two engines share a disk by weight, and what that costs one that
// is alone:
//
//   OPTSTATE_BENCHMARK_FOLDER=/nvme/empty
//     bazel run -c opt //storage/io:disk_share_benchmark
//
// Each engine has a thread, a file of 192 MiB in the folder (without one, in
// that of temporary files) and 16 records of 3 MiB, which it reads and writes
// in turn. Counters are GB/s, read and written bytes together, and the ratio of
// the first engine's to the second's.

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "storage/io/benchmark_setup.h"
#include "storage/io/disk_share.h"
#include "storage/io/make_io_engine.h"
#include "storage/io/shared_io_engine.h"

namespace optstate::io {
namespace {

constexpr uint64_t kRecordBytes = uint64_t{3} << 20;
constexpr uint64_t kRecords = 64;
constexpr size_t kRequests = 16;
constexpr double kSeconds = 1;

// One engine of a job. `weight` 0: it shares nothing.
class Job {
 public:
  Job(const std::string& folder, const std::string& name, uint32_t weight)
      : memory_(kRequests * kRecordBytes) {
    auto made = MakeIoEngine(IoEngineKind::kAny, {});
    DieUnless(made.ok(), made.status().ToString());
    engine_ = std::move(made->engine);
    if (weight != 0) {
      auto share = DiskShare::Open(folder + "/shares", weight, {});
      DieUnless(share.ok(), share.status().ToString());
      engine_ = ShareIoEngine(std::move(engine_), *std::move(share));
    }
    const auto file =
        engine_->Open(absl::StrCat(folder, "/", name), kRecords * kRecordBytes,
                      IoEngine::OpenMode::kCreate);
    DieUnless(file.ok(), file.status().ToString());
    file_ = *file;
    engine_->RegisterMemory(memory_.span());
    // Blocks that were written are slower once, and read from the disk.
    Run([this] { return submitted_ < kRecords; }, /*writes_only=*/true);
  }

  // Returns the bytes that were read and written while `goes_on`.
  template <typename GoesOn>
  uint64_t Run(const GoesOn& goes_on, bool writes_only = false) {
    submitted_ = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; i < kRequests && goes_on(); ++i) Submit(i, writes_only);
    while (engine_->in_flight() > 0) {
      std::array<IoRequest*, kRequests> completed;
      const size_t count = engine_->Poll(absl::MakeSpan(completed), true);
      for (size_t k = 0; k < count; ++k) {
        DieUnless(completed[k]->status.ok(), completed[k]->status.ToString());
        bytes += kRecordBytes;
        if (goes_on()) {
          Submit(static_cast<size_t>(completed[k] - requests_.data()),
                 writes_only);
        }
      }
    }
    return bytes;
  }

 private:
  void Submit(size_t index, bool writes_only) {
    const uint64_t turn = submitted_++;
    IoRequest& request = requests_[index];
    const bool reads = !writes_only && index % 2 == 0;
    request = {};
    request.kind = reads ? IoRequest::Kind::kRead : IoRequest::Kind::kWrite;
    request.file = file_;
    // Places of its own, so that no two requests overlap.
    request.offset_bytes =
        (turn % (kRecords / kRequests) * kRequests + index) * kRecordBytes;
    if (writes_only) request.offset_bytes = turn % kRecords * kRecordBytes;
    request.buffer = memory_.span().subspan(index * kRecordBytes, kRecordBytes);
    engine_->Submit(&request);
  }

  BenchmarkMemory memory_;
  std::unique_ptr<IoEngine> engine_;
  FileId file_;
  std::array<IoRequest, kRequests> requests_;
  uint64_t submitted_ = 0;
};

void BM_Alone(benchmark::State& state) {
  const BenchmarkFolder folder;
  Job plain(folder.path(), "plain", 0);
  Job shared(folder.path(), "shared", 100);
  std::vector<double> plain_rates;
  std::vector<double> ratios;
  for (auto iteration : state) {
    const auto rate = [](Job& job) {
      const double start = WallSeconds();
      const uint64_t bytes =
          job.Run([&] { return WallSeconds() - start < kSeconds; });
      return static_cast<double>(bytes) / (WallSeconds() - start);
    };
    plain_rates.push_back(rate(plain));
    ratios.push_back(rate(shared) / plain_rates.back());
  }
  state.counters["plain_GB_s"] = Median(plain_rates) / 1e9;
  state.counters["ratio"] = Median(ratios);
}
BENCHMARK(BM_Alone)->Iterations(7)->UseRealTime();

// The arguments are the weights; 0: neither shares.
void BM_Two(benchmark::State& state) {
  const BenchmarkFolder folder;
  std::vector<std::unique_ptr<Job>> jobs;
  for (const int i : {0, 1}) {
    jobs.push_back(std::make_unique<Job>(
        folder.path(), absl::StrCat(i), static_cast<uint32_t>(state.range(i))));
  }
  std::vector<double> ratios;
  std::vector<double> sums;
  for (auto iteration : state) {
    const double start = WallSeconds();
    std::array<uint64_t, 2> bytes = {};
    std::vector<std::thread> threads;
    for (const size_t i : {size_t{0}, size_t{1}}) {
      threads.emplace_back([&, i] {
        bytes[i] =
            jobs[i]->Run([&] { return WallSeconds() - start < kSeconds; });
      });
    }
    for (std::thread& thread : threads) thread.join();
    ratios.push_back(static_cast<double>(bytes[0]) /
                     static_cast<double>(bytes[1]));
    sums.push_back(static_cast<double>(bytes[0] + bytes[1]) /
                   (WallSeconds() - start));
  }
  state.counters["ratio"] = Median(ratios);
  state.counters["both_GB_s"] = Median(sums) / 1e9;
}
BENCHMARK(BM_Two)
    ->Args({0, 0})
    ->Args({100, 100})
    ->Args({200, 100})
    ->Args({300, 100})
    ->Args({700, 100})
    ->Iterations(7)
    ->UseRealTime();

}  // namespace
}  // namespace optstate::io
