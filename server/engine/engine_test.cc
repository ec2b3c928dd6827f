// Tests engines as the supervisor runs them: processes of their own (this
// binary, started again), a control socket, a private gRPC socket and a job
// directory.

#include "server/engine/engine.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <set>
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
#include "proto/types/version.h"
#include "server/control/control_socket.h"
#include "server/transport/shm_test_peer.h"
#include "server/transport/test_layout.h"

namespace optstate {
namespace {

absl::Time Patience() { return absl::Now() + absl::Minutes(2); }

UniqueFd MemoryFile(const std::string& text) {
  UniqueFd file(::memfd_create("gradients", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(file.get(), text.data(), text.size(), 0),
            static_cast<ssize_t>(text.size()));
  return file;
}

struct Event {
  v1::EngineEvent event;
  UniqueFd fd;
};

// A supervisor's end of the control connection and of the private gRPC one.
class Supervisor {
 public:
  explicit Supervisor(const std::string& job_dir) {
    auto connection = control::Connect(job_dir);
    EXPECT_TRUE(connection.ok()) << connection.status();
    if (connection.ok()) control_ = *std::move(connection);
  }

  void Supervise(bool draining = false, const v1::Limits& limits = {}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ::fcntl(fds[0], F_SETFL, O_NONBLOCK | O_RDWR);
    stub_ = v1::Engine::NewStub(
        grpc::CreateInsecureChannelFromFd("engine", fds[0]));
    const UniqueFd theirs(fds[1]);
    v1::SupervisorRequest request;
    request.mutable_supervise()->set_log_level("info");
    request.mutable_supervise()->set_draining(draining);
    *request.mutable_supervise()->mutable_limits() = limits;
    Send(request, theirs.get());
  }
  void StartJob() {
    v1::SupervisorRequest request;
    request.mutable_start_job();
    Send(request);
  }
  void Keep(uint32_t rank, const std::string& text) {
    v1::SupervisorRequest request;
    request.mutable_kept_gradients()->set_rank(rank);
    request.mutable_kept_gradients()->set_client_instance(rank + 50);
    Send(request, MemoryFile(text).get());
  }
  void Drain(bool draining) {
    v1::SupervisorRequest request;
    request.mutable_drain()->set_draining(draining);
    Send(request);
  }
  void Stop() {
    v1::SupervisorRequest request;
    request.mutable_stop();
    Send(request);
  }
  void Send(const v1::SupervisorRequest& request, int fd = -1) {
    SendPacket(request.SerializeAsString(), fd);
  }
  // Sends a request, waiting for room.
  void SendWhenItCan(const v1::SupervisorRequest& request, int fd) {
    while (true) {
      const int error =
          control::Send(control_.get(), request.SerializeAsString(), fd);
      if (error == 0) return;
      ASSERT_EQ(error, EAGAIN);
      pollfd writable{control_.get(), POLLOUT, 0};
      ::poll(&writable, 1, -1);
    }
  }
  void SendPacket(const std::string& packet, int fd = -1) {
    EXPECT_EQ(control::Send(control_.get(), packet, fd), 0);
  }

  // Waits for the next event; empty when the engine has gone.
  Event AwaitEvent() {
    pollfd readable{control_.get(), POLLIN, 0};
    ::poll(&readable, 1, -1);
    Event event;
    auto packet = control::Receive(control_.get());
    if (!packet.ok() || !packet->has_value()) return event;
    EXPECT_TRUE(event.event.ParseFromString((*packet)->bytes));
    event.fd = std::move((*packet)->fd);
    return event;
  }
  // Waits for the next event that is not about gradients; those are in kept()
  // afterwards.
  Event AwaitOther() {
    while (true) {
      Event event = AwaitEvent();
      if (event.event.has_keep_gradients()) {
        const uint32_t rank = event.event.keep_gradients().rank();
        kept_[rank] = std::move(event.fd);
      } else if (event.event.has_drop_gradients()) {
        kept_.erase(event.event.drop_gradients().rank());
      } else {
        return event;
      }
    }
  }
  const std::map<uint32_t, UniqueFd>& kept() const { return kept_; }
  v1::EngineEvent::Ready AwaitReady() {
    const Event event = AwaitOther();
    EXPECT_TRUE(event.event.has_ready()) << event.event.ShortDebugString();
    return event.event.ready();
  }

  v1::Engine::Stub* stub() { return stub_.get(); }

 private:
  UniqueFd control_;
  std::map<uint32_t, UniqueFd> kept_;
  std::unique_ptr<v1::Engine::Stub> stub_;
};

// An engine process and its first supervisor.
class EngineProcess {
 public:
  explicit EngineProcess(const std::string& job_dir, bool is_private = false) {
    const auto listener = control::Listen(job_dir);
    EXPECT_TRUE(listener.ok()) << listener.status();
    if (!listener.ok()) return;
    supervisor_ = std::make_unique<Supervisor>(job_dir);
    const std::string fd = absl::StrCat(listener->get());
    pid_ = ::fork();
    if (pid_ == 0) {
      ::fcntl(listener->get(), F_SETFD, 0);
      ::execl("/proc/self/exe", "engine", "--engine", fd.c_str(),
              job_dir.c_str(), is_private ? "private" : "", nullptr);
      ::_exit(127);
    }
  }
  ~EngineProcess() {
    if (pid_ > 0) Kill();
  }

  pid_t pid() const { return pid_; }
  Supervisor* supervisor() { return supervisor_.get(); }
  // Closes the supervisor's ends, as a killed supervisor does.
  void LoseSupervisor() { supervisor_.reset(); }
  // Connects the next supervisor.
  void Adopt(const std::string& job_dir) {
    supervisor_ = std::make_unique<Supervisor>(job_dir);
    supervisor_->Supervise();
    supervisor_->StartJob();
  }
  v1::Engine::Stub* stub() { return supervisor_->stub(); }

  // Hands a new connection over; `reply` is what the engine says to its Hello.
  std::unique_ptr<ShmTestPeer> Connect(v1::Wire wire, v1::HelloReply* reply) {
    SocketPair sockets = MakeSocketPair();
    v1::SupervisorRequest request;
    v1::AdoptConnection& adopt = *request.mutable_adopt_connection();
    adopt.mutable_hello()->set_wire(wire);
    adopt.mutable_hello()->set_job("test");
    adopt.mutable_hello()->set_protocol_version_min(shm::kProtocolVersion);
    adopt.mutable_hello()->set_protocol_version_max(shm::kProtocolVersion);
    adopt.set_protocol_version(shm::kProtocolVersion);
    supervisor_->Send(request, sockets.engine.get());
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
    const grpc::Status status = stub()->GetJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }

  int StopAndWait() {
    supervisor_->Stop();
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
  std::unique_ptr<Supervisor> supervisor_;
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
    engine->supervisor()->Supervise();
    engine->supervisor()->StartJob();
    const v1::EngineEvent::Ready ready = engine->supervisor()->AwaitReady();
    EXPECT_EQ(ready.version(), kVersion);
    EXPECT_EQ(ready.restarts(), 2u);
    EXPECT_FALSE(ready.executable().empty());
    return engine;
  }

  // Registers with `request` changed, attaches and loads zeros.
  static v1::RegisterReply Register(ShmTestPeer* peer, bool ephemeral) {
    v1::SessionRequest request = peer->RegisterRequest();
    request.mutable_register_()->set_ephemeral(ephemeral);
    EXPECT_TRUE(peer->Send(request).ok());
    const auto reply = peer->Receive();
    EXPECT_TRUE(reply.ok()) << reply.status();
    if (!reply.ok()) return {};
    EXPECT_EQ(reply->status().code(), 0) << reply->status().message();
    return reply->register_();
  }
  static void Begin(ShmTestPeer* peer, bool ephemeral) {
    const v1::RegisterReply registered = Register(peer, ephemeral);
    const absl::Status attached = peer->Attach(peer->MakeSegment());
    ASSERT_TRUE(attached.ok()) << attached;
    if (registered.phase() != v1::JOB_PHASE_LOADING) return;
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
      peer->commit_groups()[group] = {.value = {1e-3, 0.9, 0.999, 1e-8},
                                      .max_norm = 0,
                                      .clips_with = 0,
                                      .reserved0 = 0,
                                      .reserved = {}};
    }
    const auto committed = peer->Call(peer->Commit(step));
    ASSERT_TRUE(committed.status.ok()) << committed.status;
    EXPECT_EQ(committed.completion.step, step);
  }

  std::string job_dir_;
};

TEST_F(EngineTest, TakesStepsAndEndsWhenItIsToldTo) {
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
  EXPECT_EQ(engine->StopAndWait(), 0);
  EXPECT_TRUE(peer->AwaitEnd().ok());  // no last reply: the rank connects again
}

TEST_F(EngineTest, SignalsAreTheSupervisorsBusiness) {
  auto engine = Start();
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) {
    ASSERT_EQ(::kill(engine->pid(), signal), 0);
  }
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineTest, StateOutlivesAnEngineKilledBetweenSteps) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  engine->Kill();
  EXPECT_TRUE(peer->AwaitEnd().ok());  // no last reply

