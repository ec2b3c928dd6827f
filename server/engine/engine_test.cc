// Engines as the supervisor runs them: processes of their own (this binary,
// started again), a control socket, a private gRPC socket and a job directory.

#include "server/engine/engine.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/grpc_status.h"
#include "proto/types/unique_fd.h"
#include "server/transport/shm_test_peer.h"
#include "server/transport/test_layout.h"

namespace optstate {
namespace {

absl::Time Patience() { return absl::Now() + absl::Minutes(2); }

struct Pair {
  UniqueFd ours;
  UniqueFd theirs;
};

Pair MakePair(int type) {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, type, 0, fds), 0);
  ::fcntl(fds[0], F_SETFD, FD_CLOEXEC);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// An engine process, and the supervisor's end of what binds them.
class EngineProcess {
 public:
  explicit EngineProcess(const std::string& job_dir) {
    Pair control = MakePair(SOCK_SEQPACKET);
    Pair grpc = MakePair(SOCK_STREAM);
    const std::string arguments[] = {absl::StrCat(control.theirs.get()),
                                     absl::StrCat(grpc.theirs.get())};
    pid_ = ::fork();
    if (pid_ == 0) {
      ::execl("/proc/self/exe", "engine", "--engine", arguments[0].c_str(),
              arguments[1].c_str(), job_dir.c_str(), nullptr);
      ::_exit(127);
    }
    control_ = std::move(control.ours);
    ::fcntl(grpc.ours.get(), F_SETFL, O_NONBLOCK | O_RDWR);
    stub_ = v1::Engine::NewStub(
        grpc::CreateInsecureChannelFromFd("engine", grpc.ours.release()));
  }
  ~EngineProcess() {
    if (pid_ > 0) Kill();
  }

  pid_t pid() const { return pid_; }
  v1::Engine::Stub* stub() { return stub_.get(); }

  // The next event; none when the engine has gone.
  v1::EngineEvent AwaitEvent() {
    char packet[4096];
    const ssize_t bytes = ::recv(control_.get(), packet, sizeof(packet), 0);
    v1::EngineEvent event;
    if (bytes > 0) event.ParseFromArray(packet, static_cast<int>(bytes));
    return event;
  }

  void SendPacket(const std::string& packet, int fd) {
    iovec io = {.iov_base = const_cast<char*>(packet.data()),
                .iov_len = packet.size()};
    alignas(cmsghdr) char buffer[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    if (fd >= 0) {
      message.msg_control = buffer;
      message.msg_controllen = sizeof(buffer);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      *reinterpret_cast<int*>(CMSG_DATA(header)) = fd;
    }
    EXPECT_GT(::sendmsg(control_.get(), &message, MSG_NOSIGNAL), 0);
  }

  // Hands a new connection over; `reply` is what the engine says to its Hello.
  std::unique_ptr<ShmTestPeer> Connect(v1::Wire wire, v1::HelloReply* reply) {
    SocketPair sockets = MakeSocketPair();
    v1::AdoptConnection adopt;
    adopt.mutable_hello()->set_wire(wire);
    adopt.mutable_hello()->set_job("test");
    adopt.set_protocol_version(1);
    SendPacket(adopt.SerializeAsString(), sockets.engine.get());
    sockets.engine.reset();
    auto frame = shm::ReceiveFrame(sockets.client.get(), 4096, Patience());
    EXPECT_TRUE(frame.ok()) << frame.status();
    EXPECT_TRUE(frame.ok() && reply->ParseFromString(frame->payload));
    return std::make_unique<ShmTestPeer>(std::move(sockets.client),
                                         TestLayout(), 1, 0);
  }

  std::unique_ptr<ShmTestPeer> Connect() {
    v1::HelloReply reply;
    auto peer = Connect(v1::WIRE_SHM, &reply);
    EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
    return peer;
  }

  v1::Job Describe() {
    grpc::ClientContext context;
    v1::Job job;
    v1::GetJobRequest request;
    const grpc::Status status = stub_->GetJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }

  // Closes the control socket, as a supervisor that goes.
  int CloseAndWait() {
    control_.reset();
    return Wait();
  }
  void Kill() {
    ::kill(pid_, SIGKILL);
    Wait();
  }
  int Wait() {
    int status = -1;
    EXPECT_EQ(::waitpid(std::exchange(pid_, -1), &status, 0) > 0, true);
    return status;
  }

 private:
  pid_t pid_ = -1;
  UniqueFd control_;
  std::unique_ptr<v1::Engine::Stub> stub_;
};

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = absl::StrCat(testing::TempDir(), "/engine-XXXXXX");
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    job_dir_ = name;
  }

