// One table says who may do what: all methods and callers, walked over every
// way to a real daemon by which it learns who calls.

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/grpc_status.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/access/caller.h"
#include "server/admin/method_roles.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/access_wires.h"

namespace optstate {
namespace {

using absl::StatusCode;
using client::Session;

constexpr absl::Duration kPatience = absl::Seconds(60);

// A call, and the verdict on each caller, one letter a column (Who):
//   anonymous, unknown, roleless, viewer, stranger, reader, member, owner,
//   operator, root
// U: UNAUTHENTICATED; D: PERMISSION_DENIED; N: NOT_FOUND, as if there were no
// such job; +: the call is let through, and ends with `allowed`. That is an
// error where an answer would change the daemon for the next caller.
struct CallRow {
  const char* method;
  const char* request;  // in protobuf's text format
  const char* verdicts;
  StatusCode allowed = StatusCode::kOk;
  // The verdict over TCP without TLS, where everyone is the daemon's user.
  char insecure = '+';
};

// The job "secret" is private and has a group and a reader; everyone may look
// at the job "open". Both have a rank attached.
constexpr CallRow kCalls[] = {
    {"GetStatus", "", "UUD+++++++"},
    {"ListJobs", "", "UUD+++++++"},
    {"GetJob", "name: 'secret'", "UUDNN+++++"},
    {"GetJob", "name: 'open'", "UUD+++++++"},
    {"ListSessions", "", "UUD+++++++"},
    {"ListSessions", "job: 'secret'", "UUDNN+++++"},
    {"ListParameters", "job: 'secret'", "UUDNN+++++"},
    {"ListParameters", "job: 'open'", "UUD+++++++"},
    {"DescribeTiers", "", "UUD+++++++"},
    {"DescribeTiers", "measure: true", "UUDDDDDD++"},
    {"DescribeDevices", "", "UUD+++++++"},
    {"WatchEvents", "", "UUD+++++++"},
    {"ListUsers", "", "UUD+++++++"},
    {"ListUsers", "own: true", "UUD+++++++"},
    {"ListUsers", "user: '4798'", "UUDDDDDD++"},
    {"DeleteJob", "name: 'secret'", "UUDDND++++",
     StatusCode::kFailedPrecondition},
    {"DeleteJob", "name: 'open'", "UUDDDDD+++",
     StatusCode::kFailedPrecondition},
    {"DeleteJobWatched", "name: 'secret'", "UUDDND++++",
     StatusCode::kFailedPrecondition},
    {"RecoverJob", "name: 'secret'", "UUDDND++++",
     StatusCode::kFailedPrecondition},
    {"VerifyJob", "name: 'secret'", "UUDDND++++",
     StatusCode::kFailedPrecondition},
    {"SleepJob", "name: 'secret'", "UUDDND++++",
     StatusCode::kFailedPrecondition},
    {"WakeJob", "name: 'secret'", "UUDDND++++",
     StatusCode::kFailedPrecondition},
    {"TraceJob", "name: 'secret' steps: 1001", "UUDDND++++",
     StatusCode::kInvalidArgument},
    // Nothing is to be set.
    {"SetJob", "name: 'secret'", "UUDDND++++", StatusCode::kInvalidArgument},
    // It is set only where it is another than it is.
    {"SetJob", "name: 'secret' access {} access_before { readers: '4797' }",
     "UUDDNDD+++", StatusCode::kAborted},
    {"Drain", "resume: true", "UUDDDDDD++"},
    {"Upgrade", "binary: 'no absolute path'", "UUDDDDDD++",
     StatusCode::kInvalidArgument, /*insecure=*/'D'},
};

// A call of a service that gRPC brings: whether the daemon serves, and what its
// methods look like. No role is asked for. A peer whose certificate is not
// known does not come that far; a token is shown to Admin alone.
struct OpenRow {
  const char* path;
  absl::string_view request;
  const char* verdicts;
  const char* by_token;  // the verdicts where clients have tokens
};
constexpr OpenRow kOpenCalls[] = {
    {"/grpc.health.v1.Health/Check", "", "UU++++++++", "++++++++++"},
    {"/grpc.health.v1.Health/Watch", "", "UU++++++++", "++++++++++"},
    // ServerReflectionRequest.list_services = "*".
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
     "\x3a\x01*", "UU++++++++", "++++++++++"},
};

// An act that a session asks for. A step is taken by whoever may attach: a
// session that is refused is closed before it can ask for anything else.
struct SessionRow {
  enum class Act {
    kMake,    // makes a job, loads it and takes a step
    kAttach,  // attaches to "secret" by its name and takes a step
    kReturn,  // says that "secret" must be there, as a session that comes back
  };
  Act act;
  const char* name;
  const char* verdicts;
};
constexpr SessionRow kSessions[] = {
    {SessionRow::Act::kMake, "make a job", "UUDD++++++"},
    {SessionRow::Act::kAttach, "attach", "UUDDDD++D+"},
    {SessionRow::Act::kReturn, "come back", "UUDDND++D+"},
};

const google::protobuf::ServiceDescriptor& Admin() {
  return *v1::GetStatusRequest::descriptor()->file()->FindServiceByName(
      "Admin");
}

std::vector<std::string> Methods() {
  std::vector<std::string> methods;
  for (int i = 0; i < Admin().method_count(); ++i) {
    methods.push_back(Admin().method(i)->name());
  }
  return methods;
}

// Returns the bytes of a row's request.
std::string RequestOf(const CallRow& row) {
  const auto* const method = Admin().FindMethodByName(row.method);
  const std::unique_ptr<google::protobuf::Message> request(
      google::protobuf::MessageFactory::generated_factory()
          ->GetPrototype(method->input_type())
          ->New());
  EXPECT_TRUE(
      google::protobuf::TextFormat::ParseFromString(row.request, request.get()))
      << row.method << " " << row.request;
  return request->SerializeAsString();
}

char LetterOf(const absl::Status& status, StatusCode allowed) {
  if (status.code() == allowed) return '+';
  switch (status.code()) {
    case StatusCode::kUnauthenticated:
      return 'U';
    case StatusCode::kPermissionDenied:
      return 'D';
    case StatusCode::kNotFound:
      return 'N';
    default:
      return '?';
  }
}

// Makes a call; the first message of an answer ends it, so that streams need no
// end.
absl::Status CallOver(const std::shared_ptr<grpc::Channel>& channel,
                      const std::string& token, const std::string& path,
                      const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  if (!token.empty()) {
    context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
  }
  grpc::CompletionQueue queue;
  const auto is_done = [&queue] {
    void* tag = nullptr;
    bool is_ok = false;
    return queue.Next(&tag, &is_ok) && is_ok;
  };
  const auto call = stub.PrepareCall(&context, path, &queue);
  call->StartCall(nullptr);
  bool is_answered = is_done();
  if (is_answered) {
    const grpc::Slice bytes(request);
    call->WriteLast(grpc::ByteBuffer(&bytes, 1), grpc::WriteOptions(), nullptr);
    is_answered = is_done();
  }
  grpc::ByteBuffer reply;
  if (is_answered) {
    call->Read(&reply, nullptr);
    is_answered = is_done();
  }
  if (is_answered) context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  is_done();
  return is_answered ? absl::OkStatus() : FromGrpc(status);
}

class AccessTableTest : public testing::TestWithParam<AccessWire> {
 protected:
  void SetUp() override {
    auto daemon = AccessDaemon::Start(GetParam());
    if (absl::IsUnimplemented(daemon.status())) {
      GTEST_SKIP() << daemon.status().message();
    }
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }

