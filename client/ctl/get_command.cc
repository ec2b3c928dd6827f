#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/ctl/command.h"
#include "client/ctl/names.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

std::vector<std::string> RowOf(const v1::Job& job, int64_t now_s) {
  const auto of_state = [&job](std::string text) {
    return job.state_unknown() ? kUnknown : std::move(text);
  };
  return {job.name(),
          Name(job.phase()),
          of_state(absl::StrCat(job.committed_step())),
          absl::StrCat(job.ranks_unknown() ? kUnknown
                                           : absl::StrCat(job.session_count()),
                       "/", of_state(absl::StrCat(job.world_size()))),
          of_state(HumanCount(job.parameter_count())),
          of_state(HumanCount(job.element_count())),
          HumanBytes(job.state_bytes()),
          of_state(Name(job.optimizer())),
          of_state(HumanAge(job.committed_at(), now_s)),
          absl::StrCat(job.uid()),
          of_state(Name(job.partition())),
          of_state(Outcome(job.last_outcome())),
          absl::StrCat(job.engine_pid()),
          absl::StrCat(job.engine_restarts()),
          job.reason().empty() ? "-" : job.reason()};
}

absl::Status GetJobs(const Context& context) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::ListJobsReply reply, client->ListJobs());
  Table table({{"NAME"},
               {"PHASE"},
               {"STEP", /*right=*/true},
               {"RANKS", true},
               {"PARAMS", true},
               {"ELEMENTS", true},
               {"STATE", true},
               {"OPTIMIZER"},
               {"LAST COMMIT", true},
               {"UID", true, /*wide_only=*/true},
               {"PARTITION", false, true},
               {"LAST STEP", false, true},
               {"ENGINE PID", true, true},
               {"RESTARTS", true, true},
               {"REASON", false, true}});
  const int64_t now_s = absl::ToUnixSeconds(absl::Now());
  for (const v1::Job& job : reply.jobs()) {
    table.AddRow(RowOf(job, now_s));
  }
  return PrintAnswered(context, reply, table);
}

absl::Status GetSessions(const Context& context, const std::string& job) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::ListSessionsReply reply,
                            client->ListSessions(job));
  Table table({{"JOB"},
               {"RANK", true},
               {"PID", true},
               {"WIRE"},
               {"STEP", true},
               {"STAGED", true},
               {"GRADIENTS", true},
               {"AGE", true},
               {"UID", true, true},
               {"CLIENT", false, true}});
  const int64_t now_s = absl::ToUnixSeconds(absl::Now());
  for (const v1::SessionInfo& session : reply.sessions()) {
    table.AddRow({session.job(), absl::StrCat(session.rank()),
                  absl::StrCat(session.pid()), session.wire(),
                  absl::StrCat(session.committed_step()),
                  absl::StrCat(session.staged_parameters()),
                  HumanBytes(session.gradient_bytes()),
                  HumanAge(session.attached_at(), now_s),
                  absl::StrCat(session.uid()), session.client_version()});
  }
  return PrintAnswered(context, reply, table);
}

absl::Status GetDevices(const Context& context) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::DescribeDevicesReply reply,
                            client->DescribeDevices());
  Table table({{"INDEX", true},
               {"NAME"},
               {"MEMORY", true},
               {"JOBS", true},
               {"BUFFERS", true},
               {"ELEMENTS/S", true},
               {"PROBLEM"}});
  for (const v1::DeviceReport& device : reply.devices()) {
    uint64_t buffer_bytes = 0;
    double elements_per_s = 0;
    std::string problem = "-";
    for (const v1::DeviceJob& job : device.jobs()) {
      buffer_bytes += job.use().buffer_bytes();
      elements_per_s += job.use().elements_per_s();
      if (!job.use().problem().empty()) {
        problem = absl::StrCat(job.job(), ": ", job.use().problem());
      }
    }
    table.AddRow({absl::StrCat(device.index()), device.name(),
                  HumanBytes(device.memory_bytes()),
                  absl::StrCat(device.jobs_size()), HumanBytes(buffer_bytes),
                  HumanCount(static_cast<uint64_t>(elements_per_s)), problem});
  }
  if (!reply.note().empty() && !context.machine_readable()) {
    std::cerr << reply.note() << std::endl;
  }
  return PrintAnswered(context, reply, table);
}

absl::Status GetParams(const Context& context, const std::string& job) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  OPTSTATE_ASSIGN_OR_RETURN(v1::ListParametersReply reply,
                            client->ListParameters(job));
  Table table({{"INDEX", true},
               {"NAME"},
               {"SHAPE"},
               {"DTYPE"},
               {"GROUP", true},
               {"OWNER", true},
               {"STEPS", true},
               {"NUMEL", true, true},
               {"GRADIENT", false, true},
               {"PIECES", true, true},
               {"STAGED", false, true}});
  for (const v1::ParameterInfo& info : reply.parameters()) {
    const v1::Parameter& parameter = info.parameter();
    table.AddRow(
        {absl::StrCat(info.index()), parameter.name(), Shape(parameter),
         Name(parameter.dtype()), absl::StrCat(parameter.group()),
         absl::StrCat(info.owner_rank()), absl::StrCat(info.step_count()),
         absl::StrCat(parameter.numel()), Name(parameter.gradient_dtype()),
         absl::StrCat(info.piece_count()), info.staged() ? "yes" : "no"});
  }
  return Print(context, reply, table);
}

}  // namespace

void AddGetCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("get", "Lists of what the daemon has");
  command->require_subcommand(1);

  CLI::App* jobs = command->add_subcommand(
      "jobs", "Every job: phase, committed step, ranks attached, bytes");
  auto all_nodes = std::make_shared<bool>(false);
  jobs->add_flag("-A,--all-nodes", *all_nodes,
                 "Of every --endpoint and line of --endpoints-file: node, "
                 "step, durable step, and what differs between nodes");
  jobs->callback([&context, all_nodes] {
    context.run = [&context, all_nodes] {
      return *all_nodes ? GetJobsOfAllNodes(context) : GetJobs(context);
    };
  });

  CLI::App* sessions = command->add_subcommand(
      "sessions", "Every attached rank: process, wire, what it has staged");
  auto session_job = std::make_shared<std::string>();
  sessions->add_option("--job", *session_job, "Of this job alone");
  sessions->callback([&context, session_job] {
    context.run = [&context, session_job] {
      return GetSessions(context, *session_job);
    };
  });

  CLI::App* devices = command->add_subcommand(
      "devices", "Every device that may update elements: memory, jobs, speed");
  devices->callback(
      [&context] { context.run = [&context] { return GetDevices(context); }; });

  AddGetUsers(*command, context);

  CLI::App* params = command->add_subcommand(
      "params", "The parameters of a job: shape, owner, steps taken");
  auto params_job = std::make_shared<std::string>();
  params->add_option("job,--job", *params_job, "The job's name")->required();
  params->callback([&context, params_job] {
    context.run = [&context, params_job] {
      return GetParams(context, *params_job);
    };
  });
}

}  // namespace optstate::ctl