  engine = Start();
  v1::HelloReply hello;
  peer = engine->Connect(v1::WIRE_SHM, &hello);
  EXPECT_NE(hello.engine_instance(), 0u);
  EXPECT_EQ(hello.protocol_version(), shm::kProtocolVersion);
  Begin(peer.get(), false);
  EXPECT_EQ(engine->Describe().committed_step(), 1u);
  TakeStep(peer.get(), 2);
}

TEST_F(EngineTest, ASecondEngineWaitsForTheFirst) {
  auto first = Start();
  auto second = std::make_unique<EngineProcess>(job_dir_);
  second->supervisor()->Supervise();
  second->supervisor()->StartJob();
  auto peer = first->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  first->Kill();
  second->supervisor()->AwaitReady();
  EXPECT_EQ(second->Describe().committed_step(), 1u);
}

TEST_F(EngineTest, AnEphemeralJobIsOverWithItsLastSession) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), true);
  peer.reset();
  EXPECT_TRUE(engine->supervisor()->AwaitOther().event.has_finished());
  EXPECT_TRUE(engine->supervisor()->kept().empty());
  v1::HelloReply hello;
  engine->Connect(v1::WIRE_SHM, &hello);
  EXPECT_TRUE(absl::IsUnavailable(FromProto(hello.status())));
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineTest, AJobThatNobodyRegistersIsOver) {
  auto engine = Start();
  engine->Connect();
  EXPECT_TRUE(engine->supervisor()->AwaitEvent().event.has_finished());
}

