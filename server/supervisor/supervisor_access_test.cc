// Access to a job, from the Hello that makes it on: refusals, changes,
// events, and what stays of it when the supervisor ends.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/access/caller.h"
#include "server/access/member_for_testing.h"
#include "server/observe/event_log.h"
#include "server/supervisor/creation_budget.h"
#include "server/supervisor/supervisor.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"
#include "storage/access_file.h"

namespace optstate::supervisor {
namespace {

using access::Caller;
using access::UnixCaller;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Harness = SupervisorHarness;

const Caller kSelf = UnixCaller(::geteuid());
// A user that this test certainly does not run as, and no operator.
const Caller kOther = UnixCaller(4711);

class SupervisorAccessTest : public SupervisorTest {
 protected:
  static v1::Hello PrivateHello(const std::string& job) {
    v1::Hello hello = Harness::GoodHello(job);
    hello.mutable_access()->set_is_private(true);
    return hello;
  }

  // Opens a session as another user would, whose Hello the supervisor gets by
  // way of its loop.
  absl::Status OpenAs(const Caller& caller, const v1::Hello& hello) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    UniqueFd client(fds[0]);
    harness_.Greet(UniqueFd(fds[1]), {.caller = caller, .pid = ::getpid()},
                   hello);
    return Harness::ReceiveReply(client.get()).status();
  }

  absl::Status SetAccess(const std::string& job, const v1::JobAccess& access,
                         const Caller& caller = kSelf) {
    return harness_.supervisor().SetAccess(job, access, /*before=*/nullptr,
                                           caller);
  }

  std::vector<v1::Event> EventsOf(const std::string& job) const {
    return observe::Events().After(before_, job);
  }
  bool OtherSees(const v1::Event& event) {
    return harness_.supervisor().MaySee(event, &kOther);
  }

  const uint64_t before_ = observe::Events().Await(0, absl::InfinitePast());
};

TEST_F(SupervisorAccessTest, TheHelloThatMakesTheJobSaysIt) {
  harness_.Start();
  v1::Hello hello = PrivateHello("a");
  hello.mutable_access()->add_readers("4711");
  ASSERT_TRUE(harness_.Open(hello).ok());
  const std::optional<JobSummary> job = harness_.Find("a");
  ASSERT_TRUE(job.has_value());
  EXPECT_TRUE(job->access.is_private());
  EXPECT_EQ(job->access.readers(0), "4711");
  EXPECT_EQ(job->access_problem, "");
  // A job that is there keeps its own.
  hello.clear_access();
  hello.mutable_access()->set_group("root");
  ASSERT_TRUE(harness_.Open(hello).ok());
  EXPECT_EQ(harness_.Find("a")->access.group(), "");
}

TEST_F(SupervisorAccessTest, WhoIsNotThereIsNoReader) {
  harness_.Start();
  v1::Hello hello = PrivateHello("a");
  hello.mutable_access()->add_readers("no such user");
  absl::Status refused = harness_.Open(hello).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no such user"));
  hello = Harness::GoodHello("a");
  hello.mutable_access()->set_group("no such group");
  refused = harness_.Open(hello).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  hello = Harness::GoodHello("a");
  hello.mutable_access()->add_readers("root");
  EXPECT_TRUE(absl::IsInvalidArgument(harness_.Open(hello).status()));
  EXPECT_FALSE(harness_.Find("a").has_value());
}

TEST_F(SupervisorAccessTest, AnOwnerNamesItsOwnGroups) {
  harness_.Start();
  v1::Hello hello = Harness::GoodHello("a");
  hello.mutable_access()->set_group("root");
  const absl::Status refused = OpenAs(kOther, hello);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("uid 4711"));
  EXPECT_FALSE(harness_.Find("a").has_value());
}

