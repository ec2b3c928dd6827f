#include "tests/load/flood.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/endpoint/dial.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate::load {
namespace {

constexpr size_t kHeldMax = 64;
constexpr int kConnections = 32;  // of each kind that says little, in a round
constexpr int kHellos = 8;
constexpr size_t kGarbageBytesMax = 4096;
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr uint64_t kJobNames = 100'000;
constexpr absl::string_view kHttp2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
// The names of the flood's own jobs.
constexpr char kOwnJob[] = "flood-own";
constexpr char kLargeJob[] = "flood-large";
constexpr size_t kOwnParameters = 2;
constexpr int64_t kOwnElements = 1 << 14;
// Its state takes 4 GiB, which no limit of a flooding user allows.
constexpr int64_t kLargeElements = 1 << 28;
// So far ahead of its job's step a push out of order is.
constexpr uint64_t kStepsAhead = 7;

// Returns a frame as it looks on the wire.
std::string FrameOf(absl::string_view payload, uint32_t size) {
  std::string frame(shm::kFrameMagic, sizeof(shm::kFrameMagic));
  for (int shift = 0; shift < 32; shift += 8) {
    frame.push_back(static_cast<char>((size >> shift) & 0xff));
  }
  return absl::StrCat(frame, payload);
}

std::string HelloOf(const std::string& job) {
  v1::Hello hello;
  hello.set_protocol_version_min(shm::kProtocolVersion);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_wire(v1::WIRE_SHM);
  hello.set_job(job);
  hello.set_pid(getpid());
  return hello.SerializeAsString();
}

}  // namespace

Flood::Flood(const std::string& socket, uint64_t seed) : random_(seed) {
  endpoint_.kind = client::Endpoint::Kind::kShm;
  endpoint_.path = socket;
}

absl::StatusOr<std::unique_ptr<Flood>> Flood::Start(const std::string& socket,
                                                    uint64_t seed,
                                                    bool pushes) {
  std::unique_ptr<Flood> flood(new Flood(socket, seed));
  if (pushes) OPTSTATE_RETURN_IF_ERROR(flood->AttachOwnJob());
  return flood;
}

absl::Status Flood::AttachOwnJob() {
  client::SessionOptions options;
  options.endpoint = endpoint_.ToString();
  options.job = kOwnJob;
  options.layout = UniformLayout(kOwnParameters, kOwnElements);
  OPTSTATE_ASSIGN_OR_RETURN(session_,
                            client::Session::Open(std::move(options)));
  // A flood before this one has loaded the job.
  if (session_->info().phase != client::JobPhase::kLoading) {
    return absl::OkStatus();
  }
  return LoadConstant(*session_, 1);
}

void Flood::Round() {
  if (session_ != nullptr) {
    // The registration comes first: later all jobs that the user may have are
    // there.
    RefusedRegistration();
    GarbageToEngine();
    GarbagePush();
    PushOutOfOrder();
  }
  Silence();
  HangUp();
  Garbage();
  MalformedHellos();
  RefusedJobs();
}

void Flood::Count(const std::string& what, const absl::Status& answer) {
  Count(absl::StrCat(what, " ", absl::StatusCodeToString(answer.code())));
}

UniqueFd Flood::Connect() {
  absl::StatusOr<UniqueFd> fd =
      client::Dial(endpoint_, absl::Now() + kPatience);
  if (fd.ok()) return *std::move(fd);
  Count("not_connected", fd.status());
  return UniqueFd();
}

bool Flood::Say(absl::string_view bytes) {
  UniqueFd fd = Connect();
  if (!fd.ok()) return false;
  // A connection that was refused already cannot be written to.
  static_cast<void>(
      send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  held_.push_back(std::move(fd));
  if (held_.size() > kHeldMax) held_.pop_front();
  return true;
}

std::string Flood::RandomBytes(size_t size_max) {
  const size_t size =
      std::uniform_int_distribution<size_t>(1, size_max)(random_);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random_() & 0xff);
  return bytes;
}

