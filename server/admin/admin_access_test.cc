// Walks over every method that names a job, as its owner, a member of its
// group, a reader, a stranger and an operator, over a unix socket and TLS; and
// over every list in which a private job could show.

#include <gmock/gmock.h>
#include <google/protobuf/dynamic_message.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/unique_fd.h"
#include "server/access/member_for_testing.h"
#include "server/admin/admin_server.h"
#include "server/admin/admin_service_fixture.h"
#include "server/admin/method_roles.h"
#include "server/observe/event_log.h"
#include "server/supervisor/permissions.h"

namespace optstate::admin {
namespace {

using access::Role;
using access::UnixCaller;
using access::Via;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::MethodDescriptor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

// Users that this test certainly does not run as.
constexpr uid_t kOwnerUid = 4711;
constexpr uid_t kReaderUid = 4712;
constexpr uid_t kStrangerUid = 4713;
constexpr uid_t kOperatorUid = 4714;

// The relation of a caller to the private job.
enum class Who { kOwner, kMember, kReader, kStranger, kOperator };
constexpr Who kAll[] = {Who::kOwner, Who::kMember, Who::kReader, Who::kStranger,
                        Who::kOperator};

enum class Verdict { kAllowed, kDenied, kHidden };
std::ostream& operator<<(std::ostream& out, Verdict verdict) {
  return out << (verdict == Verdict::kAllowed  ? "allowed"
                 : verdict == Verdict::kDenied ? "denied"
                                               : "hidden");
}

// The effect of a method on the job that it names. A new method that names one
// has to be added here.
enum class Does { kLook, kChange };
const std::map<std::string, Does>& MethodsOfJobs() {
  static const auto* const methods = new std::map<std::string, Does>{
      {"GetJob", Does::kLook},         {"ListSessions", Does::kLook},
      {"ListParameters", Does::kLook}, {"WatchEvents", Does::kLook},
      {"DeleteJob", Does::kChange},    {"RecoverJob", Does::kChange},
      {"SetJob", Does::kChange},       {"VerifyJob", Does::kChange},
      {"SleepJob", Does::kChange},     {"WakeJob", Does::kChange},
      {"TraceJob", Does::kChange},     {"DeleteJobWatched", Does::kChange}};
  return *methods;
}

// The table, written down once more.
Verdict Expected(Does does, Who who, Role role) {
  if (who == Who::kStranger) {
    // A viewer is refused before its job is looked for.
    return does == Does::kChange && role < Role::kTrainer ? Verdict::kDenied
                                                          : Verdict::kHidden;
  }
  if (does == Does::kLook) return Verdict::kAllowed;
  if (role < Role::kTrainer || who == Who::kReader) return Verdict::kDenied;
  return Verdict::kAllowed;
}

// Returns the field that names a job; null: the method names none.
const FieldDescriptor* JobField(const MethodDescriptor* method) {
  for (const char* name : {"name", "job"}) {
    const FieldDescriptor* field = method->input_type()->FindFieldByName(name);
    if (field != nullptr) return field;
  }
  return nullptr;
}

std::vector<const MethodDescriptor*> MethodsThatNameAJob() {
  std::vector<const MethodDescriptor*> methods;
  const auto* const service =
      v1::GetStatusRequest::descriptor()->file()->FindServiceByName("Admin");
  for (int i = 0; i < service->method_count(); ++i) {
    const MethodDescriptor* const method = service->method(i);
    // A method that this build does not have is refused to everyone.
    const bool is_known =
        std::any_of(std::begin(kMethodRoles), std::end(kMethodRoles),
                    [method](const MethodRole& row) {
                      return row.method == method->name();
                    });
    if (is_known && JobField(method) != nullptr) methods.push_back(method);
  }
  return methods;
}

class AdminAccessTest : public AdminServiceTest {
 protected:
  void SetUp() override {
    auto server =
        AdminServer::Start(service_.get(), AdminServer::Limits{}, nullptr);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    member_ = access::FindMemberForTesting();
    AddJob("secret", 1);
    AddJob("open", 2);
    MakePrivate();
  }

