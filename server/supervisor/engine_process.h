#ifndef OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_
#define OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/supervisor/event_loop.h"

namespace optstate::supervisor {

// What the command line of an engine process means; main.cc and Start() agree.
struct EngineCommandLine {
  static constexpr const char* kJobFlag = "--engine";
  static constexpr const char* kConfigFdFlag = "--engine-config-fd";
  static constexpr const char* kControlFdFlag = "--engine-control-fd";
  static constexpr const char* kGrpcFdFlag = "--engine-grpc-fd";
};

// One running engine, from its start to its death.
//
// Threads: the loop's. Outlived by the loop. Any callback may destroy the
// object; it calls none afterwards.
class EngineProcess {
 public:
  struct Callbacks {
    std::function<void()> on_ready;
    // The job is over; the engine still runs until it is stopped.
    std::function<void()> on_finished;
    // There is room again for AdoptConnection after UNAVAILABLE.
    std::function<void()> on_writable;
    // The process has ended and was reaped; how, as a sentence's end ("was
    // killed by signal 9").
    std::function<void(const std::string& how)> on_exit;
  };

  static absl::StatusOr<std::unique_ptr<EngineProcess>> Start(
      EventLoop* loop, const std::string& executable,
      const v1::EngineConfig& config, Callbacks callbacks);

  // Kills and reaps a process that still runs.
  ~EngineProcess();
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;

  pid_t pid() const { return pid_; }
  // Our end of the private gRPC connection; once.
  UniqueFd TakeGrpcFd() { return std::move(grpc_); }

  // Hands a connection over; the engine has its own copy of the fd afterwards.
  // UNAVAILABLE: it does not read just now, or it is dying; on_writable or
  // on_exit follows. Another error: this connection cannot be handed over.
  absl::Status Adopt(const v1::AdoptConnection& connection, int fd);

  // Whether a connection handed over may not have been received yet.
  bool HasUnreadPackets() const;

  // Asks it to finish and exit, by closing its control socket.
  void Stop();
  void Kill();

 private:
  EngineProcess(EventLoop* loop, Callbacks callbacks);

  absl::Status WatchControl();
  absl::Status WatchExit();
  void PollExit();
  void OnControlEvents(uint32_t events);
  // False when the control socket is closed or empty. May destroy the object.
  bool ReadEvent();
  void HandlePacket(absl::string_view packet);
  void OnExit();

  EventLoop* const loop_;
  const Callbacks callbacks_;
  pid_t pid_ = 0;
  bool reaped_ = true;  // until it is started
  UniqueFd pidfd_;
  UniqueFd control_;
  UniqueFd grpc_;
  EventLoop::TimerId exit_poll_;
  // False once the object is destroyed; callbacks may do that.
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_
