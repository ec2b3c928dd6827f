// `optctl get users` and `optctl get quotas`: what users' jobs take, and what
// they may take.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/quota_text.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

std::string OfMost(uint32_t count, uint32_t max) {
  return absl::StrCat(count, "/", max == 0 ? "-" : absl::StrCat(max));
}

std::string OfMostBytes(uint64_t bytes, uint64_t max) {
  return absl::StrCat(HumanBytes(bytes), "/", max == 0 ? "-" : HumanBytes(max));
}

Table UsersTable(const v1::ListUsersReply& reply) {
  Table table({{"USER"},
               {"UID", /*right=*/true},
               {"JOBS", true},
               {"ASLEEP", true},
               {"SESSIONS", true},
               {"STATE", true},
               {"FRAMES", true},
               {"DISK", true},
               {"OPERATOR", false, /*wide_only=*/true}});
  for (const v1::UserUse& user : reply.users()) {
    const v1::Use& use = user.use();
    table.AddRow({UserName(user), absl::StrCat(user.uid()),
                  absl::StrCat(use.jobs()), absl::StrCat(use.sleeping_jobs()),
                  absl::StrCat(use.sessions()), HumanBytes(use.state_bytes()),
                  HumanBytes(use.frames_bytes()), HumanBytes(use.disk_bytes()),
                  user.is_operator() ? "yes" : "no"});
  }
  return table;
}

void AddQuota(const std::string& kind, const std::string& name,
              const v1::Use& use, const v1::Quota& quota, Table& table) {
  table.AddRow({kind, name, OfMost(use.jobs(), quota.jobs_max()),
                OfMost(use.sessions(), quota.sessions_max()),
                OfMostBytes(use.state_bytes(), quota.state_bytes_max()),
                OfMostBytes(use.frames_bytes(), quota.frames_bytes_max()),
                OfMostBytes(use.disk_bytes(), quota.disk_bytes_max()),
                quota.weight() == 0 ? "-" : absl::StrCat(quota.weight())});
}

Table QuotasTable(const v1::ListUsersReply& reply) {
  Table table({{"OF"},
               {"NAME"},
               {"JOBS", /*right=*/true},
               {"SESSIONS", true},
               {"STATE", true},
               {"FRAMES", true},
               {"DISK", true},
               {"WEIGHT", true}});
  for (const v1::UserUse& user : reply.users()) {
    AddQuota("user", UserName(user), user.use(), user.quota(), table);
  }
  for (const v1::GroupUse& group : reply.groups()) {
    AddQuota("group", group.group(), group.use(), group.quota(), table);
  }
  return table;
}

absl::Status Get(const Context& context, const std::string& user,
                 Table (*table_of)(const v1::ListUsersReply&)) {
  OPTSTATE_ASSIGN_OR_RETURN(auto client, context.Connect());
  v1::ListUsersRequest request;
  request.set_user(user);
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ListUsersReply reply,
                            client->ListUsers(request));
  return PrintAnswered(context, reply, table_of(reply));
}

}  // namespace

void AddGetUsers(CLI::App& get, Context& context) {
  CLI::App* users = get.add_subcommand(
      "users",
      "Every user with a job or a quota: jobs, ranks attached, bytes. Who is "
      "no operator sees itself");
  auto name = std::make_shared<std::string>();
  users->add_option("user", *name, "This user alone, by name or number");
  users->callback([&context, name] {
    context.run = [&context, name] { return Get(context, *name, UsersTable); };
  });

  CLI::App* quotas = get.add_subcommand(
      "quotas",
      "What users, and the members of groups together, have and may have: "
      "jobs, ranks attached, bytes, weight");
  quotas->callback([&context] {
    context.run = [&context] { return Get(context, "", QuotasTable); };
  });
}

}  // namespace optstate::ctl
