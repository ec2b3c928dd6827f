#include "tests/integration/daemon_fixture.h"

#include <fcntl.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/endpoint.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

// The path is relative to the runfiles, where a test starts.
constexpr char kBinary[] = "server/optstated";
// The deadline is generous: sanitizers, and machines that do many things at
// once.
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int kConnectPollMs = 2;
constexpr size_t kLogLines = 100;

bool EndsWithin(int pidfd, int timeout_ms) {
  pollfd entry = {.fd = pidfd, .events = POLLIN, .revents = 0};
  return poll(&entry, 1, timeout_ms) > 0;
}

std::string MakeDirectory() {
  const char* temporary = std::getenv("TEST_TMPDIR");
  for (const std::string& parent :
       {std::string("/dev/shm"),
        std::string(temporary == nullptr ? "/tmp" : temporary)}) {
    std::string path = absl::StrCat(parent, "/optstate-test-XXXXXX");
    if (mkdtemp(path.data()) != nullptr) return path;
  }
  return std::string();
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      status.error_message());
}

std::unique_ptr<v1::Admin::Stub> AdminStub(const std::string& socket) {
  return v1::Admin::NewStub(grpc::CreateChannel(
      absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()));
}

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
}

absl::StatusOr<v1::ServerStatus> StatusAt(const std::string& socket) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::ServerStatus reply;
  OPTSTATE_RETURN_IF_ERROR(
      FromGrpc(AdminStub(socket)->GetStatus(&context, {}, &reply)));
  return reply;
}

// Kills the engines whose supervisor is gone, which became ours.
void KillOrphans() {
  std::ifstream children(
      absl::StrCat("/proc/self/task/", getpid(), "/children"));
  pid_t pid;
  while (children >> pid) {
    std::string name;
    std::getline(std::ifstream(absl::StrCat("/proc/", pid, "/comm")), name);
    // An engine is called after its job.
    if (name != "optstated" && !absl::StartsWith(name, "os:")) continue;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}

}  // namespace

Process::Process(pid_t pid)
    : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

bool Process::running() const { return fd_.ok() && !EndsWithin(fd_.get(), 0); }

void Process::Signal(int signal) const {
  if (fd_.ok()) syscall(SYS_pidfd_send_signal, fd_.get(), signal, nullptr, 0);
}

absl::Status Process::AwaitEnd(absl::Time deadline) const {
  if (!fd_.ok()) return absl::OkStatus();
  const int64_t left_ms =
      std::max<int64_t>(absl::ToInt64Milliseconds(deadline - absl::Now()), 0);
  if (!EndsWithin(fd_.get(),
                  static_cast<int>(std::min<int64_t>(left_ms, INT_MAX)))) {
    return absl::DeadlineExceededError(
        absl::StrCat("process ", pid_, " does not end"));
  }
  waitpid(pid_, nullptr, WNOHANG);
  return absl::OkStatus();
}