  // Makes the job as it was, after a call that has changed or deleted it.
  void MakePrivate() {
    supervisor::JobSummary& job = control_.jobs["secret"];
    job.name = "secret";
    job.uid = kOwnerUid;
    job.engine_pid = 17;
    job.access.Clear();
    job.access.set_is_private(true);
    job.access.add_readers(absl::StrCat(kReaderUid));
    if (member_.has_value()) job.access.set_group(member_->group);
  }

  // Returns whether this machine has such a caller, for a test that walks.
  bool Has(Who who) const { return who != Who::kMember || member_.has_value(); }
  uid_t UidOf(Who who) const {
    switch (who) {
      case Who::kOwner:
        return kOwnerUid;
      case Who::kMember:
        return member_->uid;
      case Who::kReader:
        return kReaderUid;
      case Who::kStranger:
        return kStrangerUid;
      case Who::kOperator:
        break;
    }
    return kOperatorUid;
  }
  // Over a unix socket all are trainers by default, but for operators.
  Caller UnixCallerOf(Who who, Role role = Role::kTrainer) const {
    return UnixCaller(UidOf(who),
                      who == Who::kOperator ? Role::kOperator : role);
  }
  Caller TlsCallerOf(Who who, Role role) const {
    return {.uid = UidOf(who),
            .role = who == Who::kOperator ? Role::kOperator : role,
            .via = Via::kTls,
            .identity = absl::StrCat("DNS:of-", UidOf(who))};
  }

  // Each caller has one connection.
  std::shared_ptr<grpc::Channel> ChannelOf(const Caller& caller) {
    std::shared_ptr<grpc::Channel>& channel = channels_[caller];
    if (channel != nullptr) return channel;
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                           0, fds),
              0);
    EXPECT_TRUE(server_->Serve(UniqueFd(fds[0]), caller, caller.name()).ok());
    channel = grpc::CreateInsecureChannelFromFd("daemon", fds[1]);
    return channel;
  }

  // The end of a call, and how many messages came before it.
  struct Answer {
    grpc::Status status;
    int messages = 0;
  };

  // Calls a method of a job, whether it answers with one message or several.
  Answer Call(const Caller& caller, const MethodDescriptor* method,
              const std::string& job) {
    google::protobuf::DynamicMessageFactory factory;
    const std::unique_ptr<Message> request(
        factory.GetPrototype(method->input_type())->New());
    request->GetReflection()->SetString(request.get(), JobField(method), job);
    const grpc::Slice slice(request->SerializeAsString());
    const grpc::ByteBuffer sent(&slice, 1);
    grpc::GenericStub stub(ChannelOf(caller));
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call =
        stub.PrepareCall(&context,
                         absl::StrCat("/optstate.v1.Admin/", method->name()),
                         &queue);
    const auto await = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      EXPECT_TRUE(queue.Next(&tag, &ok));
      return ok;
    };
    call->StartCall(nullptr);
    await();
    // A refusal may come before the request is sent.
    call->WriteLast(sent, grpc::WriteOptions(), nullptr);
    await();
    Answer answer;
    grpc::ByteBuffer message;
    for (call->Read(&message, nullptr); await();
         call->Read(&message, nullptr)) {
      ++answer.messages;
    }
    call->Finish(&answer.status, nullptr);
    await();
    return answer;
  }

  // A job that is hidden is told of as one that is not there.
  Verdict VerdictOf(const Caller& caller, const MethodDescriptor* method) {
    MakePrivate();
    const Answer answer = Call(caller, method, "secret");
    if (answer.status.error_code() == grpc::StatusCode::PERMISSION_DENIED) {
      return Verdict::kDenied;
    }
    const Answer none = Call(caller, method, "absent");
    const bool is_alike =
        answer.status.error_code() == none.status.error_code() &&
        answer.messages == none.messages &&
        answer.status.error_message() ==
            absl::StrReplaceAll(none.status.error_message(),
                                {{"absent", "secret"}});
    return is_alike ? Verdict::kHidden : Verdict::kAllowed;
  }

  static std::vector<std::string> NamesOf(const v1::ListJobsReply& list) {
    std::vector<std::string> names;
    for (const v1::Job& job : list.jobs()) names.push_back(job.name());
    return names;
  }

  std::unique_ptr<AdminServer> server_;
  std::map<Caller, std::shared_ptr<grpc::Channel>> channels_;
  std::optional<access::MemberForTesting> member_;
};

