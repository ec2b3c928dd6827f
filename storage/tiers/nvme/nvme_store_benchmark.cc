// Measures a pass over a state that does not fit into the frames, against raw
// reads and writes of as many bytes, and against what it computes:
//
//   OPTSTATE_BENCHMARK_FOLDER=/nvme/empty
//     bazel run -c opt //storage/tiers/nvme:nvme_store_benchmark
//
// Two files of the state's size are made in the folder (without one, in that of
// temporary files), and removed. Each iteration makes a pass, and then reads
// and writes the same number of bytes with an engine of the same kind and
// depth, in as many buffers as there are frames: each buffer is read, then
// written, then read again. Counters are GB/s, read and written bytes together,
// medians over the iterations; the ratio of both, median too; and CPU time of
// the process for each GB.
//
// BM_Step does the same for states of several sizes, parts of them in frames,
// and durable passes. Counters: the pass in ms, and in ns an element, which is
// to be the same at each size from a GiB on; the pass beside the larger of raw
// I/O and of what it computes (touching each byte in memory), to be at most
// 1.1; and CPU seconds of the process for each GB. Half of the state in frames
// (share 2) is to be compared with next to none (64), and durable 1 with 0.
// --benchmark_format=json gives all of it to programs. A size for which the
// folder has no room is left out, which is said.
//
// BM_Move moves the records of such states, an eighth of which is in frames, to
// other files of the folder while passes go on, and then makes as many passes
// without a move. Counters, in ms, medians: the longest step with and without a
// move; how long the first step waits for the move to begin, and the last one
// for its switch, which the longest step has in it; and the whole move.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "proto/types/layout.h"
#include "storage/io/benchmark_setup.h"
#include "storage/io/make_io_engine.h"
#include "storage/record_rewrite.h"
#include "storage/tiers/nvme/nvme_store.h"

