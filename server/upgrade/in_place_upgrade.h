#ifndef OPTSTATE_SERVER_UPGRADE_IN_PLACE_UPGRADE_H_
#define OPTSTATE_SERVER_UPGRADE_IN_PLACE_UPGRADE_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/engine.pb.h"
#include "server/accept/configured_listeners.h"
#include "server/admin/upgrade_control.h"
#include "server/os/event_loop.h"
#include "server/upgrade/upgrade_record.h"

namespace optstate::upgrade {

// Makes way for another build in this process:
//   1. checks the build and its configuration; nothing has changed yet;
//   2. opens the listeners that only the next configuration names;
//   3. pauses the daemon, and lets the Admin calls end;
//   4. executes the build with what it inherits.
// When 4 fails the daemon goes on as before, and the record says why.
//
// Threads: Upgrade() and upgrade_progress() as in UpgradeControl; the rest is
// the loop's. Steps 1 (at a hang-up) and 3 have a thread of their own.
class InPlaceUpgrade : public admin::UpgradeControl {
 public:
  struct Options {
    os::EventLoop* loop = nullptr;
    UpgradeRecord* record = nullptr;
    // The arguments of this process; the next build gets them too.
    std::vector<std::string> arguments;
    // Set for a trainer's private daemon, which is not upgraded.
    bool is_private = false;
  };
  struct Callbacks {
    // Reads the next build's configuration, from any thread; an error says why
    // it cannot follow this daemon's.
    std::function<absl::StatusOr<v1::DaemonConfig>()> load_config;
    std::function<absl::StatusOr<accept::ListenersByAddress>(
        const v1::DaemonConfig&)>
        open_missing;
    // Holds connections back until resume().
    std::function<void()> pause;
    // Ends the Admin calls; called from the upgrade's thread.
    std::function<void()> end_calls;
    // Adds what the next build inherits of this daemon; `missing` is from
    // open_missing.
    std::function<void(const accept::ListenersByAddress& missing,
                       v1::SupervisorHandover*)>
        hand_over;
    // Goes on after a failure.
    std::function<void()> resume;
    // Handles a signal that Interrupt() took, after resume().
    std::function<void(int)> on_signal;
  };

  // Everything that `options` points to outlives the object.
  InPlaceUpgrade(Options options, Callbacks callbacks);
  // The loop does not run any more.
  ~InPlaceUpgrade() override;

  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string& binary) override;
  v1::UpgradeProgress upgrade_progress() override {
    return options_.record->Get();
  }

  // Begins an upgrade to the build that is installed where this one was; what
  // prevents it is logged.
  void OnHangup();
  // Has an upgrade that makes way just now fail, and its on_signal called.
  // Returns false when there is none.
  bool Interrupt(int signal);
  // Refuses upgrades from now on.
  void Close() { closed_ = true; }
  // Waits for the thread, which uses what end_calls uses.
  void Join();

 private:
  // The build that is to take over.
  struct NextBuild {
    std::string path;
    bool replace_all = false;  // engines of this build too
    std::string id;
    v1::DaemonConfig config;
    // Listeners of the next build that this one does not have.
    std::shared_ptr<const accept::ListenersByAddress> listeners;
  };

  absl::StatusOr<NextBuild> CheckInstalledBuild() const;
  absl::Status Begin(NextBuild next);
  void Finish(const NextBuild& next);
  bool IsBusy() const;

  const Options options_;
  const Callbacks callbacks_;
  bool checking_ = false;    // thread_ checks a build
  bool making_way_ = false;  // reverted only by a failure to execute
  bool closed_ = false;
  int interrupted_by_ = 0;  // a signal
  std::thread thread_;
};

}  // namespace optstate::upgrade

#endif  // OPTSTATE_SERVER_UPGRADE_IN_PLACE_UPGRADE_H_