  // Calls as a caller. A connection is kept for the caller's next call, unless
  // the daemon may have closed it.
  absl::Status Call(const Identity& as, const std::string& path,
                    const std::string& request) {
    std::shared_ptr<grpc::Channel>& channel = channels_[as.name];
    if (channel == nullptr) {
      OPTSTATE_ASSIGN_OR_RETURN(UniqueFd socket, daemon_->Dial(as));
      channel = grpc::CreateInsecureChannelFromFd("daemon", socket.release());
    }
    absl::Status status = CallOver(channel, as.token, path, request);
    if (absl::IsUnauthenticated(status)) channel = nullptr;
    return status;
  }
  absl::Status Call(const Identity& as, const CallRow& row) {
    return Call(as, absl::StrCat("/optstate.v1.Admin/", row.method),
                RequestOf(row));
  }

  // Opens a session as a caller. A new job has loaded, and takes a step.
  absl::StatusOr<std::unique_ptr<Session>> Open(const Identity& as,
                                                const std::string& endpoint,
                                                const std::string& job) {
    client::SessionOptions options = NewJob(UniformLayout(1, 8));
    options.endpoint = endpoint;
    options.job = job;
    OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, [&] {
      const ActingAs acting(as);
      return Session::Open(std::move(options));
    }());
    if (session->info().created) {
      OPTSTATE_RETURN_IF_ERROR(LoadConstant(*session, 1));
    }
    OPTSTATE_RETURN_IF_ERROR(TakeStep(session.get()));
    return session;
  }
  static absl::Status TakeStep(Session* session) {
    const uint64_t step = session->info().committed_step + 1;
    OPTSTATE_RETURN_IF_ERROR(PushConstant(*session, step, 0, 1));
    return session->Commit(CommitOf(*session, step)).status();
  }

