#include "storage/io/disk_bandwidth.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "storage/io/request_rules.h"

namespace optstate::io {
namespace {

constexpr char kFileName[] = "/.bandwidth";
// The part of the free bytes that a measurement may take.
constexpr uint64_t kLeftDivisor = 8;

// Each request goes over places of its own, so that no two overlap.
constexpr uint64_t kRoundsMin = 2;

enum class Mix : uint8_t { kRead, kWrite, kBoth };

// Returns the bytes of the file: a whole number of rounds of all requests.
absl::StatusOr<uint64_t> FileBytes(const std::string& directory,
                                   uint64_t round_bytes, uint64_t bytes_max) {
  struct statvfs info;
  if (::statvfs(directory.c_str(), &info) != 0) {
    return IoError(errno, absl::StrCat("statvfs of ", directory), directory);
  }
  const uint64_t left = uint64_t{info.f_bavail} * info.f_frsize;
  const uint64_t rounds = std::max(
      std::min(bytes_max, left / kLeftDivisor) / round_bytes, kRoundsMin);
  if (rounds * round_bytes <= left / kLeftDivisor) return rounds * round_bytes;
  return absl::ResourceExhaustedError(absl::StrCat(
      directory, ": measuring its disk takes a file of ", rounds * round_bytes,
      " bytes for a moment and leaves seven times as much free; its file "
      "system has ",
      left, " left"));
}

// The requests that are under way in turn over the file.
class Requests {
 public:
  Requests(IoEngine* engine, FileId file, uint64_t begin_bytes,
           uint64_t request_bytes, uint32_t requests)
      : engine_(*engine),
        file_(file),
        begin_bytes_(begin_bytes),
        request_bytes_(request_bytes),
        memory_bytes_(requests * request_bytes),
        memory_(static_cast<std::byte*>(
                    std::aligned_alloc(kSectorBytes, memory_bytes_)),
                &std::free),
        requests_(requests),
        done_(requests, 0) {
    // Some disks compress what they are given, as records are not.
    std::minstd_rand random;
    uint32_t* const words = reinterpret_cast<uint32_t*>(memory_.get());
    for (uint64_t i = 0; i < memory_bytes_ / sizeof(uint32_t); ++i) {
      words[i] = static_cast<uint32_t>(random());
    }
    engine_.RegisterMemory({memory_.get(), memory_bytes_});
  }
  ~Requests() { engine_.RegisterMemory({}); }
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  // Runs requests over the first `rounds` rounds of the file, over and over for
  // so long, or each once if that is sooner. Returns the bytes per second.
  absl::StatusOr<double> Run(Mix mix, uint64_t rounds, absl::Duration time,
                             bool once) {
    std::fill(done_.begin(), done_.end(), 0);
    const absl::Time start = absl::Now();
    const uint64_t times_max =
        once ? rounds : std::numeric_limits<uint64_t>::max();
    for (size_t i = 0; i < requests_.size(); ++i) Submit(i, mix, rounds);
    absl::Status status;
    while (engine_.in_flight() > 0) {
      IoRequest* completed[16];
      const size_t count = engine_.Poll(absl::MakeSpan(completed), true);
      const bool is_over = absl::Now() - start >= time;
      for (size_t k = 0; k < count; ++k) {
        const auto i = static_cast<size_t>(completed[k] - requests_.data());
        status.Update(completed[k]->status);
        ++done_[i];
        if (status.ok() && !is_over && done_[i] < times_max) {
          Submit(i, mix, rounds);
        }
      }
    }
    OPTSTATE_RETURN_IF_ERROR(status);
    uint64_t bytes = 0;
    for (const uint64_t done : done_) bytes += done * request_bytes_;
    return static_cast<double>(bytes) /
           absl::ToDoubleSeconds(absl::Now() - start);
  }

  // Returns how many rounds the last run has been over whole.
  uint64_t whole_rounds() const {
    return *std::min_element(done_.begin(), done_.end());
  }

