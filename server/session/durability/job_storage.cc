#include "server/session/durability/job_storage.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/config/nvme_directory.h"
#include "spdlog/spdlog.h"
#include "storage/disk_folder.h"
#include "storage/io/make_io_engine.h"
#include "storage/io/metered_io_engine.h"

namespace optstate::session {
namespace {

absl::Status Differs(absl::string_view what, absl::string_view now,
                     absl::string_view asked) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the job was made with ", what, " ", now, ", this session asks for ",
      asked,
      ": leave it out to go on with the job, or delete the job to change it"));
}

std::string TextOf(const v1::StorageSettings& storage) {
  switch (storage.durability()) {
    case v1::DURABILITY_KIND_STEP:
      return "\"step\"";
    case v1::DURABILITY_KIND_EVERY:
      return absl::StrCat("\"every ", storage.every_steps(), "\"");
    case v1::DURABILITY_KIND_INTERVAL:
      return absl::StrCat("\"interval ", storage.interval_ms(), "ms\"");
    default:
      return "\"none\"";
  }
}

absl::Status CheckDurability(const v1::StorageSettings& storage) {
  if (storage.durability() == v1::DURABILITY_KIND_EVERY &&
      storage.every_steps() == 0) {
    return absl::InvalidArgumentError(
        "durability \"every N\": N must be at least 1");
  }
  if (storage.durability() == v1::DURABILITY_KIND_INTERVAL &&
      storage.interval_ms() == 0) {
    return absl::InvalidArgumentError(
        "durability \"interval\": the interval must be positive");
  }
  return absl::OkStatus();
}

// Also false for NaN.
bool IsFraction(double value) { return value >= 0 && value <= 1; }

absl::Status CheckOffloadFraction(const v1::StorageSettings& storage) {
  if (IsFraction(OffloadFractionOf(storage))) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("offload_fraction is ", storage.offload_fraction(),
                   "; it is the part of the elements that the CPU updates, "
                   "from 0 to 1"));
}

// Parameters of records that stay on devices are newer than the records.
absl::Status CheckDeviceBudget(const v1::StorageSettings& storage) {
  if (DeviceBudgetOf(storage) == 0 || !storage.parameters_on_disk()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "device_budget is for parameters in host memory, not for "
      "parameters_on_disk: leave one of them out");
}

// A fraction of 1 that comes later leaves the budget to one that comes then.
absl::Status CheckDevicesUpdate(const v1::StorageSettings& storage) {
  if (DeviceBudgetOf(storage) == 0 || OffloadFractionOf(storage) < 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "device_budget: records stay on a device that updates them: set "
      "offload_fraction below 1, or leave device_budget out");
}

// The parameters of a job on disk may be there too.
absl::Status CheckParameters(const v1::StorageSettings& storage,
                             bool may_swap) {
  if (storage.parameters_on_disk() && !may_swap) {
    return absl::InvalidArgumentError(
        "parameters_on_disk is for placement \"nvme\" (or \"auto\"): in host "
        "memory the parameters lie whole. Set the placement, or leave it out");
  }
  if (storage.parameter_cache_bytes() == 0 || storage.parameters_on_disk()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "max_in_cpu is for parameters on disk (parameters_on_disk, with "
      "placement "
      "\"nvme\"): set that, or leave it out");
}

// Checks a budget that an operator sets for a job that exists.
absl::Status CheckBudget(const v1::StorageSettings& now, uint64_t bytes,
                         const storage::SwapSizes& sizes) {
  if (now.placement() != v1::PLACEMENT_NVME) {
    return absl::FailedPreconditionError(
        "host_budget is for placement \"nvme\": this job lies in memory whole. "
        "For less memory, take a state_dict, delete the job and load it into "
        "one with placement=\"nvme\"");
  }
  return CheckBudgetHolds(bytes, sizes);
}

}  // namespace

uint64_t LeastBudget(const storage::SwapSizes& sizes) {
  return storage::kSwapFramesMin * sizes.frame;
}

absl::Status CheckBudgetHolds(uint64_t bytes, const storage::SwapSizes& sizes) {
  if (bytes >= LeastBudget(sizes)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a host_budget of ", bytes, " bytes has room for ", bytes / sizes.frame,
      " of the job's records of ", sizes.frame, " bytes; it must hold ",
      storage::kSwapFramesMin, ": set at least ", LeastBudget(sizes)));
}

