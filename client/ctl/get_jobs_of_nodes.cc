// optctl get jobs -A: the jobs of several nodes, each with a daemon of its own.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/endpoints.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/names.h"
#include "client/ctl/nodes_compare.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Nodes that are asked at the same time: one that gives no answer takes a whole
// timeout.
constexpr size_t kAskedAtOnceMax = 32;

// One daemon and its answers; `status` is why there are none.
struct Node {
  std::string endpoint;
  std::string host;
  absl::Status status;
  std::unique_ptr<AdminClient> client;
  NodeJobs jobs;
};

// Calls `ask` with each node, some at the same time.
void ForEach(std::vector<Node>& nodes, absl::FunctionRef<void(Node&)> ask) {
  std::atomic<size_t> next = 0;
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < std::min(nodes.size(), kAskedAtOnceMax); ++i) {
    threads.emplace_back([&] {
      for (size_t n = next++; n < nodes.size(); n = next++) ask(nodes[n]);
    });
  }
}

void AskFirst(Node& node) {
  absl::StatusOr<v1::ServerStatus> server = node.client->GetStatus();
  if (!server.ok()) {
    node.status = server.status();
    return;
  }
  node.host = server->host();
  absl::StatusOr<v1::ListJobsReply> reply = node.client->ListJobs();
  if (reply.ok()) node.jobs.first = *std::move(reply);
  node.status = reply.status();
}

void AskAgain(Node& node) {
  absl::StatusOr<v1::ListJobsReply> reply = node.client->ListJobs();
  if (reply.ok()) node.jobs.second = *std::move(reply);
  node.status = reply.status();
}

absl::StatusOr<std::vector<Node>> MakeNodes(const Context& context) {
  OPTSTATE_ASSIGN_OR_RETURN(
      std::vector<std::string> endpoints,
      NamedEndpoints(context.endpoints, context.endpoints_file));
  if (endpoints.empty()) {
    if (!context.endpoints_file.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--endpoints-file ", context.endpoints_file, " names no endpoint"));
    }
    endpoints.emplace_back();  // the node's daemon
  }
  std::vector<Node> nodes;
  for (const std::string& endpoint : endpoints) {
    auto client = AdminClient::Make(endpoint, absl::Seconds(context.timeout_s));
    if (absl::IsInvalidArgument(client.status())) return client.status();
    Node node;
    node.endpoint = client.ok() ? (*client)->address() : endpoint;
    node.status = client.status();
    if (client.ok()) node.client = *std::move(client);
    nodes.push_back(std::move(node));
  }
  return nodes;
}

// Returns the name of each node: its host's, or its endpoint where several
// daemons are on one host.
std::vector<std::string> NamesOf(const std::vector<Node>& nodes) {
  std::map<std::string, int> daemons;
  for (const Node& node : nodes) ++daemons[node.host];
  std::vector<std::string> names;
  for (const Node& node : nodes) {
    const bool is_only = !node.host.empty() && daemons[node.host] == 1;
    names.push_back(is_only ? node.host : node.endpoint);
  }
  return names;
}

uint64_t DurableStep(const v1::Job& job) {
  return std::max(job.disk().durable_step(), job.last_outcome().durable_step());
}

std::vector<std::string> RowOf(const v1::Job& job, const std::string& name,
                               const std::string& endpoint,
                               const std::string& note, int64_t now_s) {
  const auto of_state = [&job](std::string text) {
    return job.state_unknown() ? kUnknown : std::move(text);
  };
  const uint64_t durable = DurableStep(job);
  return {job.name(),
          name,
          Name(job.phase()),
          of_state(absl::StrCat(job.committed_step())),
          of_state(durable == 0 ? "-" : absl::StrCat(durable)),
          absl::StrCat(job.ranks_unknown() ? kUnknown
                                           : absl::StrCat(job.session_count()),
                       "/", of_state(absl::StrCat(job.world_size()))),
          HumanBytes(job.state_bytes()),
          note,
          endpoint,
          of_state(HumanAge(job.committed_at(), now_s)),
          absl::StrCat(job.uid())};
}

using Differences = std::map<std::string, std::string>;

std::string NoteOf(const v1::Job& job, const Differences& differences) {
  const auto found = differences.find(job.name());
  return found == differences.end()
             ? "-"
             : absl::StrCat("nodes differ: ", found->second);
}

