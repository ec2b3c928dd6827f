// The speed of devices: of an update where everything is on the device, beside
// a copy of as many bytes there; of copies in batches, beside one large pinned
// copy each way; and of updates that the CPU shares with devices, beside the
// CPU alone. Both sides take turns. --devices=cuda|emulated; exits with 77,
// saying why, where there is no such device.

#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/index_range.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/accelerator/cuda_runtime.h"
#include "storage/accelerator/emulated_runtime.h"
#include "storage/accelerator/emulated_stream.h"
#include "tests/benchmarks/median.h"
#include "tests/gpu/host_records.h"

#ifdef OPTSTATE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace optstate {
namespace {

using accelerator::DeviceAddress;
using accelerator::DeviceStream;
using kernels::cuda::TileTask;

// Launches that are waited for together.
constexpr int kRepeats = 8;

// The device that all benchmarks use.
struct Used {
  std::unique_ptr<accelerator::DeviceRuntime> runtime;
  std::unique_ptr<accelerator::Device> device;
  const scheduler::DeviceKernels* kernels = nullptr;
  bool is_cuda = false;
};
Used used;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T Take(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}

double SecondsOf(absl::FunctionRef<void()> work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

// Memory of the device, and as much pinned on the host.
class Buffers {
 public:
  explicit Buffers(size_t bytes) : bytes_(bytes) {
    void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) Check(absl::ResourceExhaustedError("mmap"));
    host_ = static_cast<std::byte*>(pages);
    std::memset(host_, 0, bytes);
    Check(used.device->RegisterHost(absl::MakeSpan(host_, bytes)));
    device_ = Take(used.device->Allocate(bytes));
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    used.device->Free(device_);
    used.device->UnregisterHost(host_);
    ::munmap(host_, bytes_);
  }
  std::byte* host() const { return host_; }
  DeviceAddress device() const { return device_; }

 private:
  const size_t bytes_;
  std::byte* host_;
  DeviceAddress device_;
};

struct CopyArguments {
  uint64_t to, from;
  size_t bytes;
};

absl::Status EmulatedCopy(const accelerator::EmulatedMemory& memory,
                          const void* arguments) {
  const auto& copy = *static_cast<const CopyArguments*>(arguments);
  const auto at = [&](uint64_t address) {
    return memory.Find(reinterpret_cast<std::byte*>(address), copy.bytes);
  };
  std::memcpy(at(copy.to), at(copy.from), copy.bytes);
  return absl::OkStatus();
}

void CopyOnDevice(DeviceAddress to, DeviceAddress from, size_t bytes,
                  DeviceStream* stream) {
  if (!used.is_cuda) {
    const CopyArguments arguments = {to.value, from.value, bytes};
    Check(static_cast<accelerator::EmulatedStream*>(stream->native_handle())
              ->Launch(EmulatedCopy, &arguments, sizeof(arguments)));
    return;
  }
#ifdef OPTSTATE_HAS_CUDA
  const cudaError_t error =
      cudaMemcpyAsync(to.ForKernel<void>(), from.ForKernel<void>(), bytes,
                      cudaMemcpyDeviceToDevice,
                      static_cast<cudaStream_t>(stream->native_handle()));
  if (error != cudaSuccess) {
    Check(accelerator::StatusOfCuda(error, "cudaMemcpyAsync"));
  }
#endif
}

// AdamW of elements whose arrays are all on the device, one behind the other.
class ResidentUpdate {
 public:
  ResidentUpdate(const kernels::UpdateKernelKey& key, size_t numel)
      : key_(key), numel_(numel) {
    const bool is_own_master = key.parameter == DType::kFloat32;
    const size_t state_bytes = numel * SizeInBytes(key.state);
    const size_t parameter_bytes = numel * SizeInBytes(key.parameter);
    const size_t master_bytes = is_own_master ? 0 : numel * sizeof(float);
    gradient_bytes_ = numel * SizeInBytes(key.gradient);
    written_bytes_ = parameter_bytes + master_bytes + 2 * state_bytes;
    memory_ = Take(used.device->Allocate(gradient_bytes_ + written_bytes_));
    stream_ = Take(used.device->MakeStream());
    DeviceAddress next = memory_ + gradient_bytes_;
    const auto take = [&next](size_t bytes) {
      const DeviceAddress taken = next;
      next = next + bytes;
      return taken.ForKernel<void>();
    };
    kernels::TileView view;
    view.parameter = take(parameter_bytes);
    view.master = is_own_master ? view.parameter : take(master_bytes);
    view.state[0] = take(state_bytes);
    view.state[1] = take(state_bytes);
    MakeTables(view);
  }
  ~ResidentUpdate() {
    stream_.reset();
    used.device->Free(memory_);
  }
  ResidentUpdate(const ResidentUpdate&) = delete;
  ResidentUpdate& operator=(const ResidentUpdate&) = delete;