  std::unique_ptr<EngineProcess> Start() {
    auto engine = std::make_unique<EngineProcess>(job_dir_);
    EXPECT_TRUE(engine->AwaitEvent().has_ready());
    return engine;
  }

  // Registers with `request` changed, attaches and loads zeros.
  static void Begin(ShmTestPeer* peer, bool ephemeral) {
    v1::SessionRequest request = peer->RegisterRequest();
    request.mutable_register_()->set_ephemeral(ephemeral);
    ASSERT_TRUE(peer->Send(request).ok());
    const auto reply = peer->Receive();
    ASSERT_TRUE(reply.ok());
    ASSERT_EQ(reply->status().code(), 0) << reply->status().message();
    const absl::Status attached = peer->Attach(peer->MakeSegment());
    ASSERT_TRUE(attached.ok()) << attached;
    if (reply->register_().phase() != v1::JOB_PHASE_LOADING) return;
    shm::Submission submission = {};
    submission.op = static_cast<uint16_t>(shm::Op::kBeginLoad);
    ASSERT_TRUE(peer->Call(submission).status.ok());
    submission.op = static_cast<uint16_t>(shm::Op::kLoad);
    submission.array = v1::STATE_ARRAY_MASTER;
    submission.dtype = static_cast<uint16_t>(DType::kFloat32);
    for (const Piece& piece : peer->partition().pieces) {
      submission.parameter = piece.parameter;
      submission.numel = piece.numel;
      const auto loaded = peer->Call(submission);
      ASSERT_TRUE(loaded.status.ok()) << loaded.status;
    }
    submission = {};
    submission.op = static_cast<uint16_t>(shm::Op::kFinishLoad);
    const auto finished = peer->Call(submission);
    ASSERT_TRUE(finished.status.ok()) << finished.status;
  }

  static void TakeStep(ShmTestPeer* peer, uint64_t step) {
    const auto pushed = peer->Call(peer->Push(step));
    ASSERT_TRUE(pushed.status.ok()) << pushed.status;
    for (int group = 0; group < 2; ++group) {
      peer->commit_groups()[group] = {.lr = 1e-3,
                                      .beta1 = 0.9,
                                      .beta2 = 0.999,
                                      .eps = 1e-8,
                                      .weight_decay = 0,
                                      .maximize = 0,
                                      .reserved0 = 0,
                                      .reserved = {}};
    }
    const auto committed = peer->Call(peer->Commit(step));
    ASSERT_TRUE(committed.status.ok()) << committed.status;
    EXPECT_EQ(committed.completion.step, step);
  }

  std::string job_dir_;
};

TEST_F(EngineTest, TakesStepsAndEndsWithItsSupervisor) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  for (uint64_t step = 1; step <= 3; ++step) TakeStep(peer.get(), step);
  const v1::Job job = engine->Describe();
  EXPECT_EQ(job.name(), "test");
  EXPECT_EQ(job.committed_step(), 3u);
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job.engine_pid(), engine->pid());
  EXPECT_EQ(job.engine_restarts(), 2u);
  EXPECT_EQ(job.state_dir(), job_dir_);
  EXPECT_EQ(engine->CloseAndWait(), 0);
  EXPECT_TRUE(absl::IsUnavailable(peer->AwaitEnd()));
}

TEST_F(EngineTest, SignalsAreTheSupervisorsBusiness) {
  auto engine = Start();
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) {
    ASSERT_EQ(::kill(engine->pid(), signal), 0);
  }
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  EXPECT_EQ(engine->CloseAndWait(), 0);
}

TEST_F(EngineTest, StateOutlivesAnEngineKilledBetweenSteps) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  engine->Kill();
  EXPECT_TRUE(peer->AwaitEnd().ok());  // no last word

  engine = Start();
  v1::HelloReply hello;
  peer = engine->Connect(v1::WIRE_SHM, &hello);
  EXPECT_NE(hello.engine_instance(), 0u);
  EXPECT_EQ(hello.protocol_version(), 1u);
  Begin(peer.get(), false);
  EXPECT_EQ(engine->Describe().committed_step(), 1u);
  TakeStep(peer.get(), 2);
}

