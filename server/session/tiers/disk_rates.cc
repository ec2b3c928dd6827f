#include "server/session/tiers/disk_rates.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/config/nvme_directory.h"
#include "server/os/small_file.h"
#include "server/session/durability/job_storage.h"
#include "spdlog/spdlog.h"
#include "storage/block_device/device.h"
#include "storage/block_device/extents.h"
#include "storage/format/checked_file.h"
#include "storage/record_split.h"

namespace optstate::session {
namespace {

constexpr char kBootIdPath[] = "/proc/sys/kernel/random/boot_id";
// State of an element with AdamW and float32 arrays.
constexpr uint64_t kBytesOfElement = 12;
constexpr uint64_t kRequestBytesMin = uint64_t{64} << 10;
constexpr uint64_t kRequestBytesMax = uint64_t{8} << 20;

std::string PathOf(const std::string& state_dir) {
  return state_dir + "/disk_rates";
}

// Empty: not known, and so the record of no boot.
std::string BootId() {
  const absl::StatusOr<std::string> text = os::ReadSmallFile(kBootIdPath, 256);
  return text.ok() ? std::string(absl::StripAsciiWhitespace(*text)) : "";
}

absl::StatusOr<v1::DiskRates> Read(const std::string& path) {
  OPTSTATE_ASSIGN_OR_RETURN(const storage::CheckedFile file,
                            storage::ReadCheckedFile(path));
  v1::DiskRates rates;
  if (rates.ParseFromString(file.payload)) return rates;
  return absl::DataLossError(absl::StrCat(path, " holds no rates"));
}

absl::Status Write(const std::string& path, const v1::DiskRates& rates) {
  return storage::WriteCheckedFile(path,
                                   {.layout_hash = std::string(32, '\0'),
                                    .payload = rates.SerializeAsString()});
}

// Sets what says which file system, or which device, the records are on.
absl::Status SetPlace(const v1::NvmeSettings& nvme,
                      const std::string& directory, v1::DirectoryRates* rates) {
  struct stat info;
  struct statvfs space;
  if (::stat(directory.c_str(), &info) != 0 ||
      ::statvfs(directory.c_str(), &space) != 0) {
    return OsError(errno, absl::StrCat("stat of ", directory));
  }
  rates->set_directory(directory);
  rates->set_device(info.st_dev);
  rates->set_file_system_bytes(uint64_t{space.f_blocks} * space.f_frsize);
  if (config::DeviceOf(nvme, directory).empty()) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<storage::DeviceNote> note,
                            storage::ReadDeviceNote(directory));
  if (note.has_value()) rates->set_device_id(note->device_id);
  return absl::OkStatus();
}

bool IsKnown(const v1::DirectoryRates& rates) {
  return rates.measured_at_ns() != 0;
}

// Held while a process measures: two at once would halve each other's rates.
absl::StatusOr<UniqueFd> TakeTurn(const std::string& state_dir) {
  const std::string path = PathOf(state_dir) + ".lock";
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  int failed;
  do {
    failed = ::flock(fd.get(), LOCK_EX);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) return OsError(errno, absl::StrCat("flock ", path));
  return fd;
}

// Measures the device of a directory over a part of it that no job has.
absl::StatusOr<io::DiskBandwidth> MeasureDevice(
    io::IoEngine* engine, const std::string& directory,
    const std::string& device, const io::DiskBandwidthOptions& options) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const storage::OwnedDevice owned,
      storage::OpenDeviceOf(directory, device, storage::DeviceUse::kUse));
  OPTSTATE_ASSIGN_OR_RETURN(
      const storage::BorrowedPart part,
      storage::BorrowFreePart(directory, owned.superblock,
                              io::DeviceBandwidthBytesMin(options),
                              options.file_bytes_max));
  return io::MeasureDeviceBandwidth(engine, device, part.extent, options);
}

absl::StatusOr<v1::DirectoryRates> MeasureWith(const v1::DaemonConfig& config,
                                               const std::string& directory) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<io::IoEngine> engine,
                            MakeDiskEngine(config, /*done_bytes=*/nullptr));
  io::DiskBandwidthOptions options;
  options.request_bytes =
      std::clamp(config.engine().subgroup_elements() * kBytesOfElement,
                 kRequestBytesMin, kRequestBytesMax);
  const std::string device = config::DeviceOf(config.nvme(), directory);
  OPTSTATE_ASSIGN_OR_RETURN(
      const io::DiskBandwidth bandwidth,
      device.empty()
          ? io::MeasureDiskBandwidth(engine.get(), directory, options)
          : MeasureDevice(engine.get(), directory, device, options));
  v1::DirectoryRates rates;
  rates.set_read_bytes_per_s(bandwidth.read_bytes_per_s);
  rates.set_write_bytes_per_s(bandwidth.write_bytes_per_s);
  rates.set_mixed_bytes_per_s(bandwidth.mixed_bytes_per_s);
  rates.set_io_engine(engine->name());
  return rates;
}