absl::Status CheckStorage(const v1::StorageSettings& storage,
                          const v1::DaemonConfig& config) {
  if (!v1::Placement_IsValid(storage.placement()) ||
      !v1::DurabilityKind_IsValid(storage.durability())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "placement ", static_cast<int>(storage.placement()), ", durability ",
        static_cast<int>(storage.durability()),
        ": this daemon does not know one of them; is it older than its "
        "client?"));
  }
  if (storage.sub_group_elements() % kTileElements != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sub_group_size is ", storage.sub_group_elements(),
                     ", it must be a multiple of ", kTileElements));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckDurability(storage));
  OPTSTATE_RETURN_IF_ERROR(CheckOffloadFraction(storage));
  OPTSTATE_RETURN_IF_ERROR(CheckDeviceBudget(storage));
  OPTSTATE_RETURN_IF_ERROR(CheckDevicesUpdate(storage));
  const bool may_swap = storage.placement() == v1::PLACEMENT_NVME ||
                        storage.placement() == v1::PLACEMENT_AUTO;
  if (!may_swap && storage.host_budget_bytes() != 0) {
    return absl::InvalidArgumentError(
        "host_budget is for placement \"nvme\": in host memory the state lies "
        "whole");
  }
  OPTSTATE_RETURN_IF_ERROR(CheckParameters(storage, may_swap));
  if (UsesDisk(storage) && config.nvme().directories().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        IsDurable(storage) ? absl::StrCat("durability ", TextOf(storage))
                           : "placement \"nvme\"",
        ": this daemon has no directory on a disk. Start optstated with "
        "--nvme-dir DIR, or set nvme.directories in its configuration"));
  }
  return absl::OkStatus();
}

v1::StorageSettings ResolveStorage(const v1::StorageSettings& asked,
                                   const v1::DaemonConfig& config) {
  v1::StorageSettings storage = asked;
  storage.clear_made_with();
  storage.clear_directory_weights();
  storage.clear_directories();
  storage.clear_arrangement();
  storage.clear_placement_reason();
  if (asked.placement() != v1::PLACEMENT_NVME) {
    storage.set_placement(v1::PLACEMENT_HOST);
  }
  if (storage.sub_group_elements() == 0) {
    storage.set_sub_group_elements(config.engine().subgroup_elements());
  }
  if (storage.placement() == v1::PLACEMENT_HOST) {
    storage.clear_host_budget_bytes();
    storage.clear_parameters_on_disk();
    storage.clear_parameter_cache_bytes();
  } else if (storage.host_budget_bytes() == 0) {
    storage.set_host_budget_bytes(config.nvme().job_host_budget_bytes());
  }
  if (storage.durability() == v1::DURABILITY_KIND_UNSPECIFIED) {
    storage.set_durability(v1::DURABILITY_KIND_NONE);
  }
  return storage;
}

