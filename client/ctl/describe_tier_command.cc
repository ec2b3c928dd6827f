#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/job_settings.h"
#include "client/ctl/progress_line.h"
#include "client/ctl/progress_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Interval at which optctl asks how many directories are measured.
constexpr auto kLookInterval = std::chrono::milliseconds(500);
// The most that the daemon takes to measure a directory.
constexpr absl::Duration kMeasuringMax = absl::Seconds(3);

struct Asked {
  std::string bytes;
  bool measure = false;
};

// Has the daemon measure its directories, and shows how many it has measured.
absl::StatusOr<v1::DescribeTiersReply> Measure(
    const Context& context, const v1::DescribeTiersRequest& request) {
  OPTSTATE_ASSIGN_OR_RETURN(const auto asking, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const auto looking, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::DescribeTiersReply before,
                            looking->DescribeTiers({}));
  const absl::Duration measuring = kMeasuringMax * before.directories_size();
  v1::DescribeTiersReply now = before;
  ProgressLine line(context.machine_readable());
  std::future<absl::StatusOr<v1::DescribeTiersReply>> asked =
      std::async(std::launch::async,
                 [&] { return asking->MeasureTiers(request, measuring); });
  while (asked.wait_for(kLookInterval) != std::future_status::ready) {
    line.Show("", MeasureProgressText(before, now));
    absl::StatusOr<v1::DescribeTiersReply> looked = looking->DescribeTiers({});
    // The call that is looked at says what is wrong.
    if (looked.ok()) now = *std::move(looked);
  }
  absl::StatusOr<v1::DescribeTiersReply> reply = asked.get();
  const absl::Status told = line.End("");
  if (reply.ok() && !told.ok()) return told;
  return reply;
}

std::string Rate(double bytes_per_s) {
  return absl::StrFormat("%.2f GB/s", bytes_per_s / 1e9);
}

void AddJobs(const google::protobuf::RepeatedPtrField<v1::TierJob>& jobs,
             Table& table) {
  for (const v1::TierJob& job : jobs) {
    std::string text = HumanBytes(job.bytes());
    if (job.frames_bytes() != 0) {
      absl::StrAppend(&text, ", ", HumanBytes(job.frames_bytes()),
                      " of it frames");
    }
    if (job.weight() != 0) absl::StrAppend(&text, ", weight ", job.weight());
    table.AddRow({absl::StrCat("  job ", job.job()), text});
  }
}

void AddMemory(const v1::MemoryTier& memory, Table& table) {
  table.AddRow({"  capacity", HumanBytes(memory.capacity_bytes())});
  table.AddRow(
      {"  used by jobs",
       absl::StrCat(HumanBytes(memory.used_bytes()), ", ",
                    HumanBytes(memory.frames_bytes()), " of it frames")});
  table.AddRow({"  free", memory.has_free_bytes()
                              ? HumanBytes(memory.free_bytes())
                              : memory.problem()});
  table.AddRow(
      {"  budget for frames", memory.budget_bytes() == 0
                                  ? "what is free"
                                  : HumanBytes(memory.budget_bytes())});
  table.AddRow({"  bandwidth", memory.bytes_per_s() > 0
                                   ? Rate(memory.bytes_per_s())
                                   : "not measured"});
  AddJobs(memory.jobs(), table);
}

void AddDirectory(const v1::DirectoryTier& tier, Table& table) {
  table.AddRow({"directory", tier.directory()});
  table.AddRow({"  capacity", HumanBytes(tier.capacity_bytes())});
  table.AddRow({"  used by jobs", HumanBytes(tier.used_bytes())});
  table.AddRow({"  free", HumanBytes(tier.free_bytes())});
  if (tier.limit_bytes() != 0) {
    table.AddRow({"  limit", HumanBytes(tier.limit_bytes())});
  }
  if (tier.has_measured_at()) {
    table.AddRow(
        {"  bandwidth",
         absl::StrCat("reads ", Rate(tier.read_bytes_per_s()), ", writes ",
                      Rate(tier.write_bytes_per_s()), ", both together ",
                      Rate(tier.mixed_bytes_per_s()))});
    table.AddRow({"  measured", absl::StrCat(HumanTime(tier.measured_at()),
                                             ", by ", tier.io_engine())});
  } else {
    table.AddRow({"  bandwidth", "not measured"});
  }
  if (!tier.problem().empty()) table.AddRow({"  problem", tier.problem()});
  table.AddRow({"  weight for new jobs", absl::StrCat(tier.weight())});
  AddJobs(tier.jobs(), table);
}

void AddAuto(const std::string& bytes, const v1::AutoPlacement& placement,
             Table& table) {
  std::string text = "refused";
  if (placement.placement() == v1::PLACEMENT_HOST) text = "host";
  if (placement.placement() == v1::PLACEMENT_NVME) {
    text = absl::StrCat("nvme, host budget ",
                        HumanBytes(placement.host_budget_bytes()));
  }
  table.AddRow({absl::StrCat("auto, ", bytes), text});
  table.AddRow({"  why", placement.reason()});
}

absl::StatusOr<v1::DescribeTiersReply> Describe(
    const Context& context, const v1::DescribeTiersRequest& request) {
  if (request.measure()) return Measure(context, request);
  OPTSTATE_ASSIGN_OR_RETURN(const auto client, context.Connect());
  return client->DescribeTiers(request);
}

absl::Status Run(const Context& context, const Asked& asked) {
  v1::DescribeTiersRequest request;
  request.set_measure(asked.measure);
  if (!asked.bytes.empty()) {
    const std::optional<uint64_t> bytes = ParseBytes(asked.bytes);
    if (!bytes.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--bytes is \"", asked.bytes,
                       "\": give bytes, or a text such as 64MiB or 1.5GiB"));
    }
    request.set_job_bytes(*bytes);
  }
  OPTSTATE_ASSIGN_OR_RETURN(const v1::DescribeTiersReply reply,
                            Describe(context, request));
  Table table({{"MEMORY"}, {reply.memory().directory()}});
  AddMemory(reply.memory(), table);
  for (const v1::DirectoryTier& tier : reply.directories()) {
    AddDirectory(tier, table);
  }
  if (reply.has_auto_placement()) {
    AddAuto(asked.bytes, reply.auto_placement(), table);
  }
  return Print(context, reply, table);
}

}  // namespace

void AddDescribeTier(CLI::App& describe, Context& context) {
  CLI::App* tier = describe.add_subcommand(
      "tier",
      "Memory and disks: size, jobs, measured bandwidth, and where "
      "placement=\"auto\" would put a job");
  auto asked = std::make_shared<Asked>();
  tier->add_option("--bytes", asked->bytes,
                   "The records of a job that is to be placed, as 64GiB");
  tier->add_flag("--measure", asked->measure,
                 "Measures every directory anew, 2 s each; shows how many are "
                 "done and the time left");
  tier->callback([&context, asked] {
    context.run = [&context, asked] { return Run(context, *asked); };
  });
}

}  // namespace optstate::ctl