void AddEventOf(const std::string& job) {
  v1::Event event;
  event.set_kind("job_created");
  event.set_job(job);
  event.set_owner_uid(kOwnerUid);
  observe::Events().Add(std::move(event));
}

TEST_F(AdminAccessTest, TheTestKnowsEveryMethodThatNamesAJob) {
  std::set<std::string> named;
  for (const MethodDescriptor* method : MethodsThatNameAJob()) {
    named.insert(method->name());
    EXPECT_TRUE(MethodsOfJobs().contains(method->name()))
        << method->name() << " is not in this test";
  }
  EXPECT_EQ(named.size(), MethodsOfJobs().size());
}

TEST_F(AdminAccessTest, EveryMethodWireAndIdentityHasItsVerdict) {
  AddEventOf("secret");
  for (const MethodDescriptor* method : MethodsThatNameAJob()) {
    const auto does = MethodsOfJobs().find(method->name());
    if (does == MethodsOfJobs().end()) continue;  // told above
    for (const Who who : kAll) {
      if (!Has(who)) continue;
      for (const Role role : {Role::kViewer, Role::kTrainer}) {
        for (const Caller& caller :
             {UnixCallerOf(who, role), TlsCallerOf(who, role)}) {
          EXPECT_EQ(VerdictOf(caller, method),
                    Expected(does->second, who, caller.role))
              << method->name() << " by " << caller.name() << ", "
              << static_cast<int>(who) << ", " << access::RoleName(caller.role);
        }
      }
    }
  }
  if (!member_.has_value()) {
    GTEST_SKIP() << "walked without a member of a group: this machine has no "
                    "other user";
  }
}

// Setting who may use the job is a right of its own.
TEST_F(AdminAccessTest, TheAccessIsSetByTheOwnerAndOperators) {
  v1::SetJobRequest request;
  request.set_name("secret");
  request.mutable_access()->set_is_private(true);
  for (const Who who : kAll) {
    if (!Has(who)) continue;
    for (const Caller& caller :
         {UnixCallerOf(who), TlsCallerOf(who, Role::kTrainer)}) {
      MakePrivate();
      const absl::Status set =
          service_->SetJob(request, caller, Soon()).status();
      if (who == Who::kOwner || who == Who::kOperator) {
        EXPECT_TRUE(set.ok()) << caller.name() << ": " << set;
        EXPECT_EQ(control_.jobs["secret"].access.readers_size(), 0);
      } else if (who == Who::kStranger) {
        EXPECT_EQ(set, supervisor::NoJob("secret"));
      } else {
        EXPECT_TRUE(absl::IsPermissionDenied(set)) << set;
      }
    }
  }
}

TEST_F(AdminAccessTest, TheAccessIsSetAloneAndTakesNoEngine) {
  v1::SetJobRequest request;
  request.set_name("secret");
  request.mutable_access();
  control_.jobs["secret"].engine_pid = 0;
  control_.jobs["secret"].failed = true;
  control_.jobs["secret"].sleep.emplace();
  ASSERT_TRUE(service_->SetJob(request, Operator(), Soon()).ok());
  EXPECT_FALSE(control_.jobs["secret"].access.is_private());
  MakePrivate();
  request.set_host_budget_bytes(4096);
  const absl::Status both =
      service_->SetJob(request, Operator(), Soon()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(both)) << both;
  EXPECT_EQ(
      service_->SetJob(request, UnixCaller(kStrangerUid), Soon()).status(),
      supervisor::NoJob("secret"));
  EXPECT_TRUE(control_.jobs["secret"].access.is_private());
}