  // Read and written by an update.
  size_t bytes() const {
    return gradient_bytes_ + 2 * written_bytes_ -
           // A parameter that is not its own master is written alone.
           (key_.parameter == DType::kFloat32
                ? 0
                : numel_ * SizeInBytes(key_.parameter));
  }
  void Update() {
    Check(used.kernels->Update(key_.optimizer, key_.options, tables_->device(),
                               count_, tables_->device() + factors_offset_,
                               stream_.get()));
  }
  // Copies the first half of bytes() to behind it, as far as there is room.
  void Copy() {
    const size_t half = (gradient_bytes_ + written_bytes_) / 2;
    size_t left = bytes() / 2;
    while (left > 0) {
      const size_t part = left < half ? left : half;
      CopyOnDevice(memory_ + half, memory_, part, stream_.get());
      left -= part;
    }
  }
  void Wait() { Check(stream_->Wait()); }

 private:
  void MakeTables(const kernels::TileView& view) {
    count_ =
        static_cast<uint32_t>((numel_ + kTileElements - 1) / kTileElements);
    factors_offset_ = count_ * sizeof(TileTask);
    const size_t gradients_offset =
        factors_offset_ + sizeof(kernels::UpdateFactors) + 64;
    tables_ = std::make_unique<Buffers>(gradients_offset + 64);
    auto* const gradient = reinterpret_cast<const void**>(
        tables_->host() + gradients_offset / 64 * 64);
    *gradient = memory_.ForKernel<void>();
    kernels::UpdateInput input;
    input.hyperparams = DefaultHyperparams(key_.optimizer);
    const kernels::UpdateFactors factors =
        Take(kernels::FindUpdateKernel(key_))->prepare(input);
    std::memcpy(tables_->host() + factors_offset_, &factors, sizeof(factors));
    const auto table_address = tables_->device() + gradients_offset / 64 * 64;
    for (uint32_t i = 0; i < count_; ++i) {
      const size_t begin = i * kTileElements;
      kernels::TileView tile = view;
      tile.gradients = {table_address.ForKernel<const void*>(), 1};
      tile.numel = std::min(kTileElements, numel_ - begin);
      const auto advance = [&](void* array, size_t bytes) -> void* {
        return static_cast<std::byte*>(array) + begin * bytes;
      };
      tile.parameter = advance(view.parameter, SizeInBytes(key_.parameter));
      tile.master = advance(view.master, sizeof(float));
      for (int k = 0; k < 2; ++k) {
        tile.state[k] = advance(view.state[k], SizeInBytes(key_.state));
      }
      tile.flat_begin = begin;
      TileTask task = kernels::cuda::TileTaskOf(key_, factors, tile, 0);
      task.tile.gradient.begin = begin;
      std::memcpy(tables_->host() + i * sizeof(TileTask), &task, sizeof(task));
    }
    Check(stream_->CopyToDevice(tables_->device(), tables_->host(),
                                gradients_offset + 64));
    // Zeros, so that nothing is NaN.
    constexpr size_t kZeroBytes = size_t{4} << 20;
    const Buffers zeros(kZeroBytes);
    const size_t all = gradient_bytes_ + written_bytes_;
    for (size_t at = 0; at < all; at += kZeroBytes) {
      Check(stream_->CopyToDevice(memory_ + at, zeros.host(),
                                  std::min(kZeroBytes, all - at)));
    }
    Wait();
  }