absl::Status CheckSameStorage(const v1::StorageSettings& now,
                              const v1::StorageSettings& asked) {
  const bool is_nvme = now.placement() == v1::PLACEMENT_NVME;
  if ((asked.placement() == v1::PLACEMENT_NVME && !is_nvme) ||
      (asked.placement() == v1::PLACEMENT_HOST && is_nvme)) {
    return Differs("placement", is_nvme ? "\"nvme\"" : "\"host\"",
                   is_nvme ? "\"host\"" : "\"nvme\"");
  }
  if (asked.sub_group_elements() != 0 &&
      asked.sub_group_elements() != now.sub_group_elements()) {
    return Differs("sub_group_size", absl::StrCat(now.sub_group_elements()),
                   absl::StrCat(asked.sub_group_elements()));
  }
  if (asked.parameters_on_disk() && is_nvme && !now.parameters_on_disk()) {
    return Differs("parameters", "in memory", "parameters on disk");
  }
  if (asked.parameter_cache_bytes() != 0 && now.parameters_on_disk() &&
      asked.parameter_cache_bytes() != now.parameter_cache_bytes()) {
    return Differs("max_in_cpu",
                   now.parameter_cache_bytes() == 0
                       ? "left to the daemon"
                       : absl::StrCat(now.parameter_cache_bytes()),
                   absl::StrCat(asked.parameter_cache_bytes()));
  }
  // "auto" leaves the budget unused when the job lies in memory.
  const bool has_budget = is_nvme || asked.placement() != v1::PLACEMENT_AUTO;
  // Scripts go on asking for what an operator has changed since.
  const v1::StorageSettings& made = now.has_made_with() ? now.made_with() : now;
  if (has_budget && asked.host_budget_bytes() != 0 &&
      asked.host_budget_bytes() != now.host_budget_bytes() &&
      asked.host_budget_bytes() != made.host_budget_bytes()) {
    return Differs("host_budget", absl::StrCat(now.host_budget_bytes()),
                   absl::StrCat(asked.host_budget_bytes()));
  }
  if (asked.durability() != v1::DURABILITY_KIND_UNSPECIFIED &&
      TextOf(asked) != TextOf(now) && TextOf(asked) != TextOf(made)) {
    return Differs("durability", TextOf(now), TextOf(asked));
  }
  if (asked.has_offload_fraction() &&
      OffloadFractionOf(asked) != OffloadFractionOf(now) &&
      OffloadFractionOf(asked) != OffloadFractionOf(made)) {
    return Differs("offload_fraction", absl::StrCat(OffloadFractionOf(now)),
                   absl::StrCat(OffloadFractionOf(asked)));
  }
  if (DeviceBudgetOf(asked) != 0 &&
      DeviceBudgetOf(asked) != DeviceBudgetOf(now) &&
      DeviceBudgetOf(asked) != DeviceBudgetOf(made)) {
    return Differs("device_budget", absl::StrCat(DeviceBudgetOf(now)),
                   absl::StrCat(DeviceBudgetOf(asked)));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::StorageSettings> ChangeStorage(
    const v1::StorageSettings& now, const v1::SetJobRequest& request,
    const storage::SwapSizes& sizes) {
  v1::StorageSettings storage = now;
  if (request.host_budget_bytes() != 0) {
    OPTSTATE_RETURN_IF_ERROR(
        CheckBudget(now, request.host_budget_bytes(), sizes));
    storage.set_host_budget_bytes(request.host_budget_bytes());
  }
  if (request.durability() != v1::DURABILITY_KIND_UNSPECIFIED) {
    storage.set_durability(request.durability());
    storage.set_every_steps(request.every_steps());
    storage.set_interval_ms(request.interval_ms());
    OPTSTATE_RETURN_IF_ERROR(CheckDurability(storage));
    if (IsDurable(storage) != IsDurable(now)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the job was made with durability ", TextOf(now),
          IsDurable(now) ? ", which can be another one, but not \"none\""
                         : "; its records have no second place on disk that a "
                           "durable job needs",
          ". Take a state_dict, delete the job and load it into a new one"));
    }
  }
  if (request.has_offload_fraction()) {
    storage.set_offload_fraction(request.offload_fraction());
    OPTSTATE_RETURN_IF_ERROR(CheckOffloadFraction(storage));
  }
  if (request.has_device_budget_bytes()) {
    storage.set_device_budget_bytes(request.device_budget_bytes());
  }
  OPTSTATE_RETURN_IF_ERROR(CheckDeviceBudget(storage));
  if (request.has_device_budget_bytes()) {
    OPTSTATE_RETURN_IF_ERROR(CheckDevicesUpdate(storage));
  }
  if (!now.has_made_with()) *storage.mutable_made_with() = now;
  return storage;
}

double OffloadFractionOf(const v1::StorageSettings& storage) {
  return storage.has_offload_fraction() ? storage.offload_fraction() : 1;
}

uint64_t DeviceBudgetOf(const v1::StorageSettings& storage) {
  return storage.device_budget_bytes();
}

bool UsesDisk(const v1::StorageSettings& storage) {
  return storage.placement() == v1::PLACEMENT_NVME || IsDurable(storage);
}

bool IsDurable(const v1::StorageSettings& storage) {
  return storage.durability() != v1::DURABILITY_KIND_UNSPECIFIED &&
         storage.durability() != v1::DURABILITY_KIND_NONE;
}

uint64_t FrameBytesOf(const v1::StorageSettings& storage,
                      const storage::SwapSizes& sizes) {
  const uint64_t frames =
      storage.placement() == v1::PLACEMENT_NVME
          ? std::min(storage.host_budget_bytes() / sizes.frame, sizes.records)
          : sizes.records;
  return std::max(frames, storage::kSwapFramesMin) * sizes.frame;
}