// A job that was only registered is not kept either, also by an engine that
// died.
TEST_F(EngineTest, AnEphemeralJobThatNobodyAttachesToIsOver) {
  auto engine = Start();
  auto peer = engine->Connect();
  Register(peer.get(), true);
  engine->Kill();
  engine = Start();
  peer = engine->Connect();
  Register(peer.get(), true);
  peer.reset();
  EXPECT_TRUE(engine->supervisor()->AwaitEvent().event.has_finished());
}

TEST_F(EngineTest, RefusesWhatItDoesNotUnderstand) {
  auto engine = Start();
  v1::HelloReply hello;
  engine->Connect(static_cast<v1::Wire>(9), &hello);
  EXPECT_TRUE(absl::IsInvalidArgument(FromProto(hello.status())));
  Supervisor& supervisor = *engine->supervisor();
  supervisor.SendPacket("\xff\xff no SupervisorRequest", STDIN_FILENO);
  v1::SupervisorRequest request;
  request.mutable_adopt_connection();
  supervisor.Send(request);  // misses its fd
  request.mutable_start_job();
  supervisor.Send(request, STDIN_FILENO);  // brings one
  supervisor.SendPacket(std::string(100000, 'x'));
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
  // This corrupts every file of the job: none of them is ten bytes long.
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
  engine->supervisor()->Drain(true);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(engine->stub()->Drain(&context, request, &reply).ok());
  }
  EXPECT_TRUE(absl::IsUnavailable(peer->Call(peer->Push(1)).status));
  // Drain and resume apply in their order, whichever is awaited.
  engine->supervisor()->Drain(false);
  engine->supervisor()->Drain(true);
  engine->supervisor()->Drain(false);
  request.set_resume(true);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(engine->stub()->Drain(&context, request, &reply).ok());
  }
  TakeStep(peer.get(), 1);
}

// When the supervisor is killed, sessions notice nothing, and the next
// supervisor finds everything as before.
TEST_F(EngineTest, OutlivesItsSupervisor) {
  auto engine = Start();
  auto first = engine->Connect();
  Begin(first.get(), false);
  TakeStep(first.get(), 1);
  engine->LoseSupervisor();
  TakeStep(first.get(), 2);
  engine->Adopt(job_dir_);
  const v1::EngineEvent::Ready ready = engine->supervisor()->AwaitReady();
  EXPECT_EQ(ready.connections_size(), 1);
  EXPECT_EQ(engine->Describe().committed_step(), 2u);
  TakeStep(first.get(), 3);
  engine->Connect();  // takes new sessions again
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineTest, AnotherSupervisorTakesTheFirstOnesPlace) {
  auto engine = Start();
  Supervisor second(job_dir_);
  second.Supervise(/*draining=*/true);
  second.AwaitReady();
  // The previous supervisor's connection has ended.
  EXPECT_FALSE(engine->supervisor()->AwaitEvent().event.has_ready());
  engine->Adopt(job_dir_);
  engine->supervisor()->AwaitReady();
  // The job that the second supervisor drained takes steps again.
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineTest, SupervisorThatDrainsRefusesNewSteps) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  Supervisor second(job_dir_);
  second.Supervise(/*draining=*/true);
  second.AwaitReady();
  EXPECT_TRUE(absl::IsUnavailable(peer->Call(peer->Push(1)).status));
}