TEST_F(SupervisorAccessTest, APrivateJobIsNotThereForOthers) {
  harness_.Start();
  ASSERT_TRUE(harness_.Open(PrivateHello("secret")).ok());
  v1::Hello hello = Harness::GoodHello("secret");
  const absl::Status taken = OpenAs(kOther, hello);
  EXPECT_TRUE(absl::IsPermissionDenied(taken)) << taken;
  EXPECT_THAT(std::string(taken.message()),
              AllOf(HasSubstr("\"secret\" is taken"),
                    Not(HasSubstr(absl::StrCat("uid ", ::geteuid())))));
  // A caller who looks for a job is told as of any other name.
  hello.set_must_exist(true);
  const absl::Status hidden = OpenAs(kOther, hello);
  EXPECT_TRUE(absl::IsNotFound(hidden)) << hidden;
  v1::Hello absent = Harness::GoodHello("absent");
  absent.set_must_exist(true);
  EXPECT_EQ(std::string(hidden.message()),
            "there is no job \"secret\" on this node");
  EXPECT_EQ(std::string(OpenAs(kOther, absent).message()),
            "there is no job \"absent\" on this node");
  // Nor can it be changed.
  EXPECT_TRUE(
      absl::IsNotFound(harness_.supervisor().HoldJob("secret", kOther)));
  EXPECT_TRUE(absl::IsNotFound(harness_.supervisor().RecoverJob(
      "secret", kOther, /*failed_engine=*/0, /*to_durable=*/false)));
  EXPECT_TRUE(absl::IsNotFound(
      harness_.supervisor().WakeJob("secret", kOther).status()));
  EXPECT_TRUE(absl::IsNotFound(SetAccess("secret", {}, kOther)));
}

TEST_F(SupervisorAccessTest, AReaderLooksAndNoMore) {
  harness_.Start();
  v1::Hello hello = PrivateHello("a");
  hello.mutable_access()->add_readers("4711");
  ASSERT_TRUE(harness_.Open(hello).ok());
  const absl::Status refused = OpenAs(kOther, Harness::GoodHello("a"));
  EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("belongs to uid"));
  EXPECT_TRUE(
      absl::IsPermissionDenied(harness_.supervisor().HoldJob("a", kOther)));
}

// A user at the socket who is no trainer has no session, and learns neither
// which jobs there are nor that the daemon drains.
TEST_F(SupervisorAccessTest, ASessionTakesATrainer) {
  harness_.Start();
  ASSERT_TRUE(harness_.Open(PrivateHello("a")).ok());
  for (const bool is_draining : {false, true}) {
    ASSERT_TRUE(harness_.supervisor().SetDraining(is_draining).ok());
    for (const access::Role role :
         {access::Role::kNone, access::Role::kViewer}) {
      for (const char* job : {"a", "b"}) {
        for (const bool must_exist : {false, true}) {
          v1::Hello hello = Harness::GoodHello(job);
          hello.set_must_exist(must_exist);
          const absl::Status refused =
              OpenAs(UnixCaller(kOther.uid, role), hello);
          EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
          EXPECT_THAT(
              std::string(refused.message()),
              AllOf(HasSubstr("takes the role trainer, and uid 4711 has"),
                    HasSubstr("access.trainer_groups")));
        }
      }
    }
  }
  EXPECT_FALSE(harness_.Find("b").has_value());
}

TEST_F(SupervisorAccessTest, AMemberOfTheGroupMayAllButChangeTheAccess) {
  const auto found = access::FindMemberForTesting();
  if (!found.has_value()) GTEST_SKIP() << "this machine has no other user";
  const Caller member = UnixCaller(found->uid);
  harness_.Start();
  // Root may name any group.
  v1::Hello hello = PrivateHello("a");
  hello.mutable_access()->set_group(found->group);
  ASSERT_TRUE(OpenAs(UnixCaller(0), hello).ok());
  ASSERT_EQ(harness_.Find("a")->uid, 0u);
  EXPECT_TRUE(OpenAs(member, Harness::GoodHello("a")).ok());
  EXPECT_TRUE(harness_.supervisor().HoldJob("a", member).ok());
  harness_.supervisor().ReleaseJob("a");
  EXPECT_TRUE(absl::IsPermissionDenied(SetAccess("a", {}, member)));
  v1::JobAccess access = hello.access();
  access.clear_group();
  ASSERT_TRUE(SetAccess("a", access, UnixCaller(0)).ok());
  EXPECT_TRUE(
      absl::IsPermissionDenied(OpenAs(member, Harness::GoodHello("a"))));
  EXPECT_TRUE(absl::IsNotFound(harness_.supervisor().HoldJob("a", member)));
}

