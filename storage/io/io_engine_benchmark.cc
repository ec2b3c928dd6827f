// Measures raw reads and writes of records, and what an engine costs:
//
//   OPTSTATE_BENCHMARK_FOLDER=/nvme/empty
//     bazel run //storage/io:io_engine_benchmark
//
// A file of 64 records is made in the folder (without one, in that of temporary
// files), and removed. Each iteration reads or writes all of its records in
// random order, in each of these ways in turn, so that a slow moment of the
// disk meets all: io_uring with and without registered buffers, with a
// submission thread (SQPOLL), a ring that polls the disk for completions
// (IOPOLL; no engine has one), the blocking engine, and O_DIRECT pread and
// pwrite on threads of the benchmark, one for each unit of depth. A ring that
// the machine refuses is told once, and has no counters. Counters are GB/s,
// medians over the iterations; the ratio of each way to the plain calls, median
// over the iterations too; and CPU time of the process for each GB.

#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "proto/types/unique_fd.h"
#include "storage/io/benchmark_setup.h"
#include "storage/io/blocking_io_engine.h"
#include "storage/io/io_uring_io_engine.h"

namespace optstate::io {
namespace {

constexpr uint64_t kRecords = 64;

std::string FileIn(const BenchmarkFolder& folder) {
  return folder.path() + "/records";
}

// All records of a file, `depth` at a time, each of these in its own buffer.
struct Pass {
  IoRequest::Kind kind = IoRequest::Kind::kRead;
  uint64_t record_bytes = 0;
  int depth = 0;
  std::vector<uint64_t> offsets;
  absl::Span<std::byte> memory;

  absl::Span<std::byte> Buffer(int index) const {
    return memory.subspan(static_cast<uint64_t>(index) * record_bytes,
                          record_bytes);
  }
};

enum Way {
  kRegistered,
  kUnregistered,
  kSubmissionThread,
  kPolled,
  kBlocking,
  kPlain,
  kWays
};
constexpr const char* kWayNames[kWays] = {"io_uring", "unregistered", "sqpoll",
                                          "iopoll",   "blocking",     "plain"};

std::unique_ptr<IoEngine> MakeEngine(Way way, const Pass& pass) {
  IoEngineOptions options;
  options.queue_depth = pass.depth;
  options.threads = pass.depth;
  options.log = [](const std::string& text) { std::cerr << text << "\n"; };
  if (way == kBlocking) return MakeBlockingIoEngine(options);
  options.submission_thread = way == kSubmissionThread;
  auto engine = MakeIoUringIoEngine(options);
  DieUnless(engine.ok(), engine.status().ToString());
  if (way != kUnregistered) (*engine)->RegisterMemory(pass.memory);
  return *std::move(engine);
}

// A ring that asks the disk for completions instead of waiting for interrupts.
class PolledRing {
 public:
  PolledRing(int fd, const Pass& pass) : fd_(fd), pass_(pass) {
    error_ = io_uring_queue_init(static_cast<unsigned>(pass.depth), &ring_,
                                 IORING_SETUP_IOPOLL);
    is_open_ = error_ == 0;
    iovec memory = {pass.memory.data(), pass.memory.size()};
    if (is_open_) error_ = io_uring_register_buffers(&ring_, &memory, 1);
  }
  ~PolledRing() {
    if (is_open_) io_uring_queue_exit(&ring_);
  }
  PolledRing(const PolledRing&) = delete;
  PolledRing& operator=(const PolledRing&) = delete;

  // Returns 0 or a negative errno, of a ring or of a call that was refused.
  int Run() {
    if (error_ != 0) return error_;
    for (int i = 0; i < pass_.depth; ++i) Prepare(i);
    while (under_way_ > 0) {
      io_uring_submit_and_wait(&ring_, 1);
      io_uring_cqe* entry = nullptr;
      while (io_uring_peek_cqe(&ring_, &entry) == 0) {
        const auto buffer = static_cast<int>(io_uring_cqe_get_data64(entry));
        const int result = entry->res;
        io_uring_cqe_seen(&ring_, entry);
        --under_way_;
        if (result < 0 && error_ == 0) error_ = result;
        if (error_ == 0) Prepare(buffer);
      }
    }
    return error_;
  }