 private:
  void Submit(size_t index, Mix mix, uint64_t rounds) {
    const uint64_t turn = done_[index];
    const bool reads =
        mix == Mix::kRead || (mix == Mix::kBoth && (index + turn) % 2 == 0);
    IoRequest& request = requests_[index];
    request = {};
    request.kind = reads ? IoRequest::Kind::kRead : IoRequest::Kind::kWrite;
    request.file = file_;
    request.offset_bytes =
        begin_bytes_ +
        (turn % rounds * requests_.size() + index) * request_bytes_;
    request.buffer = {memory_.get() + index * request_bytes_, request_bytes_};
    engine_.Submit(&request);
  }

  IoEngine& engine_;
  const FileId file_;
  const uint64_t begin_bytes_;
  const uint64_t request_bytes_;
  const uint64_t memory_bytes_;
  const std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  std::vector<IoRequest> requests_;
  std::vector<uint64_t> done_;  // by request
};

// Measures over a part of an open file or device.
absl::StatusOr<DiskBandwidth> Measure(IoEngine* engine, FileId file,
                                      const Extent& part,
                                      uint64_t request_bytes,
                                      const DiskBandwidthOptions& options) {
  Requests requests(engine, file, part.begin_bytes, request_bytes,
                    options.requests);
  const uint64_t file_rounds = part.bytes / request_bytes / options.requests;
  // Reserved blocks take longer at their first write, and are read without the
  // disk before it.
  OPTSTATE_RETURN_IF_ERROR(
      requests.Run(Mix::kWrite, file_rounds, options.phase_time, /*once=*/true)
          .status());
  const uint64_t rounds = requests.whole_rounds();
  DiskBandwidth bandwidth;
  for (const auto& [mix, rate] :
       {std::pair{Mix::kWrite, &bandwidth.write_bytes_per_s},
        {Mix::kRead, &bandwidth.read_bytes_per_s},
        {Mix::kBoth, &bandwidth.mixed_bytes_per_s}}) {
    OPTSTATE_ASSIGN_OR_RETURN(
        *rate, requests.Run(mix, rounds, options.phase_time, /*once=*/false));
  }
  return bandwidth;
}

uint64_t WholeSectors(uint64_t bytes) {
  return (bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
}

}  // namespace

uint64_t DeviceBandwidthBytesMin(const DiskBandwidthOptions& options) {
  return WholeSectors(options.request_bytes) * options.requests * kRoundsMin;
}

absl::StatusOr<DiskBandwidth> MeasureDeviceBandwidth(
    IoEngine* engine, const std::string& device, const Extent& part,
    const DiskBandwidthOptions& options) {
  const uint64_t bytes_min = DeviceBandwidthBytesMin(options);
  if (part.bytes < bytes_min) {
    return absl::InvalidArgumentError(
        absl::StrCat(device, ": measuring it takes ", bytes_min,
                     " bytes, and the part given has ", part.bytes));
  }
  const uint64_t round_bytes = bytes_min / kRoundsMin;
  const uint64_t rounds = std::max(
      std::min(part.bytes, options.file_bytes_max) / round_bytes, kRoundsMin);
  const Extent measured_part = {part.begin_bytes, rounds * round_bytes};
  OPTSTATE_ASSIGN_OR_RETURN(const FileId file,
                            engine->OpenExtent(device, measured_part));
  absl::StatusOr<DiskBandwidth> measured =
      Measure(engine, file, measured_part, WholeSectors(options.request_bytes),
              options);
  engine->Close(file);
  return measured;
}

absl::StatusOr<DiskBandwidth> MeasureDiskBandwidth(
    IoEngine* engine, const std::string& directory,
    const DiskBandwidthOptions& options) {
  const uint64_t request_bytes = WholeSectors(options.request_bytes);
  OPTSTATE_ASSIGN_OR_RETURN(
      const uint64_t bytes,
      FileBytes(directory, request_bytes * options.requests,
                options.file_bytes_max));
  const std::string path = directory + kFileName;
  // A process that was killed between the next two calls left one.
  ::unlink(path.c_str());
  OPTSTATE_ASSIGN_OR_RETURN(
      const FileId file,
      engine->Open(path, bytes, IoEngine::OpenMode::kCreate));
  ::unlink(path.c_str());
  absl::StatusOr<DiskBandwidth> measured =
      Measure(engine, file, {0, bytes}, request_bytes, options);
  engine->Close(file);
  return measured;
}

}  // namespace optstate::io