TEST_F(SupervisorAccessTest, ItIsChangedWithoutAnEngine) {
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  MustOpen("a");
  v1::JobAccess access;
  access.set_is_private(true);
  ASSERT_TRUE(SetAccess("a", access).ok());
  EXPECT_TRUE(harness_.Find("a")->access.is_private());
  ASSERT_TRUE(SetAccess("a", {}).ok());
  EXPECT_FALSE(harness_.Find("a")->access.is_private());
  EXPECT_TRUE(absl::IsNotFound(SetAccess("absent", access)));
  EXPECT_TRUE(absl::IsPermissionDenied(SetAccess("a", access, kOther)));
  access.add_readers("no such user");
  EXPECT_TRUE(absl::IsInvalidArgument(SetAccess("a", access)));
  EXPECT_FALSE(harness_.Find("a")->access.is_private());
  // While somebody deletes the job, or puts it to sleep, it stays as it is.
  ASSERT_TRUE(harness_.supervisor().HoldJob("a", kSelf).ok());
  EXPECT_TRUE(absl::IsUnavailable(SetAccess("a", {})));
  harness_.supervisor().ReleaseJob("a");
  EXPECT_TRUE(SetAccess("a", {}).ok());
}

// Two callers each change a part of what they have seen: the second one has to
// look again.
TEST_F(SupervisorAccessTest, AChangeOfWhatWasChangedMeanwhileIsRefused) {
  harness_.Start();
  MustOpen("a");
  const v1::JobAccess seen = harness_.Find("a")->access;
  v1::JobAccess first = seen;
  first.set_is_private(true);
  v1::JobAccess second = first;
  second.add_readers("root");
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.SetAccess("a", first, &seen, UnixCaller(0)).ok());
  const size_t events = EventsOf("a").size();
  const absl::Status refused =
      supervisor.SetAccess("a", second, &seen, UnixCaller(0));
  EXPECT_TRUE(absl::IsAborted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("changed meanwhile, and is now: private"));
  EXPECT_EQ(EventsOf("a").size(), events);
  ASSERT_TRUE(supervisor.SetAccess("a", second, &first, UnixCaller(0)).ok());
  EXPECT_TRUE(
      absl::IsAborted(supervisor.SetAccess("a", first, &first, UnixCaller(0))));
  EXPECT_EQ(harness_.Find("a")->access.readers_size(), 1);
}

TEST_F(SupervisorAccessTest, ItSurvivesTheSupervisor) {
  harness_.Start();
  ASSERT_TRUE(harness_.Open(PrivateHello("a")).ok());
  harness_.Abandon();
  harness_.Start();
  EXPECT_TRUE(harness_.Find("a")->access.is_private());
  EXPECT_TRUE(
      absl::IsPermissionDenied(OpenAs(kOther, Harness::GoodHello("a"))));
}

TEST_F(SupervisorAccessTest, ADamagedFileShowsTheJobToItsOwnerAlone) {
  harness_.Start();
  MustOpen("a");
  harness_.Abandon();
  std::ofstream(harness_.JobDirectory("a") + storage::kAccessFile)
      << "access 1 open\n";
  harness_.Start();
  EXPECT_THAT(harness_.Find("a")->access_problem, HasSubstr("is damaged"));
  EXPECT_TRUE(absl::IsNotFound(harness_.supervisor().HoldJob("a", kOther)));
  MustOpen("a");
  ASSERT_TRUE(SetAccess("a", {}).ok());
  EXPECT_EQ(harness_.Find("a")->access_problem, "");
  EXPECT_TRUE(
      absl::IsPermissionDenied(harness_.supervisor().HoldJob("a", kOther)));
}

TEST_F(SupervisorAccessTest, EventsAreForThoseWhoMayLook) {
  harness_.Start();
  ASSERT_TRUE(harness_.Open(PrivateHello("secret")).ok());
  MustOpen("open");
  for (const v1::Event& event : EventsOf("secret")) {
    EXPECT_FALSE(OtherSees(event)) << event.kind();
    EXPECT_TRUE(harness_.supervisor().MaySee(event, &kSelf)) << event.kind();
    EXPECT_FALSE(harness_.supervisor().MaySee(event, nullptr)) << event.kind();
  }
  ASSERT_FALSE(EventsOf("open").empty());
  EXPECT_TRUE(OtherSees(EventsOf("open").front()));
  ASSERT_FALSE(EventsOf("secret").empty());
  EXPECT_EQ(EventsOf("secret").front().text(), "created, private");
  ASSERT_TRUE(SetAccess("secret", {}).ok());
  const v1::Event set = EventsOf("secret").back();
  EXPECT_EQ(set.kind(), "job_access_set");
  EXPECT_EQ(set.actor(), kSelf.name());
  EXPECT_THAT(set.text(), HasSubstr("not private"));
  EXPECT_TRUE(OtherSees(set));
}

