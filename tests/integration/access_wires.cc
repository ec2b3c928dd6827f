#include "tests/integration/access_wires.h"

#include <openssl/sha.h>
#include <pwd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/endpoint.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// Users and a group that the machine's tables need not have.
constexpr uid_t kViewerUid = 4711;
constexpr uid_t kStrangerUid = 4712;
constexpr uid_t kOperatorUid = 4714;
constexpr uid_t kOwnerUid = 4715;  // where there are no mates
constexpr uid_t kRolelessUid = 4716;
constexpr gid_t kRolelessGroup = 4793;
constexpr gid_t kViewerGroup = 4794;
constexpr gid_t kTrainerGroup = 4795;
constexpr gid_t kOtherTrainerGroup = 4796;
constexpr gid_t kOperatorGroup = 4799;
// The uid that stands for no user (access::Caller::kNobody).
constexpr uid_t kNobody = 65534;

// Connections of callers who show tokens, or have none to show, all count as
// one user's.
constexpr char kLimits[] = "limits: {user_grpc_connections_max: 1024}\n";

constexpr const char* kVariables[] = {"OPTSTATE_TLS_CA",
                                      "OPTSTATE_TLS_CERTIFICATE",
                                      "OPTSTATE_TLS_KEY", "OPTSTATE_TOKEN"};

// The functions of glibc change all threads of a process; the system calls
// change the one that calls. A test that went on after a failure would act as
// another user than it says.
void SetUser(uid_t uid) {
  constexpr uid_t kKeep = static_cast<uid_t>(-1);
  if (::syscall(SYS_setresuid, kKeep, uid, kKeep) != 0) std::abort();
}
void SetGroups(gid_t gid, const std::vector<gid_t>& groups) {
  constexpr gid_t kKeep = static_cast<gid_t>(-1);
  if (::syscall(SYS_setgroups, groups.size(), groups.data()) != 0 ||
      ::syscall(SYS_setresgid, kKeep, gid, kKeep) != 0) {
    std::abort();
  }
}
std::vector<gid_t> OwnGroups() {
  std::vector<gid_t> groups(static_cast<size_t>(::getgroups(0, nullptr)));
  const int count = ::getgroups(static_cast<int>(groups.size()), groups.data());
  groups.resize(static_cast<size_t>(std::max(count, 0)));
  return groups;
}

void SetVariable(const char* name, const std::string& value) {
  if (value.empty()) {
    ::unsetenv(name);
  } else {
    ::setenv(name, value.c_str(), 1);
  }
}

// Finds users by their first group alone: that suffices where services have a
// common one, as on Debian.
std::optional<GroupMates> FindGroupMates() {
  std::map<gid_t, uid_t> first;
  ::setpwent();
  const absl::Cleanup end = [] { ::endpwent(); };
  while (const passwd* const entry = ::getpwent()) {
    const uid_t uid = entry->pw_uid;
    if (uid == 0 || uid == ::geteuid() || uid == kNobody) continue;
    const auto [found, is_new] = first.try_emplace(entry->pw_gid, uid);
    if (is_new || found->second == uid) continue;
    return GroupMates{
        .owner = found->second, .member = uid, .group = entry->pw_gid};
  }
  return std::nullopt;
}

std::string MakeDirectory() {
  const char* const temporary = std::getenv("TEST_TMPDIR");
  std::string path =
      absl::StrCat(temporary == nullptr ? "/tmp" : temporary, "/access-XXXXXX");
  if (::mkdtemp(path.data()) == nullptr) std::abort();
  return path;
}

std::string DigestOf(const std::string& token) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  ::SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(),
           digest.data());
  return absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(digest.data()), digest.size()));
}

}  // namespace

std::string ToString(AccessWire wire) {
  switch (wire) {
    case AccessWire::kUnix:
      return "Unix";
    case AccessWire::kGroups:
      return "Groups";
    case AccessWire::kMutualTls:
      return "MutualTls";
    case AccessWire::kToken:
      return "Token";
    case AccessWire::kInsecure:
      return "Insecure";
  }
  return "?";
}

std::string ToString(Who who) {
  static constexpr const char* kNames[kWhoCount] = {
      "anonymous", "unknown", "roleless", "viewer",   "stranger",
      "reader",    "member",  "owner",    "operator", "root"};
  return kNames[static_cast<size_t>(who)];
}

ActingAs::ActingAs(const Identity& identity)
    : is_another_user_(identity.uid.has_value() &&
                       *identity.uid != ::geteuid()),
      own_gid_(::getegid()),
      own_groups_(OwnGroups()) {
  SetVariable("OPTSTATE_TLS_CA", identity.ca);
  SetVariable("OPTSTATE_TLS_CERTIFICATE", identity.certificate);
  SetVariable("OPTSTATE_TLS_KEY", identity.key);
  SetVariable("OPTSTATE_TOKEN", identity.token);
  if (!is_another_user_) return;
  // Only root may change the groups.
  SetGroups(identity.gid, identity.groups);
  SetUser(*identity.uid);
}