TEST_F(EngineTest, ASecondEngineWaitsForTheFirst) {
  auto first = Start();
  auto second = std::make_unique<EngineProcess>(job_dir_);
  auto peer = first->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  first->Kill();
  EXPECT_TRUE(second->AwaitEvent().has_ready());
  EXPECT_EQ(second->Describe().committed_step(), 1u);
}

TEST_F(EngineTest, AnEphemeralJobIsOverWithItsLastSession) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), true);
  peer.reset();
  EXPECT_TRUE(engine->AwaitEvent().has_finished());
  v1::HelloReply hello;
  engine->Connect(v1::WIRE_SHM, &hello);
  EXPECT_TRUE(absl::IsUnavailable(FromProto(hello.status())));
  EXPECT_EQ(engine->CloseAndWait(), 0);
}

TEST_F(EngineTest, AJobThatNobodyRegistersIsOver) {
  auto engine = Start();
  engine->Connect();
  EXPECT_TRUE(engine->AwaitEvent().has_finished());
}

TEST_F(EngineTest, RefusesWhatItDoesNotUnderstand) {
  auto engine = Start();
  v1::HelloReply hello;
  engine->Connect(static_cast<v1::Wire>(9), &hello);
  EXPECT_TRUE(absl::IsInvalidArgument(FromProto(hello.status())));
  engine->SendPacket("\xff\xff no AdoptConnection", STDIN_FILENO);
  engine->SendPacket(v1::AdoptConnection().SerializeAsString() + "\x0a", -1);
  auto peer = engine->Connect();
  Begin(peer.get(), false);
}

TEST_F(EngineTest, AJobThatCannotBeOpenedSaysWhy) {
  {
    auto engine = Start();
    auto peer = engine->Connect();
    Begin(peer.get(), false);
    TakeStep(peer.get(), 1);
  }
  // Whatever files a job has, none of them is ten bytes long.
  const std::string command =
      absl::StrCat("for f in $(find ", job_dir_,
                   " -type f ! -name lock); do truncate -s 10 $f; done");
  ASSERT_EQ(std::system(command.c_str()), 0);
  auto engine = Start();
  v1::HelloReply hello;
  auto peer = engine->Connect(v1::WIRE_SHM, &hello);
  absl::Status status = FromProto(hello.status());
  if (status.ok()) status = peer->Register();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  const v1::Job job = engine->Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_FALSE(job.reason().empty());
}

TEST_F(EngineTest, DrainRefusesNewStepsUntilItIsResumed) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  v1::DrainRequest request;
  request.mutable_timeout()->set_seconds(60);
  v1::DrainReply reply;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(engine->stub()->Drain(&context, request, &reply).ok());
  }
  EXPECT_TRUE(absl::IsUnavailable(peer->Call(peer->Push(1)).status));
  request.set_resume(true);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(engine->stub()->Drain(&context, request, &reply).ok());
  }
  TakeStep(peer.get(), 1);
}

TEST_F(EngineTest, ListsParameters) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  v1::ListParametersRequest request;
  request.set_job("test");
  v1::ListParametersReply reply;
  grpc::ClientContext context;
  ASSERT_TRUE(engine->stub()->ListParameters(&context, request, &reply).ok());
  EXPECT_EQ(reply.parameters_size(), 3);
  grpc::ClientContext another;
  request.set_job("other");
  EXPECT_EQ(
      engine->stub()->ListParameters(&another, request, &reply).error_code(),
      grpc::StatusCode::NOT_FOUND);
}

}  // namespace

// The engine process: --engine CONTROL_FD GRPC_FD JOB_DIR.
int RunTestEngine(char** argv) {
  EngineOptions options;
  options.control_fd = std::atoi(argv[2]);
  options.grpc_fd = std::atoi(argv[3]);
  options.config.set_job("test");
  options.config.set_uid(::getuid());
  options.config.set_job_dir(argv[4]);
  options.config.set_restarts(2);
  v1::DaemonConfig& daemon = *options.config.mutable_daemon();
  daemon.mutable_engine()->set_workers(2);
  daemon.mutable_limits()->set_handshake_timeout_ms(200);
  return RunEngine(options);
}

}  // namespace optstate

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--engine") {
    return optstate::RunTestEngine(argv);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
