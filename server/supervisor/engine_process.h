#ifndef OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_
#define OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/engine/control_socket.h"
#include "server/os/event_loop.h"
#include "server/supervisor/kept_segments.h"

namespace optstate::supervisor {

// One running engine, from its start or its adoption to its death.
//
// Threads: the loop's. The loop outlives the object. Any callback may destroy
// the object, which calls none afterwards.
// Size: each method is a call or an event of one process's life.
class EngineProcess {
 public:
  struct Callbacks {
    // The process exists and has not been told to open its job yet. Not called
    // for an adopted engine.
    std::function<void(pid_t)> on_started;
    std::function<void(const v1::EngineEvent::Ready&)> on_ready;
    // The job is over; the engine still runs until it is stopped.
    std::function<void()> on_finished;
    // The engine has sent gradients to keep; they replace those kept of the
    // rank.
    std::function<void(KeptSegment)> on_keep;
    std::function<void(uint32_t rank)> on_drop;
    // The engine reads or writes the job's records, before it is ready or after
    // it was told to stop; `disk_bytes` grows.
    std::function<void(uint64_t disk_bytes)> on_working;
    // A rank's connection has ended without a detach.
    std::function<void(const v1::EngineEvent::RankLost&)> on_rank_lost;
    // There is room again for AdoptConnection after UNAVAILABLE.
    std::function<void()> on_writable;
    // The process has ended, and was reaped if it was a child; `how` ends a
    // sentence ("was killed by signal 9").
    std::function<void(const std::string& how)> on_exit;
  };
  // The first messages to every engine, including one that has long been
  // running.
  struct Introduction {
    v1::SupervisorRequest::Supervise supervise;
    KeptSegments kept;
  };

  // Adopts the engine that already runs in the directory: another supervisor's,
  // or one of this process before its upgrade. UNAVAILABLE: none answers.
  static absl::StatusOr<std::unique_ptr<EngineProcess>> AdoptRunning(
      os::EventLoop* loop, const std::string& job_directory,
      const Introduction& introduction, Callbacks callbacks);
  // Starts a new engine. To be called when none answers.
  static absl::StatusOr<std::unique_ptr<EngineProcess>> Start(
      os::EventLoop* loop, const std::string& executable,
      const v1::EngineConfig& config, const Introduction& introduction,
      Callbacks callbacks);

  // Disconnects from an engine that still runs, which then waits for another
  // supervisor.
  ~EngineProcess();
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;

  // 0: not known yet, when the engine was adopted just after its start.
  pid_t pid() const { return pid_; }
  // Returns the supervisor's end of the private gRPC connection; once.
  UniqueFd TakeGrpcFd() { return std::move(grpc_); }

  // Hands a connection over; the engine has its own copy of the fd afterwards.
  // UNAVAILABLE: the engine does not read just now, or is dying; on_writable or
  // on_exit follows. Another error: this connection cannot be handed over.
  absl::Status Adopt(const v1::AdoptConnection& connection, int fd);

  // Returns whether the engine may still have to receive a connection handed
  // over.
  bool HasUnreadPackets() const;

  // Asks the engine to finish and exit.
  void SetDraining(bool draining);
  void Stop();
  void Kill();

 private:
  struct Outgoing {
    std::string bytes;
    std::shared_ptr<const UniqueFd> fd;  // null: none
  };

  EngineProcess(os::EventLoop* loop, Callbacks callbacks);

  absl::Status Introduce(const Introduction& introduction);
  void Enqueue(const v1::SupervisorRequest& request,
               std::shared_ptr<const UniqueFd> fd = nullptr);
  // Sends the messages that the engine takes just now.
  void Flush();
  absl::Status Identify(pid_t pid);
  void PollExit();
  bool HasExited() const;
  void OnControlEvents(uint32_t events);
  // Reads one event; false when the connection is closed or empty. May destroy
  // the object.
  bool ReadEvent();
  void HandlePacket(engine::Packet packet);
  void OnConnectionEnd();
  void CloseControl();
  void OnExit();
  void KillAndReap();

  os::EventLoop* const loop_;
  const Callbacks callbacks_;
  pid_t pid_ = 0;
  bool exited_ = false;
  std::string cannot_start_;  // why, as the engine reported
  UniqueFd pidfd_;
  UniqueFd control_;
  UniqueFd grpc_;
  // Messages to send; bounded: an introduction and a Stop.
  std::deque<Outgoing> outgoing_;
  os::EventLoop::TimerId exit_poll_;
  os::EventLoop::TimerId end_timer_;
  // False once the object is destroyed; callbacks may do that.
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_ENGINE_PROCESS_H_