  // Says Hello for a job that must be there; returns the answer.
  absl::Status Return(const Identity& as, v1::Wire wire) {
    OPTSTATE_ASSIGN_OR_RETURN(const UniqueFd socket, daemon_->Dial(as));
    v1::Hello hello;
    hello.set_protocol_version_min(shm::kProtocolVersion);
    hello.set_protocol_version_max(shm::kProtocolVersion);
    hello.set_wire(wire);
    hello.set_job("secret");
    hello.set_pid(::getpid());
    hello.set_must_exist(true);
    hello.set_token(as.token);
    const absl::Time deadline = absl::Now() + kPatience;
    OPTSTATE_RETURN_IF_ERROR(
        shm::SendFrame(socket.get(), hello.SerializeAsString(), {}, deadline));
    OPTSTATE_ASSIGN_OR_RETURN(
        const shm::Frame frame,
        shm::ReceiveFrame(socket.get(), shm::kHelloBytesMax, deadline));
    v1::HelloReply reply;
    EXPECT_TRUE(reply.ParseFromString(frame.payload));
    return FromProto(reply.status());
  }

  absl::Status Act(const SessionRow& row, const Identity& as,
                   const std::string& endpoint) {
    const bool is_shm = absl::StartsWith(endpoint, "unix:");
    switch (row.act) {
      case SessionRow::Act::kMake:
        return Open(as, endpoint, absl::StrCat("new-", ++made_)).status();
      case SessionRow::Act::kAttach:
        return Open(as, endpoint, "secret").status();
      case SessionRow::Act::kReturn:
        return Return(as, is_shm ? v1::WIRE_SHM : v1::WIRE_GRPC);
    }
    return absl::InternalError("no such act");
  }

  // Makes "secret" private, for its group and one reader.
  void HideSecret() {
    const std::string group = daemon_->group();
    const std::string request =
        absl::StrCat("name: 'secret' access { is_private: true readers: '",
                     AccessDaemon::kReaderUid, "' group: '", group, "' }");
    const absl::Status set =
        Call(daemon_->owner(),
             {.method = "SetJob", .request = request.c_str(), .verdicts = ""});
    ASSERT_TRUE(set.ok()) << set;
  }

  // Expects the verdict of a column.
  void Expect(const Identity& as, const std::string& what, const char* verdicts,
              char insecure, const absl::Status& status, StatusCode allowed) {
    const char expected = GetParam() == AccessWire::kInsecure
                              ? insecure
                              : verdicts[static_cast<size_t>(as.who)];
    EXPECT_EQ(LetterOf(status, allowed), expected)
        << what << " by the " << as.name << ": " << status;
    EXPECT_EQ(status.ok(), status.message().empty()) << what;
  }

  std::unique_ptr<AccessDaemon> daemon_;
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels_;
  int made_ = 0;
};

