#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/ctl/command.h"
#include "client/ctl/job_settings.h"
#include "client/ctl/lock_text.h"
#include "client/ctl/names.h"
#include "client/ctl/sleep_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Returns whether values known to an engine alone are missing.
bool NoEngineTells(const v1::Job& job) {
  return job.ranks_unknown() || job.engine_pid() == 0;
}

void AddLayout(const v1::Job& job, Table& table) {
  if (job.state_unknown()) {
    table.AddRow({"layout", kUnknown});
    return;
  }
  table.AddRow({"optimizer", Name(job.optimizer())});
  table.AddRow(
      {"layout", absl::StrCat(HumanCount(job.parameter_count()),
                              " parameters, ", HumanCount(job.element_count()),
                              " elements, ", job.group_count(), " group(s)")});
  table.AddRow({"layout hash", absl::BytesToHexString(job.layout_hash())});
  table.AddRow({"partition", Name(job.partition())});
  table.AddRow({"accumulate", job.accumulate() ? "yes" : "no"});
  table.AddRow({"ephemeral", job.ephemeral() ? "yes" : "no"});
}

void AddSteps(const v1::Job& job, Table& table) {
  if (job.state_unknown()) {
    table.AddRow({"committed step", kUnknown});
    return;
  }
  const v1::StepOutcome& last = job.last_outcome();
  table.AddRow({"committed step", absl::StrCat(job.committed_step())});
  table.AddRow({"committed at", HumanTime(job.committed_at())});
  table.AddRow({"last step", Outcome(last)});
  if (last.step() != 0) {
    table.AddRow(
        {"  gradient norm", absl::StrFormat("%g", last.gradient_norm())});
    table.AddRow(
        {"  clip coefficient", absl::StrFormat("%g", last.clip_coefficient())});
    table.AddRow(
        {"  update", absl::StrFormat("%.3f ms", last.update_ns() / 1e6)});
  }
  table.AddRow({"skipped steps", NoEngineTells(job)
                                     ? kUnknown
                                     : absl::StrCat(job.skipped_steps())});
  table.AddRow({"recovered steps",
                absl::StrCat(job.recovered_steps(), ", with ",
                             job.rolled_back_runs(), " runs put back")});
  if (job.has_speculation()) {
    table.AddRow(
        {"begun early",
         absl::StrCat(job.speculation().steps_begun(), " steps, ",
                      job.speculation().steps_rolled_back(), " rolled back")});
  }
  table.AddRow({"open step", NoEngineTells(job)        ? kUnknown
                             : job.open_step().empty() ? "-"
                                                       : job.open_step()});
  if (!job.open_load().empty()) {
    table.AddRow({"open load", job.open_load()});
  }
}

// Returns a text such as "2026-05-01T12:00:00Z, no damage; 3 scrubs".
std::string VerifiedText(const v1::Job& job) {
  const v1::DiskState& disk = job.disk();
  if (!disk.has_last_verified_at()) return "not since the engine started";
  return absl::StrCat(
      HumanTime(disk.last_verified_at()), ", ",
      disk.damaged_records() == 0
          ? "no damage"
          : absl::StrCat(disk.damaged_records(),
                         " DAMAGED records, named in the log and by `optctl "
                         "verify ",
                         job.name(), "`"),
      "; ", disk.scrubs(), " scrubs");
}

// Adds how parameters that are on disk were fetched.
void AddParameters(const v1::ParameterCache& cache, Table& table) {
  table.AddRow(
      {"  parameters", absl::StrCat("on disk, ", HumanBytes(cache.bytes()),
                                    " of them in memory at once")});
  table.AddRow(
      {"    fetched",
       absl::StrCat(HumanCount(cache.from_frames()), " parts from records, ",
                    HumanCount(cache.hits()), " read ahead or before, ",
                    HumanCount(cache.misses()), " from disk")});
  table.AddRow({"    prefetched",
                absl::StrCat(HumanCount(cache.prefetched()), " parts, ",
                             HumanCount(cache.refused()), " had no room")});
}

