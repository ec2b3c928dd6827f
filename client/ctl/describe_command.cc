#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/command.h"
#include "client/ctl/names.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

void AddSteps(const v1::Job& job, Table& table) {
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
  table.AddRow({"skipped steps", absl::StrCat(job.skipped_steps())});
  table.AddRow({"recovered steps",
                absl::StrCat(job.recovered_steps(), ", with ",
                             job.rolled_back_runs(), " runs put back")});
  table.AddRow({"open step", job.open_step().empty() ? "-" : job.open_step()});
}

void AddState(const v1::Job& job, Table& table) {
  table.AddRow({"state", absl::StrCat(HumanBytes(job.state_bytes()), " in ",
                                      job.state_dir())});
  for (const v1::ArrayBytes& array : job.arrays()) {
    table.AddRow({absl::StrCat("  ", array.name()),
                  absl::StrCat(HumanBytes(array.bytes()), " ", array.dtype())});
  }
}

void AddSessions(const v1::Job& job, Table& table) {
  table.AddRow({"ranks", absl::StrCat(job.session_count(), " of ",
                                      job.world_size(), " attached")});
  for (const v1::SessionInfo& session : job.sessions()) {
    table.AddRow(
        {absl::StrCat("  rank ", session.rank()),
         absl::StrCat("pid ", session.pid(), ", ", session.wire(), ", ",
                      session.staged_parameters(), " staged, gradients ",
                      HumanBytes(session.gradient_bytes()))});
  }
}

absl::Status Run(const Context& context, const std::string& name) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::Job job, client->GetJob(name));
  Table table({{"JOB"}, {job.name()}});
  table.AddRow({"phase", Name(job.phase())});
  if (!job.reason().empty()) table.AddRow({"reason", job.reason()});
  table.AddRow({"owner uid", absl::StrCat(job.uid())});
  table.AddRow({"created", HumanTime(job.created_at())});
  table.AddRow({"optimizer", Name(job.optimizer())});
  table.AddRow(
      {"layout", absl::StrCat(HumanCount(job.parameter_count()),
                              " parameters, ", HumanCount(job.element_count()),
                              " elements, ", job.group_count(), " group(s)")});
  table.AddRow({"layout hash", absl::BytesToHexString(job.layout_hash())});
  table.AddRow({"partition", Name(job.partition())});
  table.AddRow({"accumulate", job.accumulate() ? "yes" : "no"});
  table.AddRow({"ephemeral", job.ephemeral() ? "yes" : "no"});
  AddSteps(job, table);
  AddState(job, table);
  AddSessions(job, table);
  table.AddRow({"engine", absl::StrCat("pid ", job.engine_pid(), ", ",
                                       job.engine_restarts(), " restart(s)")});
  return Print(context, job, table);
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
}

}  // namespace optstate::ctl
