// Tests whether operators still get answers while strangers misuse the Admin
// server. The strangers write HTTP/2 by hand: no library does this.
#include "server/admin/admin_server.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "server/admin/http2_frames.h"

namespace optstate::admin {
namespace {

using ::testing::HasSubstr;

constexpr char kReflection[] =
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
constexpr char kGetStatus[] = "/optstate.v1.Admin/GetStatus";
constexpr char kMessage[] = {0, 0, 0, 0, 0};  // empty, uncompressed

class NoJobs : public supervisor::SupervisorControl {
 public:
  std::vector<supervisor::JobSummary> Jobs() override { return {}; }
  absl::StatusOr<supervisor::JobSummary> FindJob(const std::string&) override {
    return None();
  }
  absl::Status HoldJob(const std::string&, const Caller&) override {
    return None();
  }
  void ReleaseJob(const std::string&) override {}
  std::shared_ptr<supervisor::JobDeletion> BeginDeletion(
      const std::string&) override {
    auto deletion = std::make_shared<supervisor::JobDeletion>();
    deletion->End(None());
    return deletion;
  }
  absl::StatusOr<std::shared_ptr<supervisor::SleepOperation>> PutToSleep(
      const std::string&, pid_t) override {
    return None();
  }
  absl::StatusOr<std::shared_ptr<supervisor::SleepOperation>> WakeJob(
      const std::string&, const Caller&) override {
    return None();
  }
  absl::Status RecoverJob(const std::string&, const Caller&, pid_t,
                          bool) override {
    return None();
  }
  absl::Status SetAccess(const std::string&, const v1::JobAccess&,
                         const v1::JobAccess*, const Caller&) override {
    return None();
  }
  bool MaySee(const v1::Event&, const Caller*) const override { return false; }
  absl::StatusOr<std::string> AwaitEngine(const std::string&,
                                          absl::Time) override {
    return None();
  }
  absl::Status ReplaceEngine(const std::string&, absl::Time) override {
    return None();
  }
  absl::Status SetDraining(bool) override { return absl::OkStatus(); }
  bool draining() const override { return false; }

 private:
  static absl::Status None() { return absl::NotFoundError("no job"); }
};

class NoUpgrade : public UpgradeControl {
 public:
  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string&) override {
    return absl::UnimplementedError("");
  }
  v1::UpgradeProgress upgrade_progress() override { return {}; }
};

std::string Frame(int type, int flags, uint32_t stream,
                  absl::string_view payload) {
  std::string frame;
  for (int shift = 16; shift >= 0; shift -= 8) {
    frame += static_cast<char>(payload.size() >> shift);
  }
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (int shift = 24; shift >= 0; shift -= 8) {
    frame += static_cast<char>(stream >> shift);
  }
  return absl::StrCat(frame, payload);
}

std::string Short(absl::string_view text) {
  return absl::StrCat(std::string(1, static_cast<char>(text.size())), text);
}

// The HEADERS frame of a call; entries of HPACK's static table are given by
// number.
std::string Call(uint32_t stream, absl::string_view path) {
  return Frame(
      1, 4, stream,
      absl::StrCat("\x83\x86\x04", Short(path), "\x01", Short("x"), "\x0f\x10",
                   Short("application/grpc"), std::string(1, '\0'), Short("te"),
                   Short("trailers")));
}
std::string Data(uint32_t stream, absl::string_view bytes) {
  return Frame(0, 1, stream, bytes);
}
std::string Reset(uint32_t stream) {
  return Frame(3, 0, stream, absl::string_view("\0\0\0\x8", 4));
}
std::string Opening() {
  return absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Frame(4, 0, 0, ""));
}

class AdminServerTest : public testing::Test {
 protected:
  const Caller kStranger = access::UnixCaller(4711);