Table TableOf(const std::vector<Node>& nodes, const Differences& differences) {
  Table table({{"NAME"},
               {"NODE"},
               {"PHASE"},
               {"STEP", /*right=*/true},
               {"DURABLE", true},
               {"RANKS", true},
               {"STATE", true},
               {"NOTE"},
               {"ENDPOINT", false, /*wide_only=*/true},
               {"LAST COMMIT", true, true},
               {"UID", true, true}});
  const std::vector<std::string> names = NamesOf(nodes);
  const int64_t now_s = absl::ToUnixSeconds(absl::Now());
  // By job; the nodes of one in the order in which they were named.
  std::multimap<std::string, std::vector<std::string>> rows;
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (const v1::Job& job : nodes[i].jobs.second.jobs()) {
      rows.emplace(job.name(), RowOf(job, names[i], nodes[i].endpoint,
                                     NoteOf(job, differences), now_s));
    }
  }
  for (auto& [job, row] : rows) table.AddRow(std::move(row));
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].status.ok()) continue;
    const std::string error =
        absl::StrReplaceAll(nodes[i].status.message(), {{"\n", " "}});
    table.AddRow({kUnknown, names[i], kUnknown, kUnknown, kUnknown, kUnknown,
                  kUnknown, error, nodes[i].endpoint, kUnknown, kUnknown});
  }
  return table;
}

absl::StatusOr<google::protobuf::Struct> ToStruct(
    const google::protobuf::Message& message) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::string json,
                            RenderMessage(message, OutputFormat::kJson));
  google::protobuf::Struct values;
  const auto status =
      google::protobuf::util::JsonStringToMessage(json, &values);
  if (status.ok()) return values;
  return absl::InternalError(absl::StrCat("JSON: ", status.ToString()));
}

// Returns {"nodes": [{"endpoint", "host", "jobs", "unanswered"} or {"endpoint",
// "error", "exit_code"}, ...], "differences": {JOB: text}}.
absl::StatusOr<google::protobuf::Struct> MessageOf(
    const std::vector<Node>& nodes, const Differences& differences) {
  google::protobuf::Struct all;
  google::protobuf::ListValue* const list =
      (*all.mutable_fields())["nodes"].mutable_list_value();
  for (const Node& node : nodes) {
    google::protobuf::Struct* const said =
        list->add_values()->mutable_struct_value();
    if (node.status.ok()) {
      OPTSTATE_ASSIGN_OR_RETURN(*said, ToStruct(node.jobs.second));
      (*said->mutable_fields())["host"].set_string_value(node.host);
    } else {
      (*said->mutable_fields())["error"].set_string_value(
          std::string(node.status.message()));
      (*said->mutable_fields())["exit_code"].set_number_value(
          ExitCode(node.status));
    }
    (*said->mutable_fields())["endpoint"].set_string_value(node.endpoint);
  }
  google::protobuf::Struct* const differing =
      (*all.mutable_fields())["differences"].mutable_struct_value();
  for (const auto& [job, text] : differences) {
    (*differing->mutable_fields())[job].set_string_value(text);
  }
  return all;
}

// Returns the error of the first node that gave no answer, which names all of
// these; else that of engines that gave none.
absl::Status StatusOf(const std::vector<Node>& nodes) {
  std::vector<std::string> silent;
  absl::Status first;
  absl::Status engines;
  for (const Node& node : nodes) {
    if (node.status.ok()) {
      engines.Update(Annotate(CheckAnswered(node.jobs.second.unanswered()),
                              node.endpoint));
      continue;
    }
    first.Update(node.status);
    silent.push_back(node.endpoint);
  }
  if (first.ok()) return engines;
  return absl::Status(
      first.code(),
      absl::StrCat(silent.size(), " of ", nodes.size(),
                   " nodes gave no answer: ", absl::StrJoin(silent, ", ")));
}

}  // namespace

absl::Status GetJobsOfAllNodes(const Context& context) {
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<Node> nodes, MakeNodes(context));
  ForEach(nodes, [](Node& node) {
    if (node.status.ok()) AskFirst(node);
  });
  ForEach(nodes, [](Node& node) {
    if (node.status.ok()) AskAgain(node);
  });
  std::vector<NodeJobs> answered;
  for (const Node& node : nodes) {
    if (node.status.ok()) answered.push_back(node.jobs);
  }
  const Differences differences = FindDifferences(answered);
  google::protobuf::Struct message;
  if (context.machine_readable()) {
    OPTSTATE_ASSIGN_OR_RETURN(message, MessageOf(nodes, differences));
  }
  OPTSTATE_RETURN_IF_ERROR(
      Print(context, message, TableOf(nodes, differences)));
  return StatusOf(nodes);
}

}  // namespace optstate::ctl