// Also when the job is no more.
TEST_F(SupervisorAccessTest, EventsOfAJobThatHasEndedStayWithThoseWhoCould) {
  harness_.Start();
  ASSERT_TRUE(harness_.Open(PrivateHello("secret")).ok());
  MustOpen("open");
  for (const char* job : {"secret", "open"}) {
    ASSERT_TRUE(harness_.supervisor().HoldJob(job, kSelf).ok());
    ASSERT_TRUE(
        harness_.supervisor().DeleteHeldJob(job, absl::InfiniteFuture()).ok());
    ASSERT_EQ(EventsOf(job).back().kind(), "job_deleted");
  }
  EXPECT_FALSE(OtherSees(EventsOf("secret").back()));
  EXPECT_TRUE(harness_.supervisor().MaySee(EventsOf("secret").back(), &kSelf));
  EXPECT_TRUE(OtherSees(EventsOf("open").back()));
}

// A log that an upgrade hands over has events of former jobs of a name too.
TEST_F(SupervisorAccessTest, ANewSupervisorShowsNothingOfAFormerJob) {
  harness_.Start();
  ASSERT_TRUE(harness_.Open(PrivateHello("a")).ok());
  ASSERT_TRUE(harness_.supervisor().HoldJob("a", kSelf).ok());
  ASSERT_TRUE(
      harness_.supervisor().DeleteHeldJob("a", absl::InfiniteFuture()).ok());
  const std::vector<v1::Event> former = EventsOf("a");
  MustOpen("a");
  // The log is this process's, and outlives the supervisor.
  harness_.Abandon();
  harness_.Start();
  ASSERT_FALSE(former.empty());
  for (const v1::Event& event : former) {
    EXPECT_FALSE(OtherSees(event)) << event.kind();
    EXPECT_TRUE(harness_.supervisor().MaySee(event, &kSelf)) << event.kind();
  }
  const std::vector<v1::Event> all = EventsOf("a");
  ASSERT_GT(all.size(), former.size());
  EXPECT_EQ(all[former.size()].kind(), "job_created");
  for (size_t i = former.size(); i < all.size(); ++i) {
    EXPECT_TRUE(OtherSees(all[i])) << all[i].kind();
  }
}

TEST_F(SupervisorAccessTest, AFloodOfNewJobsIsSlowedDown) {
  harness_.Start();
  // No job comes of it, but each time names are looked up.
  v1::Hello hello = PrivateHello("a");
  hello.mutable_access()->add_readers("no such user");
  hello.set_wire(v1::WIRE_GRPC);
  // The user counts, whichever certificate shows it.
  Caller other = {.uid = kOther.uid,
                  .role = access::Role::kTrainer,
                  .via = access::Via::kTls};
  absl::Status status;
  int asked = 0;
  do {
    ++asked;
    other.identity = absl::StrCat("DNS:host", asked);
    status = OpenAs(other, hello);
  } while (absl::IsInvalidArgument(status) && asked < 2000);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(StartsWith("uid 4711 has had"), HasSubstr("connect again")));
  EXPECT_GT(asked, static_cast<int>(CreationBudget::kBurst));
  // Others are not concerned, and operators never are.
  EXPECT_TRUE(OpenAs(UnixCaller(4712), Harness::GoodHello("b")).ok());
  MustOpen("c");
}

TEST_F(SupervisorAccessTest, APrivateDaemonHasOneUser) {
  harness_.set_engines_exit_with_supervisor();
  harness_.Start();
  const absl::Status refused = harness_.Open(PrivateHello("a")).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("private daemon"));
  MustOpen("a");
  EXPECT_TRUE(absl::IsFailedPrecondition(SetAccess("a", {})));
}

}  // namespace
}  // namespace optstate::supervisor
