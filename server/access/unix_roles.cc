#include "server/access/unix_roles.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "proto/types/status_macros.h"
#include "server/access/unix_names.h"

namespace optstate::access {
namespace {

// Reads the groups, beside its own, of the process at the other end of a unix
// socket; none when the kernel does not say, so that it gets no right by them.
std::vector<gid_t> FurtherGroups(int socket) {
  std::vector<gid_t> groups(64);
  while (true) {
    auto size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) ==
        0) {
      groups.resize(size / sizeof(gid_t));
      return groups;
    }
    // The kernel says how much room it needs.
    if (errno != ERANGE || size <= groups.size() * sizeof(gid_t)) return {};
    groups.resize(size / sizeof(gid_t));
  }
}

}  // namespace

absl::StatusOr<UnixRoles> UnixRoles::Find(const v1::AccessSettings& access) {
  struct Setting {
    const char* name;
    const google::protobuf::RepeatedPtrField<std::string>* groups;
    Role role;
  };
  const Setting settings[] = {
      {"access.operator_groups", &access.operator_groups(), Role::kOperator},
      {"access.trainer_groups", &access.trainer_groups(), Role::kTrainer},
      {"access.viewer_groups", &access.viewer_groups(), Role::kViewer}};
  UnixRoles roles;
  for (const Setting& setting : settings) {
    for (const std::string& text : *setting.groups) {
      const absl::StatusOr<gid_t> group = FindGroup(text);
      if (!group.ok()) return Annotate(group.status(), setting.name);
      Role& role =
          roles.by_group_.try_emplace(*group, Role::kNone).first->second;
      role = std::max(role, setting.role);
    }
  }
  if (!access.trainer_groups().empty() || !access.viewer_groups().empty()) {
    roles.without_group_ = Role::kNone;
  }
  return roles;
}

Role UnixRoles::Of(const std::vector<gid_t>& groups) const {
  Role role = without_group_;
  for (const gid_t group : groups) {
    const auto found = by_group_.find(group);
    if (found != by_group_.end()) role = std::max(role, found->second);
  }
  return role;
}

Role UnixRoles::OfPeer(int socket, gid_t gid) const {
  // The kernel need not be asked where no group has a role.
  if (by_group_.empty()) return without_group_;
  std::vector<gid_t> groups = FurtherGroups(socket);
  groups.push_back(gid);
  return Of(groups);
}

}  // namespace optstate::access