namespace optstate::nvme {
namespace {

constexpr int kWorkers = 2;
constexpr uint64_t kRecordBytes = kSubGroupElementsDefault * 12;

std::unique_ptr<io::IoEngine> MakeEngine() {
  auto made = io::MakeIoEngine(io::IoEngineKind::kAny, {});
  io::DieUnless(made.ok(), made.status().ToString());
  return std::move(made->engine);
}

// Two states of AdamW and masters of floats, beside parameters of 16 bits: 12
// bytes an element.
Layout MakeLayout(uint64_t records) {
  ParameterSpec parameter;
  parameter.name = "a";
  parameter.numel = static_cast<int64_t>(records * kSubGroupElementsDefault);
  parameter.shape = {parameter.numel};
  parameter.dtype = DType::kBFloat16;
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {parameter};
  auto layout = Layout::Make(std::move(spec));
  io::DieUnless(layout.ok(), layout.status().ToString());
  return *std::move(layout);
}

// Does the least that an update does: reads and writes each byte.
void TouchBytes(absl::Span<std::byte> bytes) {
  auto* const words = reinterpret_cast<uint64_t*>(bytes.data());
  for (size_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) ++words[i];
}

void Touch(const storage::RecordView& record) {
  for (int part = 0; part < storage::kRecordPartCount; ++part) {
    TouchBytes(record.part(part));
  }
}

void RunPass(NvmeStore* store, const std::vector<uint8_t>& wanted,
             bool touches) {
  const auto positions = store->BeginPass(wanted);
  io::DieUnless(positions.ok(), positions.status().ToString());
  std::atomic<size_t> next = 0;
  std::vector<std::thread> workers;
  workers.reserve(kWorkers);
  for (int i = 0; i < kWorkers; ++i) {
    workers.emplace_back([&] {
      for (size_t at = next++; at < *positions; at = next++) {
        const auto pin = store->PinOfPass(at);
        io::DieUnless(pin.ok(), pin.status().ToString());
        if (touches) Touch(pin->record());
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
}

// Reads and writes records of a file until so many bytes have been moved.
void RunRaw(io::IoEngine* engine, io::FileId file, uint64_t records,
            absl::Span<std::byte> memory, uint64_t bytes) {
  std::vector<io::IoRequest> requests(memory.size() / kRecordBytes);
  std::array<io::IoRequest*, 64> completed;
  const uint64_t reads = bytes / (2 * kRecordBytes);
  uint64_t next = 0;
  const auto read = [&](io::IoRequest* request) {
    if (next == reads) return;
    request->kind = io::IoRequest::Kind::kRead;
    request->priority = io::IoPriority::kSwapIn;
    request->offset_bytes = next++ % records * kRecordBytes;
    engine->Submit(request);
  };
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].file = file;
    requests[i].buffer = memory.subspan(i * kRecordBytes, kRecordBytes);
    read(&requests[i]);
  }
  while (engine->in_flight() > 0) {
    const size_t count = engine->Poll(absl::MakeSpan(completed), true);
    for (size_t i = 0; i < count; ++i) {
      io::IoRequest* const request = completed[i];
      io::DieUnless(request->status.ok(), request->status.ToString());
      if (request->kind == io::IoRequest::Kind::kWrite) {
        read(request);
        continue;
      }
      request->kind = io::IoRequest::Kind::kWrite;
      request->priority = io::IoPriority::kSwapOut;
      engine->Submit(request);
    }
  }
}

// Touches each byte of so many records that lie in memory, as a pass does that
// reads and writes nothing.
void RunCompute(uint64_t records, absl::Span<std::byte> memory) {
  const uint64_t places = memory.size() / kRecordBytes;
  std::atomic<uint64_t> next = 0;
  std::vector<std::thread> workers;
  workers.reserve(kWorkers);
  for (int i = 0; i < kWorkers; ++i) {
    workers.emplace_back([&] {
      for (uint64_t at = next++; at < records; at = next++) {
        TouchBytes(memory.subspan(at % places * kRecordBytes, kRecordBytes));
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
}

// A store, and beside it a file and memory for raw requests of as many records
// as it has frames.
class Ground {
 public:
  Ground(uint64_t records, uint64_t frames, bool is_durable)
      : records_(records),
        wanted_(records, 1),
        layout_(MakeLayout(records)),
        sizes_(NvmeStore::SizesOf(
            layout_, 0, {.is_durable = is_durable, .job_bytes = kJob.size()})),
        frame_memory_(frames * kRecordBytes),
        raw_memory_(frames * kRecordBytes),
        table_(sizes_.table),
        next_table_(sizes_.table) {
    io::DieUnless(sizes_.frame == kRecordBytes, "records have another size");
    NvmeStore::Options options;
    options.engine = MakeEngine();
    options.directories = {folder_.path()};
    options.frames = frame_memory_.span();
    options.table = table_.span();
    options.is_durable = is_durable;
    options.job_bytes = kJob.size();
    auto store = NvmeStore::Open(&layout_, 0, {}, std::move(options));
    io::DieUnless(store.ok(), store.status().ToString());
    store_ = *std::move(store);
    engine_ = MakeEngine();
    engine_->RegisterMemory(raw_memory_.span());
    const auto file =
        engine_->Open(folder_.path() + "/raw", records * kRecordBytes,
                      io::IoEngine::OpenMode::kCreate);
    io::DieUnless(file.ok(), file.status().ToString());
    raw_file_ = *file;
  }

  std::string io_engine() const { return store_->swap_state()->io_engine; }
  uint64_t state_bytes() const { return records_ * kRecordBytes; }
  // Returns the bytes that the store has read and written.
  uint64_t moved_bytes() const {
    const storage::SwapCounters counters = store_->swap_state()->counters;
    return counters.bytes_read + counters.bytes_written;
  }
  // Makes a pass, and of a durable store makes it durable.
  void Pass(bool touches) {
    RunPass(store_.get(), wanted_, touches);
    if (!store_->is_durable()) return;
    const absl::Status requested = store_->RequestCommit(++step_, kJob);
    io::DieUnless(requested.ok(), requested.ToString());
    const absl::Status durable = store_->AwaitCommit();
    io::DieUnless(durable.ok(), durable.ToString());
  }
  void Raw(uint64_t bytes) {
    RunRaw(engine_.get(), raw_file_, records_, raw_memory_.span(), bytes);
  }
  void Compute() { RunCompute(records_, raw_memory_.span()); }
  // Makes a pass, and returns how long it took.
  double TimePass() {
    const double began_at = io::WallSeconds();
    Pass(/*touches=*/true);
    return io::WallSeconds() - began_at;
  }

  // In seconds.
  struct MoveTimes {
    double begin = 0;
    double longest_step = 0;
    double switching = 0;
    double whole = 0;
    int passes = 0;
  };
  // Moves the records while passes are made.
  MoveTimes Move() {
    // The store has the other one.
    const io::BenchmarkMemory& table =
        ++arrangement_ % 2 == 0 ? table_ : next_table_;
    std::fill(table.span().begin(), table.span().end(), std::byte{0});
    storage::RewriteTarget target;
    target.layout = &layout_;
    target.arrangement.number = arrangement_;
    target.arrangement.directories = {folder_.path()};
    target.job = std::string(kJob);
    target.job_bytes = kJob.size();
    target.table = table.span();
    MoveTimes times;
    const double began_at = io::WallSeconds();
    const absl::Status begun = store_->BeginMove(target);
    io::DieUnless(begun.ok(), begun.ToString());
    times.begin = io::WallSeconds() - began_at;
    absl::Status copied;
    std::atomic<bool> is_copied = false;
    std::thread copier([&] {
      copied = store_->CopyRecords();
      is_copied = true;
    });
    double step = times.begin + TimePass();
    times.longest_step = step;
    times.passes = 1;
    while (!is_copied) {
      step = TimePass();
      times.longest_step = std::max(times.longest_step, step);
      ++times.passes;
    }
    copier.join();
    io::DieUnless(copied.ok(), copied.ToString());
    const double ended_at = io::WallSeconds();
    const auto moved = store_->FinishMove([] { return absl::OkStatus(); });
    io::DieUnless(moved.ok(), moved.status().ToString());
    times.switching = io::WallSeconds() - ended_at;
    times.whole = io::WallSeconds() - began_at;
    times.longest_step = std::max(times.longest_step, step + times.switching);
    return times;
  }

 private:
  static constexpr absl::string_view kJob = "job";

  const uint64_t records_;
  const std::vector<uint8_t> wanted_;
  const io::BenchmarkFolder folder_;
  const Layout layout_;
  const NvmeStore::Sizes sizes_;
  const io::BenchmarkMemory frame_memory_, raw_memory_, table_, next_table_;
  std::unique_ptr<NvmeStore> store_;
  std::unique_ptr<io::IoEngine> engine_;
  io::FileId raw_file_;
  uint64_t step_ = 0;
  uint32_t arrangement_ = 0;
};

// Arguments: MiB of frames, an eighth of the state; 1: each byte is touched.
void BM_Pass(benchmark::State& state) {
  const uint64_t frames =
      (static_cast<uint64_t>(state.range(0)) << 20) / kRecordBytes;
  Ground ground(8 * frames, frames, /*is_durable=*/false);
  const bool touches = state.range(1) != 0;
  std::vector<double> store_speeds, raw_speeds, ratios;
  std::array<double, 2> cpu_seconds = {};
  double gigabytes = 0;
  // The first passes write blocks that were never written.
  for (int i = 0; i < 2; ++i) {
    ground.Pass(touches);
    ground.Raw(2 * ground.state_bytes());
  }
  for (auto _ : state) {
    const uint64_t before = ground.moved_bytes();
    const std::array<double, 2> first = {io::WallSeconds(), io::CpuSeconds()};
    ground.Pass(touches);
    const std::array<double, 2> second = {io::WallSeconds(), io::CpuSeconds()};
    const uint64_t bytes = ground.moved_bytes() - before;
    ground.Raw(bytes);
    const std::array<double, 2> third = {io::WallSeconds(), io::CpuSeconds()};
    const double size = static_cast<double>(bytes) / 1e9;
    gigabytes += size;
    store_speeds.push_back(size / (second[0] - first[0]));
    raw_speeds.push_back(size / (third[0] - second[0]));
    ratios.push_back(store_speeds.back() / raw_speeds.back());
    cpu_seconds[0] += second[1] - first[1];
    cpu_seconds[1] += third[1] - second[1];
  }
  state.SetLabel(ground.io_engine());
  state.counters["store_GBps"] = io::Median(store_speeds);
  state.counters["raw_GBps"] = io::Median(raw_speeds);
  state.counters["ratio"] = io::Median(ratios);
  state.counters["store_cpu_ms_per_GB"] = 1e3 * cpu_seconds[0] / gigabytes;
  state.counters["raw_cpu_ms_per_GB"] = 1e3 * cpu_seconds[1] / gigabytes;
}
BENCHMARK(BM_Pass)
    ->ArgsProduct({{12, 128}, {0, 1}})
    ->ArgNames({"frames_MiB", "touch"})
    ->Unit(benchmark::kMillisecond)
    ->Iterations(7);

// Returns whether the folder has room for two files of so many bytes, and a
// GiB.
bool HasRoom(uint64_t bytes) {
  const io::BenchmarkFolder folder;
  std::error_code error;
  const auto room = std::filesystem::space(folder.path(), error);
  return !error && room.available >= 2 * bytes + (uint64_t{1} << 30);
}

// Arguments: MiB of state; one part of so many is in frames; 1: each pass is
// made durable, which takes a second slot on disk.
void BM_Step(benchmark::State& state) {
  const uint64_t records =
      (static_cast<uint64_t>(state.range(0)) << 20) / kRecordBytes;
  const uint64_t frames = std::max(
      records / static_cast<uint64_t>(state.range(1)), NvmeStore::kFramesMin);
  const bool is_durable = state.range(2) != 0;
  if (!HasRoom((is_durable ? 2 : 1) * records * kRecordBytes)) {
    state.SkipWithError("left out: the folder has no room for that state");
    return;
  }
  Ground ground(records, frames, is_durable);
  std::vector<double> passes, overlaps, io_over_compute;
  double cpu_seconds = 0;
  double gigabytes = 0;
  for (int i = 0; i < 2; ++i) {
    ground.Pass(/*touches=*/true);
    ground.Raw(2 * ground.state_bytes());
  }
  for (auto _ : state) {
    const uint64_t before = ground.moved_bytes();
    const double cpu_before = io::CpuSeconds();
    const double first = io::WallSeconds();
    ground.Pass(/*touches=*/true);
    const double second = io::WallSeconds();
    cpu_seconds += io::CpuSeconds() - cpu_before;
    const uint64_t bytes = ground.moved_bytes() - before;
    ground.Raw(bytes);
    const double third = io::WallSeconds();
    ground.Compute();
    const double compute = io::WallSeconds() - third;
    passes.push_back(second - first);
    overlaps.push_back((second - first) / std::max(third - second, compute));
    io_over_compute.push_back((third - second) / compute);
    gigabytes += static_cast<double>(bytes) / 1e9;
  }
  const auto elements = static_cast<double>(records * kSubGroupElementsDefault);
  state.SetLabel(ground.io_engine());
  state.counters["pass_ms"] = 1e3 * io::Median(passes);
  state.counters["ns_per_element"] = 1e9 * io::Median(passes) / elements;
  state.counters["overlap"] = io::Median(overlaps);
  state.counters["io_over_compute"] = io::Median(io_over_compute);
  state.counters["cpu_s_per_GB"] = cpu_seconds / gigabytes;
}
BENCHMARK(BM_Step)
    ->Args({48, 8, 0})  // for the brief test
    ->Args({48, 8, 1})  // "
    ->Args({1024, 8, 0})
    ->Args({1024, 2, 0})
    ->Args({1024, 64, 0})
    ->Args({1024, 8, 1})
    ->Args({4096, 64, 0})
    ->Args({16384, 64, 0})
    ->ArgNames({"state_MiB", "share", "durable"})
    ->Unit(benchmark::kMillisecond)
    ->Iterations(5);

// Arguments: MiB of state; 1: each pass is made durable.
void BM_Move(benchmark::State& state) {
  const uint64_t records =
      (static_cast<uint64_t>(state.range(0)) << 20) / kRecordBytes;
  const uint64_t frames = std::max(records / 8, NvmeStore::kFramesMin);
  const bool is_durable = state.range(1) != 0;
  // The records twice, and a file for raw requests.
  if (!HasRoom((is_durable ? 3 : 2) * records * kRecordBytes)) {
    state.SkipWithError("left out: the folder has no room for that state");
    return;
  }
  Ground ground(records, frames, is_durable);
  std::vector<double> with, without, begins, switches, moves;
  for (int i = 0; i < 2; ++i) ground.Pass(/*touches=*/true);
  for (auto _ : state) {
    const Ground::MoveTimes times = ground.Move();
    double longest = 0;
    for (int i = 0; i < times.passes; ++i) {
      longest = std::max(longest, ground.TimePass());
    }
    with.push_back(times.longest_step);
    without.push_back(longest);
    begins.push_back(times.begin);
    switches.push_back(times.switching);
    moves.push_back(times.whole);
  }
  state.SetLabel(ground.io_engine());
  state.counters["longest_step_ms"] = 1e3 * io::Median(with);
  state.counters["longest_step_without_ms"] = 1e3 * io::Median(without);
  state.counters["begin_ms"] = 1e3 * io::Median(begins);
  state.counters["switch_ms"] = 1e3 * io::Median(switches);
  state.counters["move_ms"] = 1e3 * io::Median(moves);
}
BENCHMARK(BM_Move)
    ->Args({48, 0})  // for the brief test
    ->Args({48, 1})  // "
    ->Args({1024, 0})
    ->Args({1024, 1})
    ->ArgNames({"state_MiB", "durable"})
    ->Unit(benchmark::kMillisecond)
    ->Iterations(5);

}  // namespace
}  // namespace optstate::nvme