// Adds what stays on devices from step to step, if anything.
void AddResidents(const v1::DeviceUpdates& updates, Table& table) {
  uint64_t elements = 0;
  uint64_t bytes = 0;
  for (const v1::DeviceUse& use : updates.uses()) {
    elements += use.resident_elements();
    bytes += use.resident_bytes();
  }
  if (bytes > 0) table.AddRow({"  resident", ResidentText(elements, bytes)});
  if (updates.log_bytes() > 0) {
    table.AddRow({"  log", absl::StrCat(HumanBytes(updates.log_bytes()),
                                        " of host memory")});
  }
}

// Adds what devices update, if anything.
void AddDeviceUpdates(const v1::Job& job, Table& table) {
  if (!job.has_device_updates()) return;
  const v1::DeviceUpdates& updates = job.device_updates();
  table.AddRow({"updates", OffloadText(updates.offload_fraction())});
  for (const std::string& device : updates.devices()) {
    table.AddRow({"  device", device});
  }
  table.AddRow(
      {"  elements",
       absl::StrCat(HumanCount(updates.device_elements()), " by devices, ",
                    HumanCount(updates.cpu_elements()), " by the CPU")});
  if (updates.too_large_elements() > 0) {
    table.AddRow(
        {"  too large",
         absl::StrCat(HumanCount(updates.too_large_elements()),
                      " of these in parameters that fit in no buffer")});
  }
  AddResidents(updates, table);
  if (!updates.problem().empty()) {
    table.AddRow({"  problem", updates.problem()});
  }
}

// Says, of a job whose updates may wait for its disks, how long they did.
std::string WaitedText(const v1::DiskState& disk) {
  if (disk.step_ns() == 0) return "";
  return absl::StrFormat("; updates waited %.1f of %.1f ms for it",
                         static_cast<double>(disk.step_waited_ns()) / 1e6,
                         static_cast<double>(disk.step_ns()) / 1e6);
}

std::string ThroughputText(const v1::DirectoryIo& io) {
  const double s = static_cast<double>(io.step_busy_ns()) / 1e9;
  const auto rate = [s](uint64_t bytes) {
    return HumanBytes(static_cast<uint64_t>(static_cast<double>(bytes) / s));
  };
  return absl::StrCat(HumanBytes(io.step_bytes_read()), " read, ",
                      HumanBytes(io.step_bytes_written()), " written, at ",
                      rate(io.step_bytes_read() + io.step_bytes_written()),
                      absl::StrFormat("/s while busy, %.1f ms", s * 1e3));
}

void AddDisk(const v1::Job& job, Table& table) {
  const bool is_nvme = job.storage().placement() == v1::PLACEMENT_NVME;
  if (!is_nvme && !job.has_disk() && job.storage().placement_reason().empty()) {
    return;
  }
  table.AddRow({"placement", is_nvme ? "nvme" : "host"});
  if (is_nvme) {
    table.AddRow(
        {"  host budget", HumanBytes(job.storage().host_budget_bytes())});
  }
  if (!job.storage().placement_reason().empty()) {
    table.AddRow({"  why", job.storage().placement_reason()});
  }
  table.AddRow({"  durability", DurabilityText(job.storage())});
  if (!job.has_disk()) return;
  const v1::DiskState& disk = job.disk();
  table.AddRow({"  durable step", absl::StrCat(disk.durable_step())});
  table.AddRow(
      {"  records", absl::StrCat(disk.records(), " of up to ",
                                 HumanBytes(disk.frame_bytes()), ", ",
                                 disk.frames(), " in memory at once")});
  if (disk.has_parameter_cache()) AddParameters(disk.parameter_cache(), table);
  table.AddRow({"  disk", absl::StrCat(HumanBytes(disk.bytes_read()), " read, ",
                                       HumanBytes(disk.bytes_written()),
                                       " written, by ", disk.io_engine())});
  table.AddRow({"  disk, last step",
                absl::StrCat(HumanBytes(disk.step_bytes_read()), " read, ",
                             HumanBytes(disk.step_bytes_written()), " written",
                             WaitedText(disk))});
  table.AddRow(
      {"  CPU of I/O", absl::StrFormat("%.1f ms a GB", disk.cpu_ms_per_gb())});
  table.AddRow({"  verified", VerifiedText(job)});
  for (int i = 0; i < disk.directories_size(); ++i) {
    const bool has_weight = i < job.storage().directory_weights_size();
    table.AddRow(
        {"  directory",
         absl::StrCat(
             disk.directories(i),
             has_weight
                 ? absl::StrCat(", weight ", job.storage().directory_weights(i))
                 : "")});
    // The engine of a former build does not tell.
    if (i >= disk.directory_io_size()) continue;
    const v1::DirectoryIo& io = disk.directory_io(i);
    table.AddRow({"    read", absl::StrCat(HumanBytes(io.bytes_read()), " in ",
                                           HumanCount(io.reads()), " reads")});
    table.AddRow(
        {"    written", absl::StrCat(HumanBytes(io.bytes_written()), " in ",
                                     HumanCount(io.writes()), " writes, ",
                                     HumanCount(io.syncs()), " syncs")});
    table.AddRow({"    errors, queue",
                  absl::StrCat(io.errors(), " errors, ", io.queue_depth(),
                               " requests under way")});
    if (io.step_busy_ns() != 0) {
      table.AddRow({"    last step", ThroughputText(io)});
    }
  }
}