// Records all rates that are known.
void Record(const std::string& state_dir, const DiskRates& rates) {
  v1::DiskRates record;
  record.set_boot_id(BootId());
  for (const v1::DirectoryRates& one : rates.directories) {
    if (IsKnown(one)) *record.add_directories() = one;
  }
  const absl::Status written = Write(PathOf(state_dir), record);
  if (!written.ok()) {
    spdlog::warn("disk bandwidth is not recorded: {}", written.ToString());
  }
}

absl::Status MeasureOne(const v1::NvmeSettings& nvme,
                        const std::string& directory,
                        const MeasureDirectory& measure,
                        v1::DirectoryRates* rates) {
  absl::StatusOr<v1::DirectoryRates> measured = measure(directory);
  OPTSTATE_RETURN_IF_ERROR(measured.status());
  OPTSTATE_RETURN_IF_ERROR(SetPlace(nvme, directory, &*measured));
  measured->set_measured_at_ns(absl::ToUnixNanos(absl::Now()));
  *rates = *std::move(measured);
  spdlog::info(
      "disk bandwidth of {} by {}: reads {:.2f} GB/s, writes {:.2f}, both "
      "together {:.2f}",
      directory, rates->io_engine(), rates->read_bytes_per_s() / 1e9,
      rates->write_bytes_per_s() / 1e9, rates->mixed_bytes_per_s() / 1e9);
  return absl::OkStatus();
}

}  // namespace

DiskRates RecordedDiskRates(const std::string& state_dir,
                            const v1::NvmeSettings& nvme) {
  DiskRates rates;
  rates.directories.resize(nvme.directories_size());
  const absl::StatusOr<v1::DiskRates> record = Read(PathOf(state_dir));
  if (!record.ok() && !absl::IsNotFound(record.status())) {
    spdlog::warn("disk bandwidth is not known: {}", record.status().ToString());
  }
  if (!record.ok() || record->boot_id().empty() ||
      record->boot_id() != BootId()) {
    return rates;
  }
  for (int i = 0; i < nvme.directories_size(); ++i) {
    v1::DirectoryRates place;
    if (!SetPlace(nvme, nvme.directories(i), &place).ok()) continue;
    for (const v1::DirectoryRates& one : record->directories()) {
      if (one.directory() == place.directory() &&
          one.device() == place.device() &&
          one.file_system_bytes() == place.file_system_bytes() &&
          one.device_id() == place.device_id()) {
        rates.directories[i] = one;
      }
    }
  }
  return rates;
}

DiskRates MeasureDiskRates(const std::string& state_dir,
                           const v1::NvmeSettings& nvme, bool anew,
                           const MeasureDirectory& measure) {
  const absl::StatusOr<UniqueFd> turn = TakeTurn(state_dir);
  DiskRates rates = RecordedDiskRates(state_dir, nvme);
  rates.problems.assign(rates.directories.size(), turn.status());
  for (size_t i = 0; i < rates.directories.size(); ++i) {
    const std::string& directory = nvme.directories(static_cast<int>(i));
    v1::DirectoryRates& one = rates.directories[i];
    if (turn.ok() && (anew || !IsKnown(one))) {
      rates.problems[i] = MeasureOne(nvme, directory, measure, &one);
      // Others see by the record how far this has come.
      if (rates.problems[i].ok()) Record(state_dir, rates);
    }
    if (!rates.problems[i].ok()) {
      spdlog::warn("disk bandwidth of {} was not measured: {}", directory,
                   rates.problems[i].ToString());
    }
  }
  return rates;
}

DiskRates MeasureDiskRates(const std::string& state_dir,
                           const v1::DaemonConfig& config, bool anew) {
  return MeasureDiskRates(state_dir, config.nvme(), anew,
                          [&config](const std::string& directory) {
                            return MeasureWith(config, directory);
                          });
}

std::vector<uint32_t> DirectoryWeights(const v1::NvmeSettings& settings,
                                       const DiskRates& rates) {
  if (!settings.directory_weights().empty()) {
    return storage::SmallestWeights(
        {settings.directory_weights().data(),
         static_cast<size_t>(settings.directory_weights_size())});
  }
  std::vector<double> bytes_per_s;
  for (const v1::DirectoryRates& one : rates.directories) {
    bytes_per_s.push_back(one.mixed_bytes_per_s());
  }
  return storage::WeightsByRate(bytes_per_s);
}

}  // namespace optstate::session
