#include "server/scheduler/workers/memory_bandwidth_record.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include "spdlog/spdlog.h"

namespace optstate::scheduler {
namespace {

constexpr std::chrono::milliseconds kPoll{20};

struct Record {
  int workers = 0;
  double bytes_per_s = 0;
};

std::string PathOf(const std::string& state_dir) {
  return state_dir + "/memory_bandwidth";
}

Record Read(const std::string& state_dir) {
  Record record;
  std::ifstream(PathOf(state_dir)) >> record.workers >> record.bytes_per_s;
  return record.bytes_per_s > 0 ? record : Record();
}

// Writes the record whole or not at all: an engine may be reading.
void Write(const std::string& state_dir, const Record& record) {
  const std::string path = PathOf(state_dir);
  const std::string unfinished = path + ".tmp";
  std::ofstream(unfinished)
      << record.workers << " " << std::fixed << record.bytes_per_s << "\n";
  if (std::rename(unfinished.c_str(), path.c_str()) != 0) {
    spdlog::warn("{} could not be written", path);
  }
}

}  // namespace

double RecordedMemoryBandwidth(const std::string& state_dir) {
  return Read(state_dir).bytes_per_s;
}

MemoryBandwidthReader::MemoryBandwidthReader(const std::string& state_dir)
    : state_dir_(state_dir) {}

double MemoryBandwidthReader::bytes_per_s() {
  struct stat info;
  if (::stat(PathOf(state_dir_).c_str(), &info) != 0) return 0;
  const auto inode = static_cast<uint64_t>(info.st_ino);
  const int64_t written_at_ns =
      int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (inode != inode_ || written_at_ns != written_at_ns_) {
    bytes_per_s_ = RecordedMemoryBandwidth(state_dir_);
    inode_ = inode;
    written_at_ns_ = written_at_ns;
  }
  return bytes_per_s_;
}

MemoryBandwidthMeter::MemoryBandwidthMeter(const std::string& state_dir,
                                           int workers, Measure measure,
                                           std::chrono::milliseconds delay) {
  if (Read(state_dir).workers == workers) return;
  thread_ = std::thread(
      [this, state_dir, workers, delay, measure = std::move(measure)] {
        AwaitStart(delay);
        const double bytes_per_s = stop_ ? 0 : measure(workers, stop_);
        if (bytes_per_s <= 0) return;
        spdlog::info("memory bandwidth of {} workers: {:.1f} GB/s", workers,
                     bytes_per_s / 1e9);
        Write(state_dir, {workers, bytes_per_s});
      });
}

void MemoryBandwidthMeter::AwaitStart(std::chrono::milliseconds delay) const {
  const auto end = std::chrono::steady_clock::now() + delay;
  while (!stop_.load(std::memory_order_relaxed) &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::min(delay, kPoll));
  }
}

MemoryBandwidthMeter::~MemoryBandwidthMeter() {
  stop_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
}

}  // namespace optstate::scheduler