// The next supervisor's configuration differs from the one that the engine was
// started with.
TEST_F(EngineTest, TheNextSupervisorsLimitsCount) {
  auto engine = Start();
  auto peer = engine->Connect();
  Supervisor second(job_dir_);
  v1::Limits limits;
  limits.set_job_state_bytes_max(1);
  second.Supervise(/*draining=*/false, limits);
  second.AwaitReady();
  const absl::Status refused = peer->Register();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  engine->Adopt(job_dir_);
  engine->supervisor()->AwaitReady();
  const absl::Status taken = peer->Register();
  EXPECT_TRUE(taken.ok()) << taken;
}

// The job is over while there is no supervisor.
TEST_F(EngineTest, TheNextSupervisorHearsThatTheJobIsOver) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), true);
  engine->LoseSupervisor();
  peer.reset();
  engine->Adopt(job_dir_);
  engine->supervisor()->AwaitReady();
  EXPECT_TRUE(engine->supervisor()->AwaitOther().event.has_finished());
}

// The supervisor dies before the job is opened.
TEST_F(EngineTest, OutlivesASupervisorThatDiesAtItsStart) {
  EngineProcess engine(job_dir_);
  engine.supervisor()->Supervise();
  engine.supervisor()->Keep(3, "left");
  engine.LoseSupervisor();
  engine.Adopt(job_dir_);
  // The engine has received all messages of the first supervisor: the gradients
  // kept are dropped, as no step needs them.
  const Event dropped = engine.supervisor()->AwaitEvent();
  ASSERT_TRUE(dropped.event.has_drop_gradients())
      << dropped.event.ShortDebugString();
  EXPECT_EQ(dropped.event.drop_gradients().rank(), 3u);
  EXPECT_TRUE(engine.supervisor()->AwaitEvent().event.has_ready());
}

// Between steps the gradients kept of the previous engine are not needed.
TEST_F(EngineTest, GradientsThatWereKeptAreDroppedWhenNoStepNeedsThem) {
  EngineProcess engine(job_dir_);
  Supervisor& first = *engine.supervisor();
  first.Supervise();
  for (uint32_t rank = 0; rank < 1024; ++rank) {
    // Requests are sent as fast as the engine takes them.
    v1::SupervisorRequest request;
    request.mutable_kept_gradients()->set_rank(rank);
    request.mutable_kept_gradients()->set_client_instance(rank + 50);
    first.SendWhenItCan(request, MemoryFile(absl::StrCat(rank)).get());
  }
  first.StartJob();
  std::set<uint32_t> dropped;
  bool ready = false;
  while (!ready || dropped.size() < 1024) {
    const Event event = first.AwaitEvent();
    if (event.event.has_drop_gradients()) {
      dropped.insert(event.event.drop_gradients().rank());
    } else {
      ASSERT_TRUE(event.event.has_ready()) << event.event.ShortDebugString();
      ready = true;
    }
  }
  engine.Adopt(job_dir_);
  EXPECT_TRUE(engine.supervisor()->AwaitEvent().event.has_ready());
}

// A rank's gradients are kept as long as it is attached.
TEST_F(EngineTest, GradientsOfAttachedRanksAreToldToEverySupervisor) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  for (int supervisors = 0; supervisors < 2; ++supervisors) {
    engine->LoseSupervisor();
    engine->Adopt(job_dir_);
    engine->supervisor()->AwaitReady();
    ASSERT_EQ(engine->supervisor()->kept().size(), 1u);
    EXPECT_TRUE(engine->supervisor()->kept().begin()->second.ok());
  }
}

TEST_F(EngineTest, APrivateEngineEndsWithItsSupervisor) {
  EngineProcess engine(job_dir_, /*is_private=*/true);
  engine.LoseSupervisor();  // before its first message, perhaps before exec
  EXPECT_EQ(engine.Wait(), 0);
  EngineProcess another(job_dir_, /*is_private=*/true);
  another.supervisor()->Supervise();
  another.supervisor()->StartJob();
  another.supervisor()->AwaitReady();
  another.LoseSupervisor();
  EXPECT_EQ(another.Wait(), 0);
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

// The engine process: --engine SOCKET_FD JOB_DIR [private].
int RunTestEngine(char** argv) {
  EngineOptions options;
  options.socket_fd = std::atoi(argv[2]);
  options.config.set_job("test");
  options.config.set_uid(::getuid());
  options.config.set_job_dir(argv[3]);
  options.config.set_exit_with_supervisor(*argv[4] != 0);
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