// Connections that do not come to say what they want.
void Flood::Silence() {
  const std::string hello = HelloOf("silent");
  const std::string frame = FrameOf(hello, static_cast<uint32_t>(hello.size()));
  for (int i = 0; i < kConnections; ++i) {
    const absl::string_view whole = frame;
    const size_t said =
        std::uniform_int_distribution<size_t>(0, whole.size() - 1)(random_);
    if (Say(whole.substr(0, said))) Count("silent");
  }
}

void Flood::HangUp() {
  for (int i = 0; i < kConnections; ++i) {
    if (Connect().ok()) Count("hung_up");
  }
}

void Flood::Garbage() {
  for (int i = 0; i < kConnections / 2; ++i) {
    if (Say(RandomBytes(kGarbageBytesMax))) Count("garbage");
    if (Say(absl::StrCat(kHttp2, RandomBytes(kGarbageBytesMax)))) {
      Count("garbage_http2");
    }
  }
}

void Flood::MalformedHellos() {
  for (int i = 0; i < kHellos; ++i) {
    const std::string payload = RandomBytes(200);
    if (Say(FrameOf(payload, static_cast<uint32_t>(payload.size())))) {
      Count("malformed_hello");
    }
    if (Say(FrameOf(payload, UINT32_MAX))) Count("huge_hello");
  }
}

absl::Status Flood::SayHello(const std::string& job, UniqueFd* connection) {
  *connection = Connect();
  if (!connection->ok()) return absl::UnavailableError("no connection");
  const absl::Time deadline = absl::Now() + kPatience;
  // One that is refused for want of room is answered before it says anything.
  static_cast<void>(
      shm::SendFrame(connection->get(), HelloOf(job), {}, deadline));
  OPTSTATE_ASSIGN_OR_RETURN(
      const shm::Frame frame,
      shm::ReceiveFrame(connection->get(), shm::kHelloBytesMax, deadline));
  v1::HelloReply reply;
  if (!reply.ParseFromString(frame.payload)) {
    return absl::InternalError("the HelloReply is malformed");
  }
  return FromProto(reply.status());
}

void Flood::RefusedJobs() {
  for (int i = 0; i < kHellos; ++i) {
    UniqueFd connection;
    const absl::Status answer =
        SayHello(absl::StrCat("flood-", random_() % kJobNames), &connection);
    Count("refused_job", answer);
  }
}

// Says what no session says to the engine of the flood's own job.
void Flood::GarbageToEngine() {
  for (int i = 0; i < kHellos; ++i) {
    UniqueFd connection;
    const absl::Status answer = SayHello(kOwnJob, &connection);
    Count("hello_to_engine", answer);
    if (!answer.ok()) continue;
    const std::string payload = RandomBytes(kGarbageBytesMax);
    static_cast<void>(
        shm::SendFrame(connection.get(), payload, {}, absl::Now() + kPatience));
    Count("garbage_to_engine");
  }
}

void Flood::RefusedRegistration() {
  client::SessionOptions options;
  options.endpoint = endpoint_.ToString();
  options.job = kLargeJob;
  options.layout = UniformLayout(1, kLargeElements);
  Count("refused_registration",
        client::Session::Open(std::move(options)).status());
}

// Random bits, among which there are NaN and infinity, are gradients for all
// that the daemon knows: it skips the step.
void Flood::GarbagePush() {
  for (size_t i = 0; i < session_->piece_count(); ++i) {
    const auto gradient = session_->gradient(i);
    if (!gradient.ok()) return Count("garbage_push", gradient.status());
    for (std::byte& byte : *gradient) byte = std::byte(random_() & 0xff);
  }
  const uint64_t step = session_->committed_step() + 1;
  const absl::Status pushed = session_->Push(step, 0, 0, kOwnParameters);
  if (!pushed.ok()) return Count("garbage_push", pushed);
  Count("garbage_push", session_->Commit(CommitOf(*session_, step)).status());
}

void Flood::PushOutOfOrder() {
  absl::Status status = session_->Push(session_->committed_step() + kStepsAhead,
                                       0, 0, kOwnParameters);
  if (status.ok()) status = session_->Flush();
  Count("push_out_of_order", status);
}

}  // namespace optstate::load