  void Start(const AdminServer::Limits& limits = {}) {
    ServerInfo info;
    info.state_dir = "/tmp";
    service_.emplace(&control_, &engines_, &upgrade_, info);
    auto server = AdminServer::Start(&*service_, limits);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // Connects as `caller`; returns the peer's end.
  UniqueFd Connect(const Caller& caller) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                           0, fds),
              0);
    last_ = server_->Serve(UniqueFd(fds[0]), caller,
                           absl::StrCat("uid ", caller.uid));
    return UniqueFd(fds[1]);
  }

  std::shared_ptr<grpc::Channel> Channel(const Caller& caller) {
    return grpc::CreateInsecureChannelFromFd("daemon",
                                             Connect(caller).release());
  }

  static grpc::Status GetStatus(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::minutes(1));
    v1::ServerStatus status;
    return v1::Admin::NewStub(channel)->GetStatus(&context, {}, &status);
  }

  void ExpectAnswered(const Caller& caller) {
    const grpc::Status status = GetStatus(Channel(caller));
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  // Sends all bytes; blocks until all are taken or the other end closes.
  static void Send(const UniqueFd& fd, absl::string_view bytes) {
    while (!bytes.empty()) {
      pollfd entry = {fd.get(), POLLOUT, 0};
      ASSERT_EQ(::poll(&entry, 1, 60'000), 1);
      const ssize_t count =
          ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) return;
      bytes.remove_prefix(static_cast<size_t>(count));
    }
  }

  // Receives the server's bytes, until `enough` or until it closes.
  static std::string Receive(
      const UniqueFd& fd,
      const std::function<bool(const std::string&)>& enough =
          [](const std::string&) { return false; }) {
    std::string all;
    while (!enough(all)) {
      pollfd entry = {fd.get(), POLLIN, 0};
      if (::poll(&entry, 1, 60'000) != 1) return all + " and then nothing";
      char buffer[4096];
      const ssize_t count = ::recv(fd.get(), buffer, sizeof(buffer), 0);
      if (count <= 0) break;
      all.append(buffer, static_cast<size_t>(count));
    }
    return all;
  }

  NoJobs control_;
  NoUpgrade upgrade_;
  EngineChannels engines_;
  std::optional<AdminService> service_;
  std::unique_ptr<AdminServer> server_;
  absl::Status last_;
};

TEST_F(AdminServerTest, AnswersEverybody) {
  Start();
  for (const Caller& caller :
       {kStranger, access::UnixCaller(0), access::UnixCaller(::geteuid()),
        access::InsecureTcpCaller()}) {
    ExpectAnswered(caller);
    ExpectAnswered(caller);
  }
}

// The age that what engines have said may have is in a call's metadata.
TEST_F(AdminServerTest, AnAgeIsAWholeNumberOfMilliseconds) {
  Start();
  const auto stub = v1::Admin::NewStub(Channel(access::UnixCaller(0)));
  struct Said {
    const char* age;
    bool is_taken;
  };
  constexpr Said kSaid[] = {{"0", true},          {"100", true},
                            {"4294967295", true}, {"-1", false},
                            {"x", false},         {"1.5", false},
                            {"1s", false},        {"99999999999", false}};
  for (const Said& each : kSaid) {
    const auto expect = [&](const grpc::Status& status) {
      EXPECT_EQ(status.error_code(), each.is_taken
                                         ? grpc::StatusCode::OK
                                         : grpc::StatusCode::INVALID_ARGUMENT)
          << each.age << ": " << status.error_message();
      if (each.is_taken) return;
      EXPECT_THAT(status.error_message(), HasSubstr("optstate-max-age-ms"));
      EXPECT_THAT(status.error_message(), HasSubstr(each.age));
    };
    grpc::ClientContext of_status;
    of_status.AddMetadata("optstate-max-age-ms", each.age);
    v1::ServerStatus status;
    expect(stub->GetStatus(&of_status, {}, &status));
    grpc::ClientContext of_jobs;
    of_jobs.AddMetadata("optstate-max-age-ms", each.age);
    v1::ListJobsReply jobs;
    expect(stub->ListJobs(&of_jobs, {}, &jobs));
    grpc::ClientContext of_sessions;
    of_sessions.AddMetadata("optstate-max-age-ms", each.age);
    v1::ListSessionsReply sessions;
    expect(stub->ListSessions(&of_sessions, {}, &sessions));
  }
}

TEST_F(AdminServerTest, ManyUsersAreServed) {
  Start();
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (uid_t uid = 1000; uid < 1040; ++uid) {
    channels.push_back(Channel(access::UnixCaller(uid)));
    EXPECT_TRUE(GetStatus(channels.back()).ok()) << uid;
  }
  for (const auto& channel : channels) EXPECT_TRUE(GetStatus(channel).ok());
}

TEST_F(AdminServerTest, SilentStreamsOfAStrangerTakeNobodyElsesThreads) {
  Start();
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 4; ++i) {
    strangers.push_back(Connect(kStranger));
    std::string bytes = Opening();
    for (uint32_t stream = 1; stream < 20; stream += 2) {
      absl::StrAppend(&bytes, Call(stream, kReflection));
    }
    Send(strangers.back(), bytes);
    // The wait ensures that the calls have arrived: excess calls are answered.
    Http2Frames frames(Http2Frames::Sender::kServer);
    size_t taken = 0;
    Receive(strangers.back(), [&](const std::string& all) {
      EXPECT_TRUE(frames.Take(all.substr(taken)).ok());
      taken = all.size();
      return frames.opened_stream() != 0;
    });
  }
  ExpectAnswered(access::UnixCaller(0));
  ExpectAnswered(access::UnixCaller(::geteuid()));
  ExpectAnswered(access::UnixCaller(4712));
}

TEST_F(AdminServerTest, ResetCallsOfAStrangerTakeNobodyElsesThreads) {
  Start();
  const UniqueFd stranger = Connect(kStranger);
  std::string bytes = Opening();
  for (uint32_t stream = 1; stream < 2000; stream += 2) {
    absl::StrAppend(&bytes, Call(stream, kGetStatus),
                    Data(stream, {kMessage, sizeof(kMessage)}), Reset(stream));
  }
  Send(stranger, bytes);
  ExpectAnswered(access::UnixCaller(0));
  ExpectAnswered(access::UnixCaller(::geteuid()));
  ExpectAnswered(access::UnixCaller(4712));
}

TEST_F(AdminServerTest, ASilentReflectionStreamEnds) {
  AdminServer::Limits limits;
  limits.calls.reflection = absl::Milliseconds(1);
  Start(limits);
  const UniqueFd stranger = Connect(access::UnixCaller(0));
  Send(stranger, Opening() + Call(1, kReflection));
  Http2Frames frames(Http2Frames::Sender::kServer);
  size_t taken = 0;
  Receive(stranger, [&](const std::string& all) {
    EXPECT_TRUE(frames.Take(all.substr(taken)).ok());
    taken = all.size();
    return frames.opened_stream() == 1;
  });
  EXPECT_EQ(frames.opened_stream(), 1u) << "no answer to the stream";
}

TEST_F(AdminServerTest, ARefusedConnectionIsAnsweredInGrpc) {
  AdminServer::Limits limits;
  limits.connections_of_user = 2;
  Start(limits);
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < 2; ++i) {
    channels.push_back(Channel(kStranger));
    ASSERT_TRUE(GetStatus(channels.back()).ok());
  }
  const grpc::Status refused = GetStatus(Channel(kStranger));
  EXPECT_TRUE(absl::IsResourceExhausted(last_)) << last_;
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
      << refused.error_message();
  EXPECT_THAT(refused.error_message(),
              HasSubstr("uid 4711 already has 2 gRPC connections to this "
                        "daemon (limits.user_grpc_connections_max)"));
  ExpectAnswered(access::UnixCaller(4712));
}

// gRPC 1.51 needs 7 s for one header of 16 MiB, on a thread that serves others.
TEST_F(AdminServerTest, HugeMetadataNeverReachesGrpc) {
  Start();
  const UniqueFd stranger = Connect(kStranger);
  const std::string half(8 << 20, 'x');
  // A literal with a value of 16 MiB, in frames of 16 KiB.
  std::string bytes =
      Opening() + Frame(1, 0, 1,
                        absl::StrCat("\x83\x86\x04", Short(kGetStatus),
                                     std::string(1, '\0'), Short("big"),
                                     "\x7f\x81\xff\xff\x07"));
  Send(stranger, bytes);
  for (int i = 0; i < 1024; ++i) {
    Send(stranger, Frame(9, i == 1023 ? 4 : 0, 1, std::string(16 << 10, 'x')));
  }
  EXPECT_THAT(Receive(stranger), HasSubstr("a call's metadata may have 16384"));
  ExpectAnswered(access::UnixCaller(0));
  ExpectAnswered(kStranger);
}

TEST_F(AdminServerTest, AFloodOfFramesIsSlowedDownAndNothingElse) {
  Start();
  const UniqueFd stranger = Connect(kStranger);
  Send(stranger, Opening());
  const std::string ping = Frame(6, 0, 0, "12345678");
  std::string pings;
  for (int i = 0; i < 2000; ++i) pings += ping;
  Send(stranger, pings);
  ExpectAnswered(access::UnixCaller(0));
  ExpectAnswered(access::UnixCaller(4712));
}

TEST_F(AdminServerTest, EndsWithConnectionsOpen) {
  Start();
  const auto channel = Channel(kStranger);
  ASSERT_TRUE(GetStatus(channel).ok());
  const UniqueFd silent = Connect(kStranger);
  Send(silent, Opening() + Call(1, kReflection));
  server_->SetUnhealthy();
  server_->Shutdown(absl::Now());
  server_.reset();
  Receive(silent);  // to its end
}

}  // namespace
}  // namespace optstate::admin