// A change by one caller is not undone by another, who has not seen it.
TEST_F(AdminAccessTest, TheAccessIsSetWhileItIsAsTheCallerHasSeenIt) {
  MakePrivate();
  v1::SetJobRequest request;
  request.set_name("secret");
  *request.mutable_access_before() = control_.jobs["secret"].access;
  EXPECT_TRUE(absl::IsInvalidArgument(
      service_->SetJob(request, Operator(), Soon()).status()));
  request.mutable_access();
  ASSERT_TRUE(service_->SetJob(request, Operator(), Soon()).ok());
  EXPECT_FALSE(control_.jobs["secret"].access.is_private());
  request.mutable_access()->set_is_private(true);
  EXPECT_TRUE(
      absl::IsAborted(service_->SetJob(request, Operator(), Soon()).status()));
  EXPECT_FALSE(control_.jobs["secret"].access.is_private());
}

TEST_F(AdminAccessTest, ListsShowAPrivateJobToThoseWhoMayLook) {
  for (const Who who : kAll) {
    if (!Has(who)) continue;
    for (const Caller& caller :
         {UnixCallerOf(who), TlsCallerOf(who, Role::kViewer)}) {
      const std::vector<std::string> names =
          NamesOf(service_->ListJobs(caller, Soon()));
      const int sessions =
          service_->ListSessions("", caller, Soon())->sessions_size();
      if (who == Who::kStranger) {
        EXPECT_THAT(names, ElementsAre("open")) << caller.name();
        EXPECT_EQ(sessions, 2);
      } else {
        EXPECT_THAT(names, UnorderedElementsAre("open", "secret"));
        EXPECT_EQ(sessions, 3);
      }
    }
  }
}

TEST_F(AdminAccessTest, AJobSaysWhoMayUseIt) {
  control_.jobs["open"].access_problem = "its file is damaged";
  const auto job = service_->GetJob("secret", UnixCaller(kReaderUid), Soon());
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->uid(), kOwnerUid);
  EXPECT_TRUE(job->access().is_private());
  EXPECT_EQ(job->access().readers(0), "4712");
  const auto open = service_->GetJob("open", UnixCaller(kStrangerUid), Soon());
  ASSERT_TRUE(open.ok()) << open.status();
  EXPECT_TRUE(open->has_access());
  EXPECT_THAT(open->reason(), HasSubstr("its file is damaged"));
}

TEST_F(AdminAccessTest, SumsHaveAllJobsAndListsOfUnansweredOnesDoNot) {
  AddJob("hangs", 0, /*hangs=*/true);
  control_.jobs["hangs"].access.set_is_private(true);
  control_.jobs["hangs"].uid = kOwnerUid;
  upgrade_.progress.set_id("b");
  upgrade_.progress.add_problems("job secret: it keeps its engine");
  upgrade_.progress.add_problems("job open: it keeps its engine");
  const v1::ServerStatus stranger =
      service_->GetStatus(UnixCaller(kStrangerUid), Soon());
  EXPECT_EQ(stranger.job_count(), 3u);
  EXPECT_EQ(stranger.session_count(), 3u);
  EXPECT_EQ(stranger.unanswered_size(), 0);
  EXPECT_THAT(stranger.upgrade().problems(0), Not(HasSubstr("secret")));
  EXPECT_THAT(stranger.upgrade().problems(1), HasSubstr("job open: "));
  EXPECT_EQ(
      service_->ListJobs(UnixCaller(kStrangerUid), Soon()).unanswered_size(),
      0);
  EXPECT_EQ(service_->ListSessions("", UnixCaller(kStrangerUid), Soon())
                ->unanswered_size(),
            0);
  for (const Caller& caller : {UnixCaller(kOwnerUid), Operator()}) {
    const v1::ServerStatus status = service_->GetStatus(caller, Soon());
    ASSERT_EQ(status.unanswered_size(), 1);
    EXPECT_EQ(status.unanswered(0).name(), "hangs");
    EXPECT_THAT(status.upgrade().problems(0), HasSubstr("job secret: "));
  }
}

