#ifndef OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_
#define OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/control/control_socket.h"
#include "server/supervisor/event_loop.h"

namespace optstate::supervisor {

// What the command line of an engine process means; main.cc and Start() agree.
struct EngineCommandLine {
  static constexpr const char* kJobFlag = "--engine";
  static constexpr const char* kConfigFdFlag = "--engine-config-fd";
  static constexpr const char* kSocketFdFlag = "--engine-socket-fd";
};

// The memory of one rank's gradients, kept for an engine that comes after the
// one that had it.
struct KeptSegment {
  v1::KeptGradientsInfo info;
  std::shared_ptr<const UniqueFd> segment;
};
using KeptSegments = std::map<uint32_t, KeptSegment>;  // by rank

// One running engine, from its start or its adoption to its death.
//
// Threads: the loop's. Outlived by the loop. Any callback may destroy the
// object; it calls none afterwards.
class EngineProcess {
 public:
  struct Callbacks {
    // There is a process, which has not been told to open its job yet. Not
    // called for one that is adopted.
    std::function<void(pid_t)> on_started;
    std::function<void(const v1::EngineEvent::Ready&)> on_ready;
    // The job is over; the engine still runs until it is stopped.
    std::function<void()> on_finished;
    // Replaces what was kept of the rank.
    std::function<void(KeptSegment)> on_keep;
    std::function<void(uint32_t rank)> on_drop;
    // There is room again for AdoptConnection after UNAVAILABLE.
    std::function<void()> on_writable;
    // The process has ended, and was reaped if it was a child; how, as a
    // sentence's end ("was killed by signal 9").
    std::function<void(const std::string& how)> on_exit;
  };
  // What every engine is told first, one that long runs too.
  struct Introduction {
    v1::SupervisorRequest::Supervise supervise;
    KeptSegments kept;
  };

  // The engine that already runs in the directory: another supervisor's, or one
  // of this process before it was upgraded. UNAVAILABLE: none answers.
  static absl::StatusOr<std::unique_ptr<EngineProcess>> AdoptRunning(
      EventLoop* loop, const std::string& job_directory,
      const Introduction& introduction, Callbacks callbacks);
  // A new one. To be called when none answers.
  static absl::StatusOr<std::unique_ptr<EngineProcess>> Start(
      EventLoop* loop, const std::string& executable,
      const v1::EngineConfig& config, const Introduction& introduction,
      Callbacks callbacks);

  // Lets go of an engine that still runs; it waits for another supervisor.
  ~EngineProcess();
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;

  // 0: not known yet, of an engine that was adopted just after its start.
  pid_t pid() const { return pid_; }
  // Our end of the private gRPC connection; once.
  UniqueFd TakeGrpcFd() { return std::move(grpc_); }

  // Hands a connection over; the engine has its own copy of the fd afterwards.
  // UNAVAILABLE: it does not read just now, or it is dying; on_writable or
  // on_exit follows. Another error: this connection cannot be handed over.
  absl::Status Adopt(const v1::AdoptConnection& connection, int fd);

  // Whether a connection handed over may not have been received yet.
  bool HasUnreadPackets() const;

  // Asks it to finish and exit.
  void SetDraining(bool draining);
  void Stop();
  void Kill();

 private:
  struct Outgoing {
    std::string bytes;
    std::shared_ptr<const UniqueFd> fd;  // null: none
  };

  EngineProcess(EventLoop* loop, Callbacks callbacks);

  absl::Status Introduce(const Introduction& introduction);
  void Enqueue(const v1::SupervisorRequest& request,
               std::shared_ptr<const UniqueFd> fd = nullptr);
  // Sends what the engine takes just now.
  void Flush();
  absl::Status Identify(pid_t pid);
  void PollExit();
  bool HasExited() const;
  void OnControlEvents(uint32_t events);
  // False when the connection is closed or empty. May destroy the object.
  bool ReadEvent();
  void HandlePacket(control::Packet packet);
  void OnConnectionEnd();
  void CloseControl();
  void OnExit();
  void KillAndReap();

  EventLoop* const loop_;
  const Callbacks callbacks_;
  pid_t pid_ = 0;
  bool exited_ = false;
  std::string cannot_start_;  // why, as it said
  UniqueFd pidfd_;
  UniqueFd control_;
  UniqueFd grpc_;
  // Bounded: an introduction and a Stop.
  std::deque<Outgoing> outgoing_;
  EventLoop::TimerId exit_poll_;
  EventLoop::TimerId end_timer_;
  // False once the object is destroyed; callbacks may do that.
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_