ActingAs::~ActingAs() {
  if (is_another_user_) {
    SetUser(0);
    SetGroups(own_gid_, own_groups_);
  }
  for (const char* const name : kVariables) ::unsetenv(name);
}

AccessDaemon::AccessDaemon(AccessWire wire)
    : wire_(wire),
      mates_(FindGroupMates()),
      directory_(MakeDirectory()),
      ca_(directory_, "ca"),
      files_(ca_.Issue("daemon", "IP:127.0.0.1,DNS:localhost")) {}

AccessDaemon::~AccessDaemon() {
  daemon_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

absl::StatusOr<std::unique_ptr<AccessDaemon>> AccessDaemon::Start(
    AccessWire wire) {
  std::unique_ptr<AccessDaemon> daemon(new AccessDaemon(wire));
  if (daemon->is_unix() && ::geteuid() != 0) {
    return absl::UnimplementedError("it takes root to act as other users");
  }
  OPTSTATE_RETURN_IF_ERROR(daemon->Launch());
  if (!daemon->is_unix()) return daemon;
  if (absl::IsPermissionDenied(daemon->Dial(daemon->owner()).status())) {
    return absl::UnimplementedError(
        absl::StrCat("other users do not reach ", daemon->daemon().socket()));
  }
  return daemon;
}

absl::Status AccessDaemon::Launch() {
  TestDaemon::Options options;
  switch (wire_) {
    case AccessWire::kUnix:
      options.config = ConfigOfUnix();
      break;
    case AccessWire::kGroups:
      options.config = ConfigOfGroups();
      break;
    case AccessWire::kMutualTls:
      options.config = ConfigOfCertificates();
      break;
    case AccessWire::kToken:
      options.config = ConfigOfTokens();
      break;
    case AccessWire::kInsecure:
      identities_ = {{.who = Who::kRoot, .name = "anyone"}};
      options.tcp = true;
      break;
  }
  const bool has_tls =
      wire_ == AccessWire::kMutualTls || wire_ == AccessWire::kToken;
  if (has_tls) options.flags = {"--listen", "127.0.0.1:0"};
  options.config += kLimits;
  OPTSTATE_ASSIGN_OR_RETURN(daemon_, TestDaemon::Start(std::move(options)));
  if (is_unix()) {
    std::filesystem::permissions(daemon_->directory(),
                                 std::filesystem::perms::group_exec |
                                     std::filesystem::perms::others_exec,
                                 std::filesystem::perm_options::add);
    endpoint_ = daemon_->grpc_endpoint();
    return absl::OkStatus();
  }
  OPTSTATE_ASSIGN_OR_RETURN(endpoint_, daemon_->tcp_endpoint());
  if (has_tls) {
    endpoint_ = absl::StrCat("grpcs:", absl::StripPrefix(endpoint_, "grpc:"));
  }
  return absl::OkStatus();
}

std::vector<AccessDaemon::Named> AccessDaemon::NamedCallers() const {
  std::vector<Named> callers = {
      {Who::kViewer, "viewer", "viewer", kViewerUid},
      {Who::kStranger, "stranger", "trainer", kStrangerUid},
      {Who::kReader, "reader", "trainer", kReaderUid}};
  if (mates_.has_value()) {
    callers.push_back({Who::kMember, "member", "trainer", mates_->member});
  }
  callers.push_back({Who::kOwner, "owner", "trainer",
                     mates_.has_value() ? mates_->owner : kOwnerUid});
  callers.push_back({Who::kOperator, "operator", "operator", kOperatorUid});
  callers.push_back({Who::kRoot, "root", "operator", 0});
  return callers;
}

// Every user is a trainer here, and none is unknown or without a role.
std::string AccessDaemon::ConfigOfUnix() {
  for (const Named& each : NamedCallers()) {
    if (each.who == Who::kViewer || each.who == Who::kOperator) continue;
    identities_.push_back(
        {.who = each.who, .name = each.name, .uid = each.uid, .gid = each.uid});
  }
  const Identity by_gid = {.who = Who::kOperator,
                           .name = "operator by its gid",
                           .uid = kOperatorUid,
                           .gid = kOperatorGroup};
  const Identity by_group = {.who = Who::kOperator,
                             .name = "operator by a further group",
                             .uid = kOperatorUid,
                             .gid = kOperatorUid,
                             .groups = {kOperatorGroup}};
  identities_.insert(identities_.end() - 1, {by_gid, by_group});
  return absl::StrCat("access: {operator_groups: [\"", kOperatorGroup,
                      "\"]}\n");
}

// Users have the roles of their groups: by the own one, by further ones, and
// the highest of several.
std::string AccessDaemon::ConfigOfGroups() {
  const auto add = [this](Who who, const char* name, uid_t uid, gid_t gid,
                          std::vector<gid_t> groups) {
    identities_.push_back({.who = who,
                           .name = name,
                           .uid = uid,
                           .gid = gid,
                           .groups = std::move(groups)});
  };
  add(Who::kRoleless, "user without a role", kRolelessUid, kRolelessGroup, {});
  add(Who::kViewer, "viewer by its gid", kViewerUid, kViewerGroup, {});
  add(Who::kViewer, "viewer by a further group", kViewerUid, kRolelessGroup,
      {kRolelessGroup, kViewerGroup});
  for (const Named& each : NamedCallers()) {
    if (each.who == Who::kViewer) continue;
    if (each.who == Who::kOperator) {
      add(each.who, "operator of all groups", each.uid, kViewerGroup,
          {kTrainerGroup, kOperatorGroup});
      add(each.who, "operator by its group alone", each.uid, kRolelessGroup,
          {kOperatorGroup});
    } else if (each.who == Who::kStranger) {
      add(each.who, "stranger by its gid", each.uid, kTrainerGroup, {});
      add(each.who, "stranger who is a viewer too", each.uid, kViewerGroup,
          {kOtherTrainerGroup});
    } else {
      add(each.who, each.name, each.uid, kRolelessGroup,
          {kRolelessGroup, kTrainerGroup});
    }
  }
  return absl::StrCat("access: {operator_groups: [\"", kOperatorGroup,
                      "\"], trainer_groups: [\"", kTrainerGroup, "\", \"",
                      kOtherTrainerGroup, "\"], viewer_groups: [\"",
                      kViewerGroup, "\"]}\n");
}

absl::Status AccessDaemon::GiveRolesToGroups() {
  identities_.clear();
  return daemon_->Reload(ConfigOfGroups() + kLimits);
}

std::string AccessDaemon::TlsSettings(bool asks_for_certificates) const {
  return absl::StrCat("tls: {certificate_file: ", files_.certificate,
                      ", key_file: ", files_.key,
                      asks_for_certificates ? ", client_ca_file: " : "",
                      asks_for_certificates ? files_.ca : "", "}\n");
}

void AccessDaemon::AddCertificate(Who who, const std::string& name) {
  const tls::TlsFiles files = ca_.Issue(name, absl::StrCat("DNS:", name));
  identities_.push_back({.who = who,
                         .name = name,
                         .ca = files.ca,
                         .certificate = files.certificate,
                         .key = files.key});
}

std::string AccessDaemon::ConfigOfCertificates() {
  identities_ = {
      {.who = Who::kAnonymous, .name = "anonymous", .ca = ca_.file()}};
  AddCertificate(Who::kUnknown, "unknown");
  const std::string file = directory_ + "/identities.yaml";
  std::ofstream text(file);
  text << "identities:\n";
  for (const Named& each : NamedCallers()) {
    AddCertificate(each.who, each.name);
    text << "- {san: \"DNS:" << each.name << "\", user: \"" << each.uid
         << "\", role: " << each.role << "}\n";
  }
  return absl::StrCat(TlsSettings(/*asks_for_certificates=*/true),
                      "access: {identities_file: ", file, "}\n");
}

void AccessDaemon::AddToken(Who who, const std::string& name,
                            const std::string& token) {
  identities_.push_back(
      {.who = who, .name = name, .ca = ca_.file(), .token = token});
}

std::string AccessDaemon::ConfigOfTokens() {
  AddToken(Who::kAnonymous, "anonymous", "");
  AddToken(Who::kUnknown, "unknown", "a token of nobody");
  const std::string file = directory_ + "/tokens.yaml";
  {
    std::ofstream text(file);
    text << "tokens:\n";
    for (const Named& each : NamedCallers()) {
      const std::string token = absl::StrCat("token of ", each.name);
      AddToken(each.who, each.name, token);
      text << "- {name: " << each.name << ", user: \"" << each.uid
           << "\", role: " << each.role << ", sha256: \"" << DigestOf(token)
           << "\"}\n";
    }
  }
  std::filesystem::permissions(file, std::filesystem::perms::owner_read);
  return absl::StrCat(TlsSettings(/*asks_for_certificates=*/false),
                      "access: {tokens_file: ", file, "}\n");
}

std::vector<std::string> AccessDaemon::session_endpoints() const {
  if (!is_unix()) return {endpoint_};
  return {daemon_->shm_endpoint(), endpoint_};
}

const Identity& AccessDaemon::owner() const {
  const auto found = std::find_if(
      identities_.begin(), identities_.end(),
      [](const Identity& each) { return each.who == Who::kOwner; });
  return found == identities_.end() ? identities_.back() : *found;
}

std::string AccessDaemon::group() const {
  if (!mates_.has_value() || wire_ == AccessWire::kInsecure) return "";
  return absl::StrCat(mates_->group);
}

absl::StatusOr<UniqueFd> AccessDaemon::Dial(const Identity& as) const {
  OPTSTATE_ASSIGN_OR_RETURN(const client::Endpoint endpoint,
                            client::ParseEndpoint(endpoint_));
  const ActingAs acting(as);
  return client::Dial(endpoint, absl::Now() + kPatience);
}

}  // namespace optstate