std::string Milliseconds(uint64_t ns) {
  return absl::StrFormat("%.3f", static_cast<double>(ns) / 1e6);
}

// Adds rows of the form "phase  last, mean".
void AddTimes(const v1::Job& job, Table& table) {
  if (!job.has_last_step_times()) return;
  const v1::StepTimes& last = job.last_step_times();
  const v1::StepTimes& mean = job.mean_step_times();
  table.AddRow({"step times",
                absl::StrCat("ms, of the last step; mean of ", mean.steps())});
  const auto add = [&](const char* phase, uint64_t of_last, uint64_t of_mean) {
    table.AddRow({phase, absl::StrCat(Milliseconds(of_last), "; ",
                                      Milliseconds(of_mean))});
  };
  add("  staging", last.staging_ns(), mean.staging_ns());
  add("  waiting for ranks", last.waiting_ns(), mean.waiting_ns());
  add("  norm and decision", last.decide_ns(), mean.decide_ns());
  add("  update", last.update_ns(), mean.update_ns());
  if (mean.has_disk_wait_ns()) {
    add("    disk wait", last.disk_wait_ns(), mean.disk_wait_ns());
  }
  add("  publish", last.publish_ns(), mean.publish_ns());
  if (last.update_bytes() == 0) return;
  std::string bandwidth =
      absl::StrCat(HumanBytes(last.update_bytes()), " moved");
  if (last.memory_share() > 0) {
    absl::StrAppendFormat(&bandwidth, " at %.0f%%; %.0f%% of %.1f GB/s",
                          last.memory_share() * 100, mean.memory_share() * 100,
                          job.memory_bytes_per_s() / 1e9);
  }
  table.AddRow({"  memory in update", bandwidth});
}

// Returns a text such as "1.0 MiB float32, 1.0 MiB in 4.0 KiB pages, node 0:
// 1.0 MiB".
std::string Describe(const v1::ArrayBytes& array) {
  std::string text =
      absl::StrCat(HumanBytes(array.bytes()), " ", array.dtype());
  for (const v1::PageBytes& pages : array.pages()) {
    absl::StrAppend(&text, ", ", HumanBytes(pages.bytes()), " in ",
                    HumanBytes(pages.page_bytes()), " pages");
  }
  for (const v1::NodeBytes& node : array.nodes()) {
    absl::StrAppend(&text, ", node ", node.node(), ": ",
                    HumanBytes(node.bytes()));
  }
  return text;
}

void AddState(const v1::Job& job, Table& table) {
  table.AddRow({"state", absl::StrCat(HumanBytes(job.state_bytes()), " in ",
                                      job.state_dir())});
  if (job.has_memory_lock()) {
    table.AddRow({"  locked in memory", LockText(job.memory_lock())});
  }
  for (const v1::ArrayBytes& array : job.arrays()) {
    table.AddRow({absl::StrCat("  ", array.name()), Describe(array)});
  }
}