  const kernels::UpdateKernelKey key_;
  const size_t numel_;
  size_t gradient_bytes_ = 0;
  size_t written_bytes_ = 0;
  uint32_t count_ = 0;
  size_t factors_offset_ = 0;
  DeviceAddress memory_;
  std::unique_ptr<DeviceStream> stream_;
  std::unique_ptr<Buffers> tables_;
};

// The ratio is that of the copy's time to the update's: 1 is the memory's
// limit.
void BM_Update(benchmark::State& state, const kernels::UpdateKernelKey& key,
               size_t numel) {
  ResidentUpdate update(key, numel);
  std::vector<double> updates, copies;
  for (auto _ : state) {
    updates.push_back(SecondsOf([&] {
      for (int i = 0; i < kRepeats; ++i) update.Update();
      update.Wait();
    }));
    copies.push_back(SecondsOf([&] {
      for (int i = 0; i < kRepeats; ++i) update.Copy();
      update.Wait();
    }));
  }
  const double bytes = static_cast<double>(update.bytes()) * kRepeats;
  state.counters["GB_per_s"] = bytes / Median(updates) / 1e9;
  state.counters["copy_GB_per_s"] = bytes / Median(copies) / 1e9;
  state.counters["ratio"] = Median(copies) / Median(updates);
}

enum class Way : uint8_t { kToDevice, kToHost, kBoth };

// Batches on two streams, as the executor's are, beside one large copy each
// way.
void BM_Copies(benchmark::State& state, size_t bytes, Way way) {
  constexpr size_t kBatch = scheduler::DeviceUpdateExecutor::kBatchBytes;
  const size_t batch = std::min(kBatch, bytes / 4);
  const Buffers buffers(bytes);
  std::unique_ptr<DeviceStream> streams[2];
  for (auto& stream : streams) stream = Take(used.device->MakeStream());
  const auto copy = [&](DeviceStream* stream, size_t at, size_t size) {
    if (way != Way::kToHost) {
      Check(stream->CopyToDevice(buffers.device() + at, buffers.host() + at,
                                 size));
    }
    if (way != Way::kToDevice) {
      Check(
          stream->CopyToHost(buffers.host() + at, buffers.device() + at, size));
    }
  };
  std::vector<double> at_once, batches;
  for (auto _ : state) {
    at_once.push_back(SecondsOf([&] {
      copy(streams[0].get(), 0, bytes);
      Check(streams[0]->Wait());
    }));
    batches.push_back(SecondsOf([&] {
      size_t i = 0;
      for (size_t at = 0; at + batch <= bytes; at += batch) {
        copy(streams[i++ % 2].get(), at, batch);
      }
      for (auto& stream : streams) Check(stream->Wait());
    }));
  }
  const double gigabytes =
      static_cast<double>(bytes) * (way == Way::kBoth ? 2 : 1) / 1e9;
  state.counters["batches_GB_per_s"] = gigabytes / Median(batches);
  state.counters["copy_GB_per_s"] = gigabytes / Median(at_once);
  state.counters["ratio"] = Median(at_once) / Median(batches);
}

// The ratio is that of the time of the CPU alone to that of both.
void BM_Hybrid(benchmark::State& state, double cpu_fraction, size_t records) {
  const int workers =
      std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  scheduler::WorkerPool pool(workers, /*spin=*/false);
  std::vector<scheduler::WorkerUndo> undo(static_cast<size_t>(workers));
  HostRecords tasks(DType::kFloat32, records);
  scheduler::DeviceUpdateExecutor executor({.pool = &pool,
                                            .undo = absl::MakeSpan(undo),
                                            .flat_elements = tasks.numel()});
  scheduler::CpuUpdateExecutor cpu(&pool, absl::MakeSpan(undo),
                                   /*observer=*/nullptr);
  accelerator::Device* const devices[] = {used.device.get()};
  Check(executor.Share(cpu_fraction, OptimizerKind::kAdamW, devices,
                       used.kernels));
  const scheduler::IndexRange all = {0, tasks.positions(), tasks.positions()};
  std::vector<double> both, alone;
  for (auto _ : state) {
    both.push_back(SecondsOf([&] { Check(executor.Update(all, &tasks)); }));
    alone.push_back(SecondsOf([&] { Check(cpu.Update(all, &tasks)); }));
  }
  Check(executor.counters().failure);
  state.counters["million_elements_per_s"] =
      static_cast<double>(tasks.numel()) / Median(both) / 1e6;
  state.counters["workers"] = workers;
  state.counters["ratio"] = Median(alone) / Median(both);
}

// Updates of records that stay on the device, in bfloat16 with masters. What a
// trainer's passes leave time for is done between two steps, and not timed. The
// ratio is that of the time of the CPU alone.
void BM_Resident(benchmark::State& state, double cpu_fraction, size_t records) {
  const int workers =
      std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  scheduler::WorkerPool pool(workers, /*spin=*/false);
  std::vector<scheduler::WorkerUndo> undo(static_cast<size_t>(workers));
  scheduler::CpuUpdateExecutor cpu(&pool, absl::MakeSpan(undo),
                                   /*observer=*/nullptr);
  HostRecords tasks(DType::kBFloat16, records);
  const uint64_t tiles = tasks.numel() / kTileElements;
  const scheduler::GradientLog::Room room = {
      .tiles = tiles,
      .step_bytes =
          tiles * scheduler::GradientLog::EntryBytes(2 * kTileElements)};
  const Pages log(scheduler::GradientLog::BytesNeeded(room));
  scheduler::DeviceUpdateExecutor executor({.pool = &pool,
                                            .undo = absl::MakeSpan(undo),
                                            .flat_elements = tasks.numel(),
                                            .records_max = 256});
  scheduler::DeviceUpdateExecutor::Residents residents;
  residents.device_bytes = tasks.numel() * 3 * sizeof(float);
  residents.host.parameters = tasks.parameters();
  residents.host.log = log.all();
  residents.host.room = room;
  accelerator::Device* const devices[] = {used.device.get()};
  Check(executor.Share(cpu_fraction, OptimizerKind::kAdamW, devices,
                       used.kernels, residents));
  const scheduler::IndexRange all = {0, tasks.positions(), tasks.positions()};
  const auto step = [&] {
    tasks.NextStep();
    Check(executor.Update(all, &tasks));
  };
  step();  // copies the records to their places
  std::vector<double> both, ahead;
  for (auto _ : state) {
    ahead.push_back(SecondsOf([&] {
      pool.ParallelFor(tasks.positions(), [&](size_t position) {
        const SubGroup sub_group = tasks.SubGroupOf(position);
        if (!executor.IsDue(sub_group)) return;
        executor.lag()->MakeCurrent(tasks.RecordOf(&sub_group),
                                    /*is_written=*/false);
      });
    }));
    both.push_back(SecondsOf(step));
  }
  Check(executor.counters().failure);
  for (size_t i = 0; i < tasks.positions(); ++i) {
    const SubGroup sub_group = tasks.SubGroupOf(i);
    executor.lag()->MakeCurrent(tasks.RecordOf(&sub_group),
                                /*is_written=*/true);
  }
  executor.Release();
  std::vector<double> alone;
  for (int i = 0; i < 5; ++i) {
    tasks.NextStep();
    alone.push_back(SecondsOf([&] { Check(cpu.Update(all, &tasks)); }));
  }
  state.counters["ahead_ms"] = Median(ahead) * 1e3;
  state.counters["alone_ms"] = Median(alone) * 1e3;
  state.counters["million_elements_per_s"] =
      static_cast<double>(tasks.numel()) / Median(both) / 1e6;
  state.counters["ratio"] = Median(alone) / Median(both);
}

void RegisterAll() {
  // An emulated device shows that the program runs, not how fast.
  const size_t numel = used.is_cuda ? size_t{64} << 20 : size_t{1} << 18;
  const auto add = [](const std::string& name, auto function, auto... args) {
    benchmark::RegisterBenchmark(name.c_str(), function, args...)
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond);
  };
  kernels::UpdateKernelKey key;
  add("Update/AdamW/float32", BM_Update, key, numel);
  key.parameter = key.gradient = DType::kBFloat16;
  add("Update/AdamW/bfloat16", BM_Update, key, numel);
  key.state = StateFormat::kBFloat16;
  add("Update/AdamW/bfloat16_state", BM_Update, key, numel);
  const size_t copied = used.is_cuda ? size_t{256} << 20 : size_t{1} << 22;
  add("Copies", BM_Copies, copied, Way::kBoth);
  add("CopiesToDevice", BM_Copies, copied, Way::kToDevice);
  add("CopiesToHost", BM_Copies, copied, Way::kToHost);
  for (const int percent : {0, 25, 50, 75}) {
    add(absl::StrCat("Hybrid/cpu_percent:", percent), BM_Hybrid,
        percent / 100.0, used.is_cuda ? size_t{256} : size_t{2});
  }
  for (const int percent : {0, 50}) {
    add(absl::StrCat("Resident/cpu_percent:", percent), BM_Resident,
        percent / 100.0, used.is_cuda ? size_t{1024} : size_t{2});
  }
}