 private:
  void Prepare(int buffer) {
    if (next_ == pass_.offsets.size()) return;
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    const auto bytes = static_cast<unsigned>(pass_.record_bytes);
    std::byte* const data = pass_.Buffer(buffer).data();
    if (pass_.kind == IoRequest::Kind::kRead) {
      io_uring_prep_read_fixed(entry, fd_, data, bytes, pass_.offsets[next_],
                               0);
    } else {
      io_uring_prep_write_fixed(entry, fd_, data, bytes, pass_.offsets[next_],
                                0);
    }
    io_uring_sqe_set_data64(entry, static_cast<uint64_t>(buffer));
    ++next_;
    ++under_way_;
  }

  const int fd_;
  const Pass& pass_;
  io_uring ring_ = {};
  bool is_open_ = false;
  int error_ = 0;
  size_t next_ = 0;
  int under_way_ = 0;
};

void RunEngine(IoEngine& engine, FileId file, const Pass& pass) {
  std::vector<IoRequest> requests(static_cast<size_t>(pass.depth));
  std::vector<IoRequest*> completed(requests.size());
  size_t next = 0;
  const auto submit = [&](IoRequest* request) {
    if (next == pass.offsets.size()) return;
    request->offset_bytes = pass.offsets[next++];
    engine.Submit(request);
  };
  for (int i = 0; i < pass.depth; ++i) {
    requests[i].kind = pass.kind;
    requests[i].file = file;
    requests[i].buffer = pass.Buffer(i);
    submit(&requests[i]);
  }
  while (engine.in_flight() > 0) {
    const size_t count = engine.Poll(absl::MakeSpan(completed), true);
    for (size_t i = 0; i < count; ++i) {
      DieUnless(completed[i]->status.ok(), completed[i]->status.ToString());
      submit(completed[i]);
    }
  }
}

void RunPlain(int fd, const Pass& pass) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(pass.depth));
  for (int thread = 0; thread < pass.depth; ++thread) {
    threads.emplace_back([&pass, fd, thread] {
      const auto buffer = pass.Buffer(thread);
      for (size_t i = static_cast<size_t>(thread); i < pass.offsets.size();
           i += static_cast<size_t>(pass.depth)) {
        const auto offset = static_cast<off_t>(pass.offsets[i]);
        const ssize_t result =
            pass.kind == IoRequest::Kind::kRead
                ? ::pread(fd, buffer.data(), buffer.size(), offset)
                : ::pwrite(fd, buffer.data(), buffer.size(), offset);
        DieUnless(result == static_cast<ssize_t>(buffer.size()),
                  "a plain call failed");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Cost {
  double seconds = 0;  // 0: the machine refuses this way
  double cpu_seconds = 0;
};

// Says it once, and leaves the way out from then on.
bool is_polling_refused = false;
void RefusePolling(int error) {
  std::cerr << "iopoll: " << std::strerror(-error) << "\n";
  is_polling_refused = true;
}

// Opening, and registering memory, happen once a job: they are not measured.
Cost Measure(Way way, const std::string& path, const Pass& pass) {
  Cost cost;
  const auto measure = [&cost](const auto& run) {
    const double wall = WallSeconds();
    const double cpu = CpuSeconds();
    run();
    cost.seconds = WallSeconds() - wall;
    cost.cpu_seconds = CpuSeconds() - cpu;
  };
  if (way == kPlain || way == kPolled) {
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
    DieUnless(fd.ok(), "open with O_DIRECT failed");
    if (way == kPlain) {
      measure([&] { RunPlain(fd.get(), pass); });
      return cost;
    }
    if (is_polling_refused) return cost;
    PolledRing ring(fd.get(), pass);
    int error = 0;
    measure([&] { error = ring.Run(); });
    if (error == 0) return cost;
    RefusePolling(error);
    return {};
  }
  const std::unique_ptr<IoEngine> engine = MakeEngine(way, pass);
  const auto file = engine->Open(path, 0, IoEngine::OpenMode::kOpen);
  DieUnless(file.ok(), file.status().ToString());
  measure([&] { RunEngine(*engine, *file, pass); });
  return cost;
}

Pass MakePass(IoRequest::Kind kind, uint64_t record_bytes, int depth,
              const BenchmarkMemory& memory) {
  Pass pass;
  pass.kind = kind;
  pass.record_bytes = record_bytes;
  pass.depth = depth;
  pass.memory = memory.span();
  for (uint64_t i = 0; i < kRecords; ++i) {
    pass.offsets.push_back(i * record_bytes);
  }
  return pass;
}

void CreateFile(const std::string& path, uint64_t bytes) {
  const auto engine = MakeBlockingIoEngine({});
  const auto file = engine->Open(path, bytes, IoEngine::OpenMode::kCreate);
  DieUnless(file.ok(), file.status().ToString());
}

// Arguments: 0 read or 1 write, MiB of a record, depth.
void BM_Records(benchmark::State& state) {
  const uint64_t record_bytes = static_cast<uint64_t>(state.range(1)) << 20;
  const int depth = static_cast<int>(state.range(2));
  const BenchmarkFolder folder;
  const BenchmarkMemory memory(record_bytes * static_cast<uint64_t>(depth));
  CreateFile(FileIn(folder), kRecords * record_bytes);
  Pass pass = MakePass(IoRequest::Kind::kWrite, record_bytes, depth, memory);
  // Blocks that were never written would be read without the disk.
  Measure(kPlain, FileIn(folder), pass);
  if (state.range(0) == 0) pass.kind = IoRequest::Kind::kRead;

  std::mt19937_64 random(1);
  const double gigabytes = static_cast<double>(kRecords * record_bytes) / 1e9;
  std::array<std::vector<double>, kWays> speeds;
  std::array<std::vector<double>, kWays> ratios;
  std::array<double, kWays> cpu_seconds = {};
  int round = 0;
  for (auto _ : state) {
    std::array<double, kWays> speed;
    for (int turn = 0; turn < kWays; ++turn) {
      const auto way = static_cast<Way>((round + turn) % kWays);
      std::shuffle(pass.offsets.begin(), pass.offsets.end(), random);
      const Cost cost = Measure(way, FileIn(folder), pass);
      speed[way] = cost.seconds == 0 ? 0 : gigabytes / cost.seconds;
      cpu_seconds[way] += cost.cpu_seconds;
    }
    for (int way = 0; way < kWays; ++way) {
      speeds[way].push_back(speed[way]);
      ratios[way].push_back(speed[way] / speed[kPlain]);
    }
    ++round;
  }
  for (int way = 0; way < kWays; ++way) {
    const std::string name = kWayNames[way];
    if (way == kPolled && is_polling_refused) continue;
    state.counters[name + "_GBps"] = Median(speeds[way]);
    if (way != kPlain) state.counters[name + "_ratio"] = Median(ratios[way]);
    state.counters[name + "_cpu_ms_per_GB"] =
        1e3 * cpu_seconds[way] / (gigabytes * round);
  }
}
BENCHMARK(BM_Records)
    ->ArgsProduct({{0, 1}, {1, 4, 12}, {1, 4, 16}})
    ->Unit(benchmark::kMillisecond)
    ->Iterations(7);

// Measures the cost of blocks that are reserved but not written: the file
// system notes each first write in its journal. Arguments: MiB of a record,
// depth.
void BM_FirstWrite(benchmark::State& state) {
  const uint64_t record_bytes = static_cast<uint64_t>(state.range(0)) << 20;
  const int depth = static_cast<int>(state.range(1));
  const BenchmarkMemory memory(record_bytes * static_cast<uint64_t>(depth));
  const Pass pass =
      MakePass(IoRequest::Kind::kWrite, record_bytes, depth, memory);
  const double gigabytes = static_cast<double>(kRecords * record_bytes) / 1e9;
  const auto write_and_sync = [&](const std::string& path) {
    const auto engine = MakeEngine(kRegistered, pass);
    const auto file = engine->Open(path, 0, IoEngine::OpenMode::kOpen);
    DieUnless(file.ok(), file.status().ToString());
    const double begin = WallSeconds();
    RunEngine(*engine, *file, pass);
    IoRequest sync;
    sync.kind = IoRequest::Kind::kSync;
    sync.file = *file;
    engine->Submit(&sync);
    std::array<IoRequest*, 1> completed;
    engine->Poll(absl::MakeSpan(completed), true);
    DieUnless(sync.status.ok(), sync.status.ToString());
    return gigabytes / (WallSeconds() - begin);
  };
  std::vector<double> first;
  std::vector<double> second;
  std::vector<double> ratios;
  for (auto _ : state) {
    const BenchmarkFolder folder;
    CreateFile(FileIn(folder), kRecords * record_bytes);
    first.push_back(write_and_sync(FileIn(folder)));
    second.push_back(write_and_sync(FileIn(folder)));
    ratios.push_back(first.back() / second.back());
  }
  state.counters["first_GBps"] = Median(first);
  state.counters["second_GBps"] = Median(second);
  state.counters["ratio"] = Median(ratios);
}
BENCHMARK(BM_FirstWrite)
    ->ArgsProduct({{1, 12}, {1, 16}})
    ->Unit(benchmark::kMillisecond)
    ->Iterations(7);

}  // namespace
}  // namespace optstate::io