TEST_P(AccessTableTest, EveryCallAndCallerHasItsVerdict) {
  {
    const std::string endpoint = daemon_->session_endpoints().front();
    const auto secret = Open(daemon_->owner(), endpoint, "secret");
    ASSERT_TRUE(secret.ok()) << secret.status();
    const auto open = Open(daemon_->owner(), endpoint, "open");
    ASSERT_TRUE(open.ok()) << open.status();
    HideSecret();
    if (HasFatalFailure()) return;
    for (const CallRow& row : kCalls) {
      for (const Identity& as : daemon_->identities()) {
        Expect(as, absl::StrCat(row.method, " {", row.request, "}"),
               row.verdicts, row.insecure, Call(as, row), row.allowed);
      }
    }
    for (const OpenRow& row : kOpenCalls) {
      for (const Identity& as : daemon_->identities()) {
        Expect(as, row.path,
               GetParam() == AccessWire::kToken ? row.by_token : row.verdicts,
               '+', Call(as, row.path, std::string(row.request)),
               StatusCode::kOk);
      }
    }
    const auto status = daemon_->daemon().GetStatus();
    ASSERT_TRUE(status.ok()) << status.status();
    EXPECT_FALSE(status->draining());
    EXPECT_EQ(status->job_count(), 2u);
    EXPECT_TRUE(TakeStep(secret->get()).ok());
  }
  for (const SessionRow& row : kSessions) {
    for (const std::string& endpoint : daemon_->session_endpoints()) {
      for (const Identity& as : daemon_->identities()) {
        Expect(as, absl::StrCat(row.name, " over ", endpoint), row.verdicts,
               '+', Act(row, as, endpoint), StatusCode::kOk);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, AccessTableTest,
                         testing::Values(AccessWire::kUnix, AccessWire::kGroups,
                                         AccessWire::kMutualTls,
                                         AccessWire::kToken,
                                         AccessWire::kInsecure),
                         [](const testing::TestParamInfo<AccessWire>& wire) {
                           return ToString(wire.param);
                         });

// The daemon reads groups anew while jobs go on. They count for connections
// that are made from then on: a session that is attached stays.
class AccessReloadTest : public AccessTableTest {};

TEST_P(AccessReloadTest, GroupsComeIntoForceWhileJobsGoOn) {
  const std::string endpoint = daemon_->session_endpoints().front();
  const auto secret = Open(daemon_->owner(), endpoint, "secret");
  ASSERT_TRUE(secret.ok()) << secret.status();
  const absl::Status reloaded = daemon_->GiveRolesToGroups();
  ASSERT_TRUE(reloaded.ok()) << reloaded;
  channels_.clear();
  for (const Identity& as : daemon_->identities()) {
    const CallRow& call = kCalls[0];
    Expect(as, call.method, call.verdicts, call.insecure, Call(as, call),
           call.allowed);
    const SessionRow& session = kSessions[0];
    Expect(as, session.name, session.verdicts, '+', Act(session, as, endpoint),
           StatusCode::kOk);
  }
  EXPECT_TRUE(TakeStep(secret->get()).ok());
}

INSTANTIATE_TEST_SUITE_P(Wires, AccessReloadTest,
                         testing::Values(AccessWire::kUnix),
                         [](const testing::TestParamInfo<AccessWire>& wire) {
                           return ToString(wire.param);
                         });

// A method that is added to Admin fails here until it has a row.
TEST(AccessTableRowsTest, EveryMethodHasARowAndEveryRowAMethod) {
  std::set<std::string> rows;
  for (const CallRow& row : kCalls) {
    EXPECT_EQ(std::strlen(row.verdicts), size_t{kWhoCount}) << row.method;
    rows.insert(row.method);
  }
  for (const OpenRow& row : kOpenCalls) {
    EXPECT_EQ(std::strlen(row.verdicts), size_t{kWhoCount}) << row.path;
    EXPECT_EQ(std::strlen(row.by_token), size_t{kWhoCount}) << row.path;
  }
  for (const SessionRow& row : kSessions) {
    EXPECT_EQ(std::strlen(row.verdicts), size_t{kWhoCount}) << row.name;
  }
  const std::vector<std::string> methods = Methods();
  EXPECT_THAT(rows, testing::UnorderedElementsAreArray(methods));
}

// The rows are written down apart from the daemon's own table, and the two
// agree about roles: the least role of a method is the first column that is not
// refused for its role.
TEST(AccessTableRowsTest, TheRowsAgreeWithTheDaemonsTable) {
  using access::Role;
  constexpr std::pair<Who, Role> kRoles[] = {{Who::kRoleless, Role::kNone},
                                             {Who::kViewer, Role::kViewer},
                                             {Who::kOwner, Role::kTrainer},
                                             {Who::kRoot, Role::kOperator}};
  for (const admin::MethodRole& role : admin::kMethodRoles) {
    for (const auto& [who, has] : kRoles) {
      // The rows that ask for more than the method itself have other verdicts
      // for those who have the role.
      const bool is_allowed = std::any_of(
          std::begin(kCalls), std::end(kCalls), [&](const CallRow& row) {
            return row.method == role.method &&
                   row.verdicts[static_cast<size_t>(who)] == '+';
          });
      EXPECT_EQ(is_allowed, has >= role.role)
          << role.method << " by the " << ToString(who);
    }
    for (const CallRow& row : kCalls) {
      if (row.method != role.method) continue;
      EXPECT_EQ(row.insecure == '+', role.over_insecure_tcp) << row.method;
    }
  }
}

}  // namespace
}  // namespace optstate
