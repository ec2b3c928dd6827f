// Checks who may call which method of Admin: the table, and that no method goes
// round it.
#include "server/admin/method_roles.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "server/admin/admin_server.h"
#include "server/admin/admin_service_fixture.h"
#include "server/observe/event_log.h"

namespace optstate::admin {
namespace {

using access::Role;
using access::Via;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr Role kRoles[] = {Role::kNone, Role::kViewer, Role::kTrainer,
                           Role::kOperator};
constexpr Via kVias[] = {Via::kUnix, Via::kTls, Via::kInsecureTcp};

Caller CallerOf(Role role, Via via) {
  return {.uid = 4711,
          .role = role,
          .via = via,
          .identity = via == Via::kTls ? "DNS:peer" : ""};
}

// The verdicts, written down once more. A new method of Admin has to be added
// here too.
bool IsExpected(const std::string& method, Role role, Via via) {
  static const auto* const least =
      new std::map<std::string, Role>{{"GetStatus", Role::kViewer},
                                      {"ListJobs", Role::kViewer},
                                      {"GetJob", Role::kViewer},
                                      {"ListSessions", Role::kViewer},
                                      {"ListParameters", Role::kViewer},
                                      {"DescribeTiers", Role::kViewer},
                                      {"DescribeDevices", Role::kViewer},
                                      {"WatchEvents", Role::kViewer},
                                      {"ListUsers", Role::kViewer},
                                      {"DeleteJob", Role::kTrainer},
                                      {"DeleteJobWatched", Role::kTrainer},
                                      {"RecoverJob", Role::kTrainer},
                                      {"SetJob", Role::kTrainer},
                                      {"VerifyJob", Role::kTrainer},
                                      {"SleepJob", Role::kTrainer},
                                      {"WakeJob", Role::kTrainer},
                                      {"TraceJob", Role::kTrainer},
                                      {"Drain", Role::kOperator},
                                      {"Upgrade", Role::kOperator}};
  const auto found = least->find(method);
  EXPECT_NE(found, least->end()) << method << " is not in this test";
  if (found == least->end()) return false;
  if (method == "Upgrade" && via == Via::kInsecureTcp) return false;
  return role >= found->second;
}

std::vector<std::string> Methods() {
  std::vector<std::string> methods;
  const auto* const service =
      v1::GetStatusRequest::descriptor()->file()->FindServiceByName("Admin");
  for (int i = 0; i < service->method_count(); ++i) {
    methods.push_back(service->method(i)->name());
  }
  return methods;
}

TEST(MethodRolesTest, EveryMethodRoleAndWayHasItsVerdict) {
  ASSERT_GE(Methods().size(), 16u);
  for (const std::string& method : Methods()) {
    for (const Role role : kRoles) {
      for (const Via via : kVias) {
        const absl::Status verdict = CheckMethod(method, CallerOf(role, via));
        EXPECT_EQ(verdict.ok(), IsExpected(method, role, via))
            << method << " " << access::RoleName(role) << " "
            << static_cast<int>(via) << ": " << verdict;
        EXPECT_TRUE(verdict.ok() || absl::IsPermissionDenied(verdict));
      }
    }
  }
}

TEST(MethodRolesTest, TheTableHasNoMethodThatIsNotThere) {
  const std::vector<std::string> methods = Methods();
  for (const MethodRole& row : kMethodRoles) {
    EXPECT_THAT(methods, testing::Contains(std::string(row.method)));
  }
}

TEST(MethodRolesTest, AMethodWithoutARowIsRefusedToEveryone) {
  for (const Via via : kVias) {
    EXPECT_TRUE(absl::IsPermissionDenied(
        CheckMethod("NoSuchMethod", CallerOf(Role::kOperator, via))));
  }
}

TEST(MethodRolesTest, WhoHasNotSaidWhoItIsIsToldHow) {
  const absl::Status status =
      CheckMethod("GetStatus", Caller{.via = Via::kTls});
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("OPTSTATE_TOKEN"));
}

TEST(MethodRolesTest, AUserAtAUnixSocketIsToldWhichGroupsHaveTheRole) {
  const auto text = [](const char* method, Role role, Via via) {
    const absl::Status status = CheckMethod(method, CallerOf(role, via));
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(
      text("GetStatus", Role::kNone, Via::kUnix),
      AllOf(HasSubstr("GetStatus takes the role viewer, and uid 4711 has the "
                      "role none: "),
            HasSubstr("access.viewer_groups or access.trainer_groups")));
  EXPECT_THAT(text("DeleteJob", Role::kViewer, Via::kUnix),
              AllOf(HasSubstr("has the role viewer: "),
                    HasSubstr("access.trainer_groups"),
                    Not(HasSubstr("access.viewer_groups"))));
  EXPECT_THAT(text("Drain", Role::kTrainer, Via::kUnix),
              HasSubstr("access.operator_groups"));
  EXPECT_THAT(text("DeleteJob", Role::kViewer, Via::kTls),
              Not(HasSubstr("_groups")));
}

// These tests call through gRPC, as peers call.
class MethodCallsTest : public AdminServiceTest {
 protected:
  void Start(TokenCheck tokens = nullptr) {
    auto server =
        AdminServer::Start(service_.get(), AdminServer::Limits{}, tokens);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // Calls a method with an empty request.
  grpc::Status Call(const Caller& caller, const std::string& method,
                    const std::string& token = "") {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                           0, fds),
              0);
    EXPECT_TRUE(server_->Serve(UniqueFd(fds[0]), caller, caller.name()).ok());
    grpc::GenericStub stub(grpc::CreateInsecureChannelFromFd("daemon", fds[1]));
    grpc::ClientContext context;
    if (!token.empty()) {
      context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    }
    grpc::ByteBuffer request;
    {
      const grpc::Slice empty;
      request = grpc::ByteBuffer(&empty, 1);
    }
    grpc::ByteBuffer reply;
    grpc::Status status;
    absl::Notification done;
    stub.UnaryCall(&context, absl::StrCat("/optstate.v1.Admin/", method), {},
                   &request, &reply, [&](grpc::Status result) {
                     status = std::move(result);
                     done.Notify();
                   });
    done.WaitForNotification();
    return status;
  }

  std::unique_ptr<AdminServer> server_;
};

TEST_F(MethodCallsTest, NoMethodGoesRoundTheTable) {
  Start();
  for (const std::string& method : Methods()) {
    for (const Role role : kRoles) {
      for (const Via via : {Via::kUnix, Via::kTls}) {
        if (IsExpected(method, role, via)) continue;
        const grpc::Status status = Call(CallerOf(role, via), method);
        // A method that this build does not have gives nothing away.
        EXPECT_TRUE(status.error_code() ==
                        grpc::StatusCode::PERMISSION_DENIED ||
                    status.error_code() == grpc::StatusCode::UNIMPLEMENTED)
            << method << " " << access::RoleName(role) << " "
            << static_cast<int>(via) << " " << status.error_code() << " "
            << status.error_message();
      }
    }
  }
  EXPECT_FALSE(control_.is_draining);
  EXPECT_TRUE(upgrade_.progress.id().empty());
}

TEST_F(MethodCallsTest, WhoMayDoes) {
  Start();
  EXPECT_TRUE(Call(CallerOf(Role::kViewer, Via::kTls), "ListJobs").ok());
  EXPECT_TRUE(Call(CallerOf(Role::kOperator, Via::kTls), "Drain").ok());
  EXPECT_TRUE(control_.is_draining);
  EXPECT_TRUE(Call(CallerOf(Role::kOperator, Via::kTls), "Upgrade").ok());
  EXPECT_EQ(Call(access::InsecureTcpCaller(), "Upgrade").error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(MethodCallsTest, ATokenSaysWhoCalls) {
  Start([](absl::string_view token) -> absl::StatusOr<Caller> {
    if (token != "secret") return absl::UnauthenticatedError("no such token");
    return CallerOf(Role::kViewer, Via::kTls);
  });
  const Caller nobody = {.via = Via::kTls};
  EXPECT_EQ(Call(nobody, "ListJobs").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Call(nobody, "ListJobs", "wrong").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(Call(nobody, "ListJobs", "secret").ok());
  EXPECT_EQ(Call(nobody, "Drain", "secret").error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  // Nobody becomes more than its connection says.
  EXPECT_EQ(Call(CallerOf(Role::kNone, Via::kUnix), "ListJobs", "secret")
                .error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(MethodCallsTest, ChangesAreWrittenDown) {
  Start();
  const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
  EXPECT_FALSE(Call(CallerOf(Role::kViewer, Via::kTls), "Drain").ok());
  EXPECT_TRUE(Call(CallerOf(Role::kOperator, Via::kTls), "Drain").ok());
  EXPECT_TRUE(Call(CallerOf(Role::kViewer, Via::kTls), "ListJobs").ok());
  const std::vector<v1::Event> events = observe::Events().After(before);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind(), "audit");
  EXPECT_EQ(events[0].actor(), "DNS:peer (uid 4711)");
  EXPECT_THAT(events[0].text(), HasSubstr("method=Drain"));
  EXPECT_THAT(events[0].text(), HasSubstr("verdict=refused"));
  EXPECT_EQ(events[0].severity(), v1::EVENT_SEVERITY_WARNING);
  EXPECT_EQ(events[1].kind(), "drain_begun");
  EXPECT_EQ(events[1].actor(), "DNS:peer (uid 4711)");
  EXPECT_EQ(events[1].severity(), v1::EVENT_SEVERITY_INFO);
}

TEST_F(MethodCallsTest, ARefusedUserOfAUnixSocketIsWrittenDown) {
  Start();
  const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
  const Caller caller = CallerOf(Role::kNone, Via::kUnix);
  EXPECT_FALSE(Call(caller, "ListJobs").ok());
  EXPECT_FALSE(Call(caller, "DeleteJob").ok());
  const std::vector<v1::Event> events = observe::Events().After(before);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind(), "audit");
  EXPECT_EQ(events[0].actor(), "uid 4711");
  EXPECT_THAT(events[0].text(),
              AllOf(HasSubstr("method=DeleteJob"), HasSubstr("verdict=refused"),
                    HasSubstr("access.trainer_groups")));
}

}  // namespace
}  // namespace optstate::admin