TEST_F(AdminAccessTest, TiersAndDevicesNameNoPrivateJobToOthers) {
  const auto tier_jobs = [this](const Caller& caller) {
    std::vector<std::string> names;
    const auto tiers = service_->DescribeTiers({}, caller);
    EXPECT_TRUE(tiers.ok()) << tiers.status();
    for (const v1::TierJob& job : tiers->memory().jobs()) {
      names.push_back(job.job());
    }
    return names;
  };
  EXPECT_THAT(tier_jobs(UnixCaller(kStrangerUid)), ElementsAre("open"));
  EXPECT_THAT(tier_jobs(UnixCaller(kReaderUid)),
              UnorderedElementsAre("open", "secret"));
  AddJob("hangs", 0, /*hangs=*/true);
  control_.jobs["hangs"].access.set_is_private(true);
  control_.jobs["hangs"].uid = kOwnerUid;
  EXPECT_EQ(service_->DescribeDevices(UnixCaller(kStrangerUid), Soon())
                .unanswered_size(),
            0);
  EXPECT_EQ(service_->DescribeDevices(UnixCaller(kOwnerUid), Soon())
                .unanswered_size(),
            1);
}

// Everybody may read reports that have private jobs in their sums alone.
TEST_F(AdminAccessTest, TheReportForAllHasNoNameOfAPrivateJob) {
  const v1::NodeReport report = service_->DescribeNode(Soon());
  EXPECT_THAT(report.ShortDebugString(), Not(HasSubstr("secret")));
  EXPECT_THAT(report.ShortDebugString(), HasSubstr("open"));
  EXPECT_EQ(report.status().job_count(), 2u);
  EXPECT_EQ(report.status().session_count(), 3u);
  ASSERT_EQ(report.jobs_size(), 2);
  int nameless = 0;
  for (const v1::Job& job : report.jobs()) {
    EXPECT_EQ(job.phase(), v1::JOB_PHASE_READY);
    if (!job.name().empty()) continue;
    ++nameless;
    EXPECT_EQ(job.sessions_size(), 0);
    EXPECT_EQ(job.uid(), 0u);
  }
  EXPECT_EQ(nameless, 1);
}

TEST_F(AdminAccessTest, EventsOfAPrivateJobGoToThoseWhoMayLook) {
  const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
  AddEventOf("secret");
  AddEventOf("open");
  const auto jobs_seen = [&](const Caller& caller) {
    const auto stub = v1::Admin::NewStub(ChannelOf(caller));
    grpc::ClientContext context;
    v1::WatchEventsRequest request;
    request.set_after_sequence(before);
    const auto reader = stub->WatchEvents(&context, request);
    std::vector<std::string> jobs;
    for (v1::Event event; reader->Read(&event);) jobs.push_back(event.job());
    EXPECT_TRUE(reader->Finish().ok());
    return jobs;
  };
  EXPECT_THAT(jobs_seen(UnixCaller(kStrangerUid)), ElementsAre("open"));
  EXPECT_THAT(jobs_seen(TlsCallerOf(Who::kStranger, Role::kViewer)),
              ElementsAre("open"));
  EXPECT_THAT(jobs_seen(UnixCaller(kReaderUid)), ElementsAre("secret", "open"));
  EXPECT_THAT(jobs_seen(Operator()), ElementsAre("secret", "open"));
}

}  // namespace
}  // namespace optstate::admin
