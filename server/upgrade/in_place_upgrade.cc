#include "server/upgrade/in_place_upgrade.h"

#include <spdlog/spdlog.h>

#include <cstdint>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "proto/types/status_macros.h"
#include "server/observe/node_event.h"
#include "server/upgrade/build_check.h"
#include "server/upgrade/handover.h"
#include "server/upgrade/next_config.h"

namespace optstate::upgrade {
namespace {

std::string NewUpgradeId() {
  absl::BitGen random;
  return absl::StrCat(absl::Hex(
      absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, UINT64_MAX)));
}

}  // namespace

InPlaceUpgrade::InPlaceUpgrade(Options options, Callbacks callbacks)
    : options_(std::move(options)), callbacks_(std::move(callbacks)) {}

InPlaceUpgrade::~InPlaceUpgrade() { Join(); }

void InPlaceUpgrade::Join() {
  if (thread_.joinable()) thread_.join();
}

bool InPlaceUpgrade::IsBusy() const {
  return checking_ || making_way_ || options_.record->under_way();
}

absl::StatusOr<v1::UpgradeReply> InPlaceUpgrade::Upgrade(
    const std::string& binary) {
  if (options_.is_private) {
    return absl::FailedPreconditionError(
        "a trainer's private daemon is not upgraded: restart the trainer");
  }
  NextBuild next;
  next.path = binary;
  next.replace_all = true;
  next.id = NewUpgradeId();
  if (binary.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(next.path, OwnPath());
  }
  OPTSTATE_ASSIGN_OR_RETURN(next.config, callbacks_.load_config());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::FormatVersions versions,
                            CheckBuild(next.path, options_.arguments));
  absl::Status begun;
  absl::Notification done;
  options_.loop->Post([&] {
    begun = Begin(next);
    done.Notify();
  });
  done.WaitForNotification();
  OPTSTATE_RETURN_IF_ERROR(begun);
  v1::UpgradeReply reply;
  reply.set_version(versions.version());
  reply.set_id(next.id);
  return reply;
}

void InPlaceUpgrade::OnHangup() {
  if (options_.is_private) {
    spdlog::info("SIGHUP ignored: this daemon goes with its trainer");
    return;
  }
  if (closed_ || IsBusy()) {
    spdlog::warn("SIGHUP ignored: the daemon is being upgraded or ends");
    return;
  }
  checking_ = true;
  Join();
  // Runs on a thread of its own, because it executes the build that is to take
  // over.
  thread_ = std::thread([this] {
    const absl::StatusOr<NextBuild> next = CheckInstalledBuild();
    options_.loop->Post([this, next] {
      checking_ = false;
      const absl::Status begun = next.ok() ? Begin(*next) : next.status();
      if (begun.ok()) {
        observe::NoteNodeEvent(v1::EVENT_SEVERITY_INFO, "upgrade_begun",
                               absl::StrCat("upgrading to ", next->path),
                               "SIGHUP");
        return;
      }
      spdlog::error("SIGHUP: everything stays as it is: {}", begun.ToString());
      observe::NoteNodeEvent(
          v1::EVENT_SEVERITY_ERROR, "upgrade_failed",
          absl::StrCat("everything stays as it is: ", begun.message()),
          "SIGHUP");
    });
  });
}

absl::StatusOr<InPlaceUpgrade::NextBuild> InPlaceUpgrade::CheckInstalledBuild()
    const {
  NextBuild next;
  next.id = NewUpgradeId();
  OPTSTATE_ASSIGN_OR_RETURN(next.path, OwnPath());
  OPTSTATE_ASSIGN_OR_RETURN(next.config, callbacks_.load_config());
  OPTSTATE_RETURN_IF_ERROR(CheckBuild(next.path, options_.arguments).status());
  return next;
}

absl::Status InPlaceUpgrade::Begin(NextBuild next) {
  if (closed_) return absl::UnavailableError("the daemon ends");
  if (IsBusy()) {
    return absl::UnavailableError("the daemon is being upgraded already");
  }
  // Listeners are opened here, where a failure to open one loses nothing yet.
  absl::StatusOr<accept::ListenersByAddress> missing =
      callbacks_.open_missing(next.config);
  if (!missing.ok()) return AsRefusal(missing.status());
  next.listeners =
      std::make_shared<const accept::ListenersByAddress>(*std::move(missing));
  making_way_ = true;
  // Calls from now on, before the next build runs, see this upgrade.
  options_.record->Begin(next.id);
  spdlog::info("upgrading to {}", next.path);
  // Connections from now on wait for the next build.
  callbacks_.pause();
  Join();
  thread_ = std::thread([this, next = std::move(next)] {
    // The call that requested this is answered first.
    callbacks_.end_calls();
    options_.loop->Post([this, next] { Finish(next); });
  });
  return absl::OkStatus();
}

void InPlaceUpgrade::Finish(const NextBuild& next) {
  absl::Status status =
      absl::AbortedError(absl::StrCat("signal ", interrupted_by_));
  if (interrupted_by_ == 0) {
    v1::SupervisorHandover handover;
    callbacks_.hand_over(*next.listeners, &handover);
    handover.set_upgrade_id(next.id);
    handover.set_replace_all(next.replace_all);
    status = ExecuteInPlace(next.path, options_.arguments, handover);
  }
  spdlog::error("not upgraded: {}", status.ToString());
  observe::NoteNodeEvent(v1::EVENT_SEVERITY_ERROR, "upgrade_failed",
                         absl::StrCat("not upgraded: ", status.message()));
  options_.record->AddProblem(std::string(status.message()));
  options_.record->Finish();
  making_way_ = false;
  callbacks_.resume();
  if (interrupted_by_ != 0) callbacks_.on_signal(interrupted_by_);
}

bool InPlaceUpgrade::Interrupt(int signal) {
  if (!making_way_) return false;
  interrupted_by_ = signal;
  return true;
}

}  // namespace optstate::upgrade
