#include "server/session/tiers/quota_rooms.h"

#include <numeric>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"
#include "server/session/tiers/node_budget.h"
#include "server/session/user_bytes.h"
#include "storage/disk_folder.h"

namespace optstate::session {
namespace {

using Taken = std::map<uid_t, uint64_t>;

// One of the limits of bytes of a quota.
struct Field {
  absl::string_view name;
  uint64_t (v1::Quota::*max)() const = nullptr;
  absl::string_view advice;
};

constexpr Field kState = {"state_bytes_max", &v1::Quota::state_bytes_max,
                          "delete a job or put one to sleep (optctl sleep), or "
                          "raise the quota"};
constexpr Field kFrames = {
    "frames_bytes_max", &v1::Quota::frames_bytes_max,
    "give a job less (host_budget=, or optctl set job NAME host_budget=), "
    "delete one, or raise the quota"};
constexpr Field kDisk = {"disk_bytes_max", &v1::Quota::disk_bytes_max,
                         "delete a job with records on disk, or raise the "
                         "quota"};

uint64_t Minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

QuotaRoom RoomOf(const v1::Quota& quota, const Field& field, uint64_t taken) {
  const uint64_t max = (quota.*field.max)();
  return {
      .what = absl::StrCat(access::QuotaText(quota, field.name, max), " bytes"),
      .bytes_left = Minus(max, taken),
      .advice = std::string(field.advice)};
}

// Returns the room of each quota that limits this. `taken` is asked at most
// once, and only if one does.
absl::StatusOr<std::vector<QuotaRoom>> RoomsOf(
    access::Quotas* quotas, const access::UserBounds& bounds,
    const Field& field, absl::FunctionRef<Taken()> taken) {
  std::vector<QuotaRoom> rooms;
  const bool has_own = (bounds.own.*field.max)() != 0;
  std::vector<access::GroupQuota> groups = bounds.groups;
  std::erase_if(groups, [&field](const access::GroupQuota& each) {
    return (each.quota.*field.max)() == 0;
  });
  if (!has_own && groups.empty()) return rooms;
  Taken by_owner = taken();
  if (has_own) {
    rooms.push_back(RoomOf(bounds.own, field, by_owner[*bounds.uid]));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<uint64_t> sums,
                            quotas->SumOverMembers(groups, by_owner));
  for (size_t i = 0; i < groups.size(); ++i) {
    rooms.push_back(RoomOf(groups[i].quota, field, sums[i]));
  }
  return rooms;
}

absl::Status CheckFits(const std::vector<QuotaRoom>& rooms, uint64_t needed) {
  for (const QuotaRoom& room : rooms) {
    if (needed <= room.bytes_left) continue;
    return absl::ResourceExhaustedError(
        absl::StrCat(room.what, ": the job needs ", needed, ", ",
                     room.bytes_left, " are left; ", room.advice));
  }
  return absl::OkStatus();
}

absl::Status CheckField(const OwnedJob& job, const Field& field,
                        uint64_t needed, absl::FunctionRef<Taken()> taken) {
  access::Quotas quotas(*job.config);
  OPTSTATE_ASSIGN_OR_RETURN(const access::UserBounds bounds,
                            quotas.BoundsOf(job.owner));
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<QuotaRoom> rooms,
                            RoomsOf(&quotas, bounds, field, taken));
  return CheckFits(rooms, needed);
}

}  // namespace

std::map<uid_t, uint64_t> FramesByOwner(const std::string& state_dir,
                                        const std::string& except) {
  const std::map<std::string, uid_t> owners = OwnersOfJobs(state_dir);
  Taken taken;
  for (const BytesOfJob& one : FramesOfJobs(state_dir)) {
    const auto owner = owners.find(one.job);
    if (one.job == except || owner == owners.end()) continue;
    taken[owner->second] += one.bytes;
  }
  return taken;
}

std::map<uid_t, uint64_t> DiskBytesByOwner(const std::string& state_dir,
                                           const v1::NvmeSettings& nvme,
                                           const std::string& except) {
  std::map<std::string, uid_t> owners = OwnersOfJobs(state_dir);
  Taken taken;
  for (const std::string& directory : nvme.directories()) {
    for (const BytesOfJob& one : DiskBytesOfJobs(directory)) {
      if (one.job == except) continue;
      auto owner = owners.find(one.job);
      if (owner == owners.end()) {
        // A job that could not be started has its disks all the same; its
        // owner's number is in the first directory alone.
        const auto on_disk = storage::ReadDiskOwner(
            storage::DiskFolder(nvme.directories(0), one.job));
        if (!on_disk.ok() || !on_disk->has_value()) continue;
        owner = owners.emplace(one.job, **on_disk).first;
      }
      taken[owner->second] += one.bytes;
    }
  }
  return taken;
}

absl::StatusOr<std::vector<QuotaRoom>> StateRooms(
    const v1::Limits& limits, const access::Quotas::All& quotas,
    const std::string& state_dir, uid_t owner) {
  access::Quotas all(limits, quotas);
  OPTSTATE_ASSIGN_OR_RETURN(const access::UserBounds bounds,
                            all.BoundsOf(owner));
  const auto taken = [&state_dir] { return StateBytesByOwner(state_dir); };
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<QuotaRoom> rooms,
                            RoomsOf(&all, bounds, kState, taken));
  // The limit of all users, where the user's own quota says nothing.
  const uint64_t max = bounds.in_force.state_bytes_max();
  if (bounds.own.state_bytes_max() == 0 && max != 0) {
    rooms.push_back(
        {.what = absl::StrCat("limit of the jobs of uid ", owner),
         .bytes_left = Minus(max, taken()[owner]),
         .advice = "delete a job or raise limits.user_state_bytes_max"});
  }
  return rooms;
}

absl::Status CheckFramesQuotas(const OwnedJob& job, uint64_t frames_bytes) {
  return CheckField(job, kFrames, frames_bytes,
                    [&job] { return FramesByOwner(job.state_dir, job.name); });
}

absl::Status CheckDiskQuotas(const OwnedJob& job,
                             absl::Span<const uint64_t> bytes, bool beside) {
  return CheckField(job, kDisk,
                    std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}),
                    [&job, beside] {
                      return DiskBytesByOwner(job.state_dir, job.config->nvme(),
                                              beside ? "" : job.name);
                    });
}

}  // namespace optstate::session