// Opens the device; returns why there is none.
std::string Open(const std::string& devices) {
  used.is_cuda = devices == "cuda";
  used.runtime = used.is_cuda ? accelerator::MakeCudaRuntime()
                              : accelerator::MakeEmulatedRuntime({});
  used.kernels =
      used.is_cuda ? scheduler::CudaKernels() : scheduler::EmulatedKernels();
  const auto found = used.runtime->Devices();
  if (!found.ok()) return found.status().ToString();
  if (found->empty()) return "this machine has no such device";
  used.device = Take(used.runtime->Open(0));
  benchmark::AddCustomContext("device", used.device->info().name);
  return "";
}

}  // namespace
}  // namespace optstate

int main(int argc, char** argv) {
  constexpr char kFlag[] = "--devices=";
  std::string devices = "cuda";
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], kFlag, std::strlen(kFlag)) == 0) {
      devices = argv[i] + std::strlen(kFlag);
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  if (devices != "cuda" && devices != "emulated") {
    std::fprintf(stderr, "--devices is cuda or emulated\n");
    return 2;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  constexpr int kSkipped = 77;
  if (const std::string why = optstate::Open(devices); !why.empty()) {
    std::printf("skipped: %s\n", why.c_str());
    return kSkipped;
  }
  optstate::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  optstate::used.device.reset();
  return 0;
}
