// Measures a pass over a state of which an eighth fits into the frames, against
// raw reads and writes of as many bytes:
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

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "proto/types/layout.h"
#include "storage/io/benchmark_setup.h"
#include "storage/io/make_io_engine.h"
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
void Touch(const storage::RecordView& record) {
  for (int part = 0; part < storage::kRecordPartCount; ++part) {
    const absl::Span<std::byte> bytes = record.part(part);
    auto* const words = reinterpret_cast<uint64_t*>(bytes.data());
    for (size_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) ++words[i];
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

// Arguments: MiB of frames, an eighth of the state; 1: each byte is touched.
void BM_Pass(benchmark::State& state) {
  const uint64_t frames =
      (static_cast<uint64_t>(state.range(0)) << 20) / kRecordBytes;
  const uint64_t records = 8 * frames;
  const io::BenchmarkFolder folder;
  const Layout layout = MakeLayout(records);
  const NvmeStore::Sizes sizes = NvmeStore::SizesOf(layout, 0, {});
  io::DieUnless(sizes.frame == kRecordBytes, "records have another size");
  const io::BenchmarkMemory frame_memory(frames * kRecordBytes);
  const io::BenchmarkMemory raw_memory(frames * kRecordBytes);
  const io::BenchmarkMemory table(sizes.table);
  NvmeStore::Options options;
  options.engine = MakeEngine();
  options.directories = {folder.path()};
  options.frames = frame_memory.span();
  options.table = table.span();
  const auto store = NvmeStore::Open(&layout, 0, {}, std::move(options));
  io::DieUnless(store.ok(), store.status().ToString());
  const std::unique_ptr<io::IoEngine> engine = MakeEngine();
  engine->RegisterMemory(raw_memory.span());
  const auto file = engine->Open(folder.path() + "/raw", records * kRecordBytes,
                                 io::IoEngine::OpenMode::kCreate);
  io::DieUnless(file.ok(), file.status().ToString());

  const std::vector<uint8_t> wanted(records, 1);
  const bool touches = state.range(1) != 0;
  std::vector<double> store_speeds, raw_speeds, ratios;
  std::array<double, 2> cpu_seconds = {};
  double gigabytes = 0;
  const auto moved = [&] {
    const storage::SwapCounters counters = (*store)->swap_state()->counters;
    return counters.bytes_read + counters.bytes_written;
  };
  // The first passes write blocks that were never written.
  for (int i = 0; i < 2; ++i) {
    RunPass(store->get(), wanted, touches);
    RunRaw(engine.get(), *file, records, raw_memory.span(),
           2 * records * kRecordBytes);
  }
  for (auto _ : state) {
    const uint64_t before = moved();
    const std::array<double, 2> first = {io::WallSeconds(), io::CpuSeconds()};
    RunPass(store->get(), wanted, touches);
    const std::array<double, 2> second = {io::WallSeconds(), io::CpuSeconds()};
    const uint64_t bytes = moved() - before;
    RunRaw(engine.get(), *file, records, raw_memory.span(), bytes);
    const std::array<double, 2> third = {io::WallSeconds(), io::CpuSeconds()};
    const double size = static_cast<double>(bytes) / 1e9;
    gigabytes += size;
    store_speeds.push_back(size / (second[0] - first[0]));
    raw_speeds.push_back(size / (third[0] - second[0]));
    ratios.push_back(store_speeds.back() / raw_speeds.back());
    cpu_seconds[0] += second[1] - first[1];
    cpu_seconds[1] += third[1] - second[1];
  }
  state.SetLabel((*store)->swap_state()->io_engine);
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

}  // namespace
}  // namespace optstate::nvme
