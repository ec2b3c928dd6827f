#ifndef OPTSTATE_TESTS_INTEGRATION_ACCESS_WIRES_H_
#define OPTSTATE_TESTS_INTEGRATION_ACCESS_WIRES_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/tls/test_certificates.h"
#include "proto/types/unique_fd.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {

// The ways to a daemon that differ in how it learns who calls.
enum class AccessWire {
  kUnix,       // the kernel says so: uid, gid and groups
  kGroups,     // so it does, and users have a role by their groups alone
  kMutualTls,  // a name in the client's certificate
  kToken,      // a bearer token within TLS
  kInsecure,   // nothing does: everyone acts as the daemon's user
};
std::string ToString(AccessWire wire);

// The kinds of callers, in the order of the columns of a table of verdicts.
enum class Who {
  kAnonymous,  // shows nothing
  kUnknown,    // shows a name or a token that the daemon does not know
  kRoleless,   // a user who is in no group that has a role
  kViewer,     // a viewer by its role
  kStranger,   // a trainer who has nothing to do with the job
  kReader,     // a trainer whom the private job lets look
  kMember,     // a trainer in the job's group
  kOwner,      // the trainer who made the job
  kOperator,   // an operator who is not root
  kRoot,       // root, and over kInsecure everyone
};
inline constexpr int kWhoCount = 10;
std::string ToString(Who who);

// One caller, and how it shows who it is. What does not apply is empty.
struct Identity {
  Who who = Who::kAnonymous;
  std::string name;  // for the texts of a test
  // At a unix socket: the credentials that it connects with.
  std::optional<uid_t> uid = std::nullopt;
  gid_t gid = 0;
  std::vector<gid_t> groups = {};
  // Over TLS: what the variables of the environment are set to.
  std::string ca = "";
  std::string certificate = "";
  std::string key = "";
  std::string token = "";
};

// Makes the calling thread act as an identity while it lives: connections that
// the thread opens are that identity's. Root alone may take another uid.
//
// Threads: one object at a time in a process, as the environment is shared.
class ActingAs {
 public:
  explicit ActingAs(const Identity& identity);
  ~ActingAs();
  ActingAs(const ActingAs&) = delete;
  ActingAs& operator=(const ActingAs&) = delete;

 private:
  const bool is_another_user_;
  const gid_t own_gid_;
  const std::vector<gid_t> own_groups_;
};

// Two users of this machine, none of them root, and a group that its tables
// have both in.
struct GroupMates {
  uid_t owner = 0;
  uid_t member = 0;
  gid_t group = 0;
};

// A daemon that is reached over one of these wires, and its callers.
//
// Threads: one at a time.
class AccessDaemon {
 public:
  // UNIMPLEMENTED, and why: this machine or this user cannot have the wire's
  // callers.
  static absl::StatusOr<std::unique_ptr<AccessDaemon>> Start(AccessWire wire);
  ~AccessDaemon();

  const TestDaemon& daemon() const { return *daemon_; }
  // The endpoint of calls and of sessions over gRPC.
  const std::string& endpoint() const { return endpoint_; }
  // All endpoints of sessions: at a unix socket shared memory is another one.
  std::vector<std::string> session_endpoints() const;
  // The callers that there are on this wire, in the order of the columns.
  const std::vector<Identity>& identities() const { return identities_; }
  // The caller who makes the job.
  const Identity& owner() const;
  // Empty: no caller is kMember.
  std::string group() const;
  static constexpr uid_t kReaderUid = 4713;
  // Turns a daemon of kUnix into one of kGroups, by a configuration that it
  // reads while it runs. identities() are other objects then.
  absl::Status GiveRolesToGroups();

  // Connects as a caller.
  absl::StatusOr<UniqueFd> Dial(const Identity& as) const;

 private:
  explicit AccessDaemon(AccessWire wire);

  bool is_unix() const {
    return wire_ == AccessWire::kUnix || wire_ == AccessWire::kGroups;
  }
  absl::Status Launch();
  std::string ConfigOfUnix();
  std::string ConfigOfGroups();
  std::string ConfigOfCertificates();
  std::string ConfigOfTokens();
  void AddCertificate(Who who, const std::string& name);
  void AddToken(Who who, const std::string& name, const std::string& token);
  // The callers that have a role, with the uid that each acts as.
  struct Named {
    Who who;
    const char* name;
    const char* role;
    uid_t uid;
  };
  std::vector<Named> NamedCallers() const;
  std::string TlsSettings(bool asks_for_certificates) const;

  const AccessWire wire_;
  const std::optional<GroupMates> mates_;
  const std::string directory_;  // of certificates and settings
  const tls::TestCa ca_;
  const tls::TlsFiles files_;
  std::unique_ptr<TestDaemon> daemon_;
  std::string endpoint_;
  std::vector<Identity> identities_;
};

}  // namespace optstate

#endif  // OPTSTATE_TESTS_INTEGRATION_ACCESS_WIRES_H_
