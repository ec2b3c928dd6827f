#include "client/ctl/quota_text.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/output.h"

namespace optstate::ctl {
namespace {

constexpr char kNone[] = "-";

// The way to change a quota: no call of a daemon does so.
constexpr char kHowToChange[] =
    "To change a limit, edit its KEY in the daemon's configuration (optstated "
    "--config FILE; of the packages /etc/optstate/optstated.yaml): under "
    "`quotas` an entry `user:` or `group:`, under `limits` that of all users. "
    "The daemon reads it anew at SIGHUP (`systemctl reload optstated`) or "
    "`optctl upgrade`, while jobs go on; what a user has stays, also above a "
    "lower limit.\n";

std::string Percent(double share) {
  return absl::StrFormat("%.0f%%", share * 100);
}

std::string Count(uint64_t count) { return absl::StrCat(count); }

// One resource of a user or a group.
struct Row {
  const char* resource;
  uint64_t used = 0;
  uint64_t max = 0;  // 0: no limit
  std::string key;
  std::string (*text)(uint64_t) = Count;
};

// Adds the rows of one holder of a quota.
void AddRows(const std::string& of, const v1::Use& use, const v1::Quota& quota,
             const v1::QuotaKeys& keys, Table* table) {
  const Row rows[] = {
      {"jobs", use.jobs(), quota.jobs_max(), keys.jobs_max()},
      {"sessions", use.sessions(), quota.sessions_max(), keys.sessions_max()},
      {"state", use.state_bytes(), quota.state_bytes_max(),
       keys.state_bytes_max(), HumanBytes},
      {"host budget", use.frames_bytes(), quota.frames_bytes_max(),
       keys.frames_bytes_max(), HumanBytes},
      {"disk", use.disk_bytes(), quota.disk_bytes_max(), keys.disk_bytes_max(),
       HumanBytes},
  };
  for (const Row& row : rows) {
    const bool has_limit = row.max != 0;
    const double share =
        has_limit ? static_cast<double>(row.used) / static_cast<double>(row.max)
                  : 0;
    table->AddRow({of, row.resource, row.text(row.used),
                   has_limit ? row.text(row.max) : kNone,
                   has_limit ? Percent(share) : kNone,
                   row.key.empty() ? kNone : row.key});
  }
}

}  // namespace

std::string UserName(const v1::UserUse& user) {
  return user.user().empty() ? absl::StrCat(user.uid()) : user.user();
}

Table QuotaTable(const v1::ListUsersReply& reply) {
  Table table({{"OF"},
               {"RESOURCE"},
               {"USED", /*right=*/true},
               {"LIMIT", true},
               {"SHARE", true},
               {"KEY"}});
  for (const v1::UserUse& user : reply.users()) {
    const std::string of = absl::StrCat("user ", UserName(user));
    AddRows(of, user.use(), user.quota(), user.keys(), &table);
    table.AddRow(
        {of, "cores and disks", kNone,
         absl::StrCat("weight ", user.quota().weight()), Percent(user.part()),
         user.keys().weight().empty() ? "default" : user.keys().weight()});
  }
  for (const v1::GroupUse& group : reply.groups()) {
    AddRows(absl::StrCat("group ", group.group()), group.use(), group.quota(),
            group.keys(), &table);
  }
  return table;
}

std::string QuotaNotes(const v1::ListUsersReply& reply) {
  std::string notes;
  for (const v1::UserUse& user : reply.users()) {
    if (!user.is_operator()) continue;
    absl::StrAppend(&notes, "User ", UserName(user),
                    " is root or the daemon's user: no quota and no limit of "
                    "users concerns it, but for the weight.\n");
  }
  absl::StrAppend(&notes, kHowToChange);
  return notes;
}

absl::Status CheckTellsKeys(const v1::ListUsersReply& reply) {
  const bool tells =
      (!reply.users().empty() || !reply.groups().empty()) &&
      absl::c_all_of(reply.users(),
                     [](const v1::UserUse& one) { return one.has_keys(); }) &&
      absl::c_all_of(reply.groups(),
                     [](const v1::GroupUse& one) { return one.has_keys(); });
  if (tells) return absl::OkStatus();
  return absl::UnimplementedError(
      "this daemon is older than optctl, and does not say where limits come "
      "from: `optctl get quotas` shows what it says; `optctl upgrade` puts a "
      "newer one in its place");
}

}  // namespace optstate::ctl