TestDaemon::TestDaemon(Options options)
    : options_(std::move(options)), directory_(MakeDirectory()) {
  state_dir_ = options_.state_dir.empty() ? absl::StrCat(directory_, "/state")
                                          : options_.state_dir;
  socket_ = absl::StrCat(directory_, "/optstated.sock");
  std::ofstream(config_path()) << options_.config;
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

absl::StatusOr<std::unique_ptr<TestDaemon>> TestDaemon::Start(Options options) {
  std::unique_ptr<TestDaemon> daemon(new TestDaemon(std::move(options)));
  OPTSTATE_RETURN_IF_ERROR(daemon->Restart());
  return daemon;
}

TestDaemon::~TestDaemon() {
  Kill().IgnoreError();
  KillOrphans();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

absl::Status TestDaemon::Spawn() {
  std::vector<std::string> words = {kBinary, "--state-dir", state_dir_,
                                    "--socket", socket_};
  if (options_.tcp) {
    words.push_back("--listen");
    words.push_back("127.0.0.1:0");
    words.push_back("--insecure");
  }
  if (!options_.config.empty()) {
    words.push_back("--config");
    words.push_back(config_path());
  }
  words.insert(words.end(), options_.flags.begin(), options_.flags.end());
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::string log = absl::StrCat(directory_, "/log");
  const pid_t pid = fork();
  if (pid < 0) return OsError(errno, "fork");
  if (pid == 0) {
    // The process ends with the test, however the test ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int fd = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  process_ = std::make_unique<Process>(pid);
  return absl::OkStatus();
}

absl::Status TestDaemon::Restart() {
  OPTSTATE_RETURN_IF_ERROR(Spawn());
  client::Endpoint endpoint;
  endpoint.kind = client::Endpoint::Kind::kShm;
  endpoint.path = socket_;
  const absl::Time deadline = absl::Now() + kPatience;
  while (!client::Dial(endpoint, deadline).ok()) {
    const Process& process = *process_;
    if (process.AwaitEnd(absl::Now() + absl::Milliseconds(kConnectPollMs))
            .ok() ||
        absl::Now() > deadline) {
      return absl::UnavailableError(
          absl::StrCat("optstated does not run: ", Log()));
    }
  }
  return absl::OkStatus();
}

std::string TestDaemon::Log() const {
  std::ifstream file(absl::StrCat(directory_, "/log"));
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(std::move(line));
    if (lines.size() > kLogLines) lines.pop_front();
  }
  return absl::StrJoin(lines, "\n");
}

absl::StatusOr<pid_t> TestDaemon::PidAt(const std::string& socket) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ServerStatus status, StatusAt(socket));
  return static_cast<pid_t>(status.pid());
}

absl::StatusOr<v1::ServerStatus> TestDaemon::GetStatus() const {
  return StatusAt(socket_);
}

absl::StatusOr<v1::Job> TestDaemon::GetJob(const std::string& name,
                                           bool memory) const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::GetJobRequest request;
  request.set_name(name);
  request.set_memory(memory);
  v1::Job reply;
  OPTSTATE_RETURN_IF_ERROR(
      FromGrpc(AdminStub(socket_)->GetJob(&context, request, &reply)));
  return reply;
}

absl::Status TestDaemon::Drain(absl::Duration timeout, bool resume) const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::DrainRequest request;
  request.mutable_timeout()->set_seconds(absl::ToInt64Seconds(timeout));
  request.set_resume(resume);
  v1::DrainReply reply;
  return FromGrpc(AdminStub(socket_)->Drain(&context, request, &reply));
}

absl::StatusOr<std::string> TestDaemon::Upgrade() const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::UpgradeReply reply;
  OPTSTATE_RETURN_IF_ERROR(
      FromGrpc(AdminStub(socket_)->Upgrade(&context, {}, &reply)));
  return reply.id();
}

absl::Status TestDaemon::Reload(const std::string& config) const {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ServerStatus before, GetStatus());
  std::ofstream(config_path()) << config;
  process_->Signal(SIGHUP);
  const absl::Time deadline = absl::Now() + kPatience;
  while (absl::Now() < deadline) {
    // There is no answer while one build takes the place of another.
    const absl::StatusOr<v1::ServerStatus> status = GetStatus();
    if (status.ok() && status->upgrade().done() &&
        status->upgrade().id() != before.upgrade().id()) {
      return absl::OkStatus();
    }
    std::this_thread::yield();
  }
  return absl::DeadlineExceededError(
      absl::StrCat("optstated does not take its configuration: ", Log()));
}

absl::StatusOr<std::string> TestDaemon::tcp_endpoint() const {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ServerStatus status, GetStatus());
  if (status.listen().empty()) {
    return absl::FailedPreconditionError("the daemon has no TCP address");
  }
  return absl::StrCat("grpc:", status.listen(0));
}

absl::Status TestDaemon::KillEngine(const std::string& job) const {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job described, GetJob(job));
  const Process engine(static_cast<pid_t>(described.engine_pid()));
  engine.Signal(SIGKILL);
  return engine.AwaitEnd(absl::Now() + kPatience);
}

absl::Status TestDaemon::Kill() {
  if (process_ == nullptr) return absl::OkStatus();
  process_->Signal(SIGKILL);
  return process_->AwaitEnd(absl::Now() + kPatience);
}

absl::Status TestDaemon::Terminate() {
  process_->Signal(SIGTERM);
  return process_->AwaitEnd(absl::Now() + kPatience);
}

}  // namespace optstate