absl::StatusOr<uint64_t> ParameterCacheBytesOf(
    const v1::StorageSettings& storage, const storage::SwapSizes& sizes) {
  if (!storage.parameters_on_disk()) return 0;
  const uint64_t asked = storage.parameter_cache_bytes();
  const uint64_t least = storage::kSwapCacheSectionsMin * sizes.section;
  // More than all sections is not used.
  const uint64_t most = std::max(sizes.records * sizes.section, least);
  if (asked == 0) {
    return std::min(std::max(kParameterCacheBytesDefault, least), most);
  }
  if (asked >= least) return std::min(asked, most);
  return absl::InvalidArgumentError(absl::StrCat(
      "max_in_cpu is ", asked, " bytes; it must hold the parameters of ",
      storage::kSwapCacheSectionsMin, " records, of ", sizes.section,
      " bytes: set at least ", least, ", or make sub_group_size smaller"));
}

std::vector<std::string> DiskDirectoriesOf(const v1::DaemonConfig& config,
                                           const std::string& job) {
  std::vector<std::string> directories;
  for (const std::string& directory : config.nvme().directories()) {
    directories.push_back(storage::DiskFolder(directory, job));
  }
  return directories;
}

uint32_t DirectoryCountOf(const v1::DaemonConfig& config,
                          const v1::StorageSettings& storage) {
  return storage.directories() != 0
             ? storage.directories()
             : static_cast<uint32_t>(config.nvme().directories_size());
}

absl::StatusOr<std::vector<std::string>> OwnDirectoriesOf(
    const v1::DaemonConfig& config, const std::string& job,
    const v1::StorageSettings& storage) {
  std::vector<std::string> directories = DiskDirectoriesOf(config, job);
  if (directories.empty()) {
    return absl::FailedPreconditionError(
        "the job's records are on disk, and this daemon has no directory for "
        "them: start optstated with the --nvme-dir that it had");
  }
  const uint32_t count = DirectoryCountOf(config, storage);
  if (count > directories.size()) {
    return absl::FailedPreconditionError(absl::StrCat(
        directories[0], ": the job was made with ", count,
        " nvme.directories, and this daemon has ", directories.size(),
        ": start optstated with those that it had, or take a state_dict with "
        "them and load it into a new job"));
  }
  directories.resize(count);
  return directories;
}

std::vector<std::string> DevicesOf(const v1::NvmeSettings& nvme) {
  std::vector<std::string> devices;
  for (const std::string& directory : nvme.directories()) {
    devices.push_back(config::DeviceOf(nvme, directory));
  }
  return devices;
}

absl::Status MarkDurable(const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    OPTSTATE_RETURN_IF_ERROR(
        storage::WriteDurably(directory + storage::kDiskDurableFile, ""));
  }
  return absl::OkStatus();
}

absl::Status CheckHasCommits(const std::vector<std::string>& directories) {
  if (storage::MayExist(directories[0] + storage::kDiskCommitsFile)) {
    return absl::OkStatus();
  }
  for (const std::string& directory : directories) {
    if (!storage::MayExist(directory + storage::kDiskDurableFile) ||
        !storage::HasRecords(directory)) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        directory, " has a part of the job, which is durable, but ",
        directories[0],
        "/commits is missing: is its disk mounted? To give the "
        "job up, remove ",
        directory));
  }
  return absl::NotFoundError(
      absl::StrCat(directories[0], ": there is no durable job"));
}

absl::StatusOr<std::unique_ptr<io::IoEngine>> MakeDiskEngine(
    const v1::DaemonConfig& config, std::atomic<uint64_t>* done_bytes) {
  io::IoEngineKind kind = io::IoEngineKind::kAny;
  if (config.nvme().io_engine() == v1::IO_ENGINE_KIND_IO_URING) {
    kind = io::IoEngineKind::kIoUring;
  } else if (config.nvme().io_engine() == v1::IO_ENGINE_KIND_BLOCKING) {
    kind = io::IoEngineKind::kBlocking;
  }
  io::IoEngineOptions options;
  options.log = [](const std::string& text) { spdlog::warn("{}", text); };
  OPTSTATE_ASSIGN_OR_RETURN(io::MadeIoEngine made,
                            io::MakeIoEngine(kind, options));
  if (!made.without.empty()) spdlog::warn("{}", made.without);
  if (done_bytes == nullptr) return std::move(made.engine);
  return io::MeterIoEngine(std::move(made.engine), done_bytes);
}

}  // namespace optstate::session