void AddSessions(const v1::Job& job, Table& table) {
  table.AddRow(
      {"ranks",
       absl::StrCat(
           job.ranks_unknown() ? kUnknown : absl::StrCat(job.session_count()),
           " of ",
           job.state_unknown() ? kUnknown : absl::StrCat(job.world_size()),
           " attached")});
  for (const v1::SessionInfo& session : job.sessions()) {
    table.AddRow(
        {absl::StrCat("  rank ", session.rank()),
         absl::StrCat("pid ", session.pid(), ", ", session.wire(), ", ",
                      session.staged_parameters(), " staged, gradients ",
                      HumanBytes(session.gradient_bytes()))});
  }
}

// Returns a text such as "3 failed_precondition, 1 aborted".
std::string RefusedText(const v1::WireBytes& wire) {
  return absl::StrJoin(
      wire.refused(), ", ",
      [](std::string* text, const v1::RefusedRequests& refused) {
        absl::StrAppend(text, refused.requests(), " ", refused.code());
      });
}

// Adds what has passed between ranks and the engine since that started.
void AddWires(const v1::Job& job, Table& table) {
  for (const v1::WireBytes& wire : job.wires()) {
    table.AddRow(
        {absl::StrCat("  over ", wire.wire()),
         absl::StrCat(HumanBytes(wire.gradient_bytes()), " of gradients, ",
                      HumanBytes(wire.sent_bytes()), " sent, ",
                      HumanBytes(wire.load_bytes()), " loaded")});
    if (wire.requests_waiting() != 0 || wire.replies_waiting() != 0) {
      table.AddRow(
          {"    waiting", absl::StrCat(wire.requests_waiting(), " requests, ",
                                       wire.replies_waiting(), " replies")});
    }
    if (wire.refused_size() != 0) {
      table.AddRow({"    refused", RefusedText(wire)});
    }
  }
}

// Adds who may use the job. A daemon of a former build does not tell.
void AddAccess(const v1::Job& job, Table& table) {
  table.AddRow({"owner uid", absl::StrCat(job.uid())});
  if (!job.has_access()) return;
  const v1::JobAccess& access = job.access();
  table.AddRow({"group", access.group().empty() ? "-" : access.group()});
  table.AddRow({"private", access.is_private() ? "yes" : "no"});
  if (access.is_private()) {
    table.AddRow({"readers", access.readers().empty()
                                 ? "-"
                                 : absl::StrJoin(access.readers(), ", ")});
  }
}

absl::Status Run(const Context& context, const std::string& name) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::Job job, client->GetJob(name, /*memory=*/true));
  Table table({{"JOB"}, {job.name()}});
  table.AddRow({"phase", Name(job.phase())});
  if (!job.reason().empty()) table.AddRow({"reason", job.reason()});
  if (job.has_sleep()) table.AddRow({"asleep", SleepStateText(job.sleep())});
  AddAccess(job, table);
  table.AddRow({"created",
                job.state_unknown() ? kUnknown : HumanTime(job.created_at())});
  AddLayout(job, table);
  AddSteps(job, table);
  AddTimes(job, table);
  AddState(job, table);
  AddDisk(job, table);
  AddDeviceUpdates(job, table);
  AddSessions(job, table);
  AddWires(job, table);
  table.AddRow({"engine", absl::StrCat("pid ", job.engine_pid(), ", ",
                                       job.engine_restarts(), " restart(s)")});
  OPTSTATE_RETURN_IF_ERROR(Print(context, job, table));
  if (!job.ranks_unknown()) return absl::OkStatus();
  google::protobuf::RepeatedPtrField<v1::UnansweredJob> unanswered;
  unanswered.Add()->set_name(job.name());
  unanswered[0].set_reason(job.reason());
  return CheckAnswered(unanswered);
}

}  // namespace

void AddDescribeCommand(CLI::App& app, Context& context) {
  CLI::App* command =
      app.add_subcommand("describe", "Everything about one thing");
  command->require_subcommand(1);
  CLI::App* job = command->add_subcommand(
      "job", "One job: state by array, ranks, last and open step");
  auto name = std::make_shared<std::string>();
  job->add_option("name", *name, "The job's name")->required();
  job->callback([&context, name] {
    context.run = [&context, name] { return Run(context, *name); };
  });
  AddDescribeTier(*command, context);
  AddDescribeDevice(*command, context);
}

}  // namespace optstate::ctl
