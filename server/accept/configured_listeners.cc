#include "server/accept/configured_listeners.h"

#include <sys/types.h>

#include <utility>

#include "absl/algorithm/container.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/config/listen_address.h"

namespace optstate::accept {
namespace {

mode_t ModeOf(const v1::DaemonConfig& config) {
  return static_cast<mode_t>(config.socket_mode());
}

absl::StatusOr<std::unique_ptr<Listener>> Open(const std::string& text,
                                               mode_t mode) {
  OPTSTATE_ASSIGN_OR_RETURN(const config::ListenAddress address,
                            config::ParseListenAddress(text));
  return Listener::Open(address, mode);
}

// Returns the listeners that the process had before its upgrade, without those
// that are no longer configured.
absl::StatusOr<ListenersByAddress> Inherit(
    const v1::SupervisorHandover& handover,
    const std::vector<std::string>& configured, mode_t mode) {
  ListenersByAddress listeners;
  for (const auto& one : handover.listeners()) {
    OPTSTATE_ASSIGN_OR_RETURN(const config::ListenAddress address,
                              config::ParseListenAddress(one.address()));
    if (!absl::c_linear_search(configured, one.address())) {
      Listener::Retire(address, UniqueFd(one.fd()), UniqueFd(one.lock_fd()));
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(listeners[one.address()],
                              Listener::Inherit(address, UniqueFd(one.fd()),
                                                UniqueFd(one.lock_fd()), mode));
  }
  return listeners;
}

}  // namespace

std::vector<std::string> AddressesOf(const v1::DaemonConfig& config) {
  std::vector<std::string> addresses = {"unix:" + config.socket()};
  addresses.insert(addresses.end(), config.listen().begin(),
                   config.listen().end());
  return addresses;
}

absl::StatusOr<Listeners> OpenListeners(
    const v1::DaemonConfig& config, const v1::SupervisorHandover* handover,
    const std::vector<ActivatedSocket>& activated) {
  const std::vector<std::string> addresses = AddressesOf(config);
  OPTSTATE_ASSIGN_OR_RETURN(ListenersByAddress inherited,
                            AdoptActivatedSockets(config, activated));
  if (handover != nullptr) {
    // Nothing is passed to a build that another one has executed.
    OPTSTATE_ASSIGN_OR_RETURN(inherited,
                              Inherit(*handover, addresses, ModeOf(config)));
  }
  Listeners listeners;
  for (const std::string& text : addresses) {
    auto found = inherited.extract(text);
    if (!found.empty()) {
      listeners.push_back(std::move(found.mapped()));
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(auto listener, Open(text, ModeOf(config)));
    listeners.push_back(std::move(listener));
  }
  return listeners;
}

absl::StatusOr<ListenersByAddress> OpenMissing(const v1::DaemonConfig& own,
                                               const Listeners& listeners,
                                               const v1::DaemonConfig& next) {
  const mode_t mode = ModeOf(next);
  const std::vector<std::string> addresses = AddressesOf(own);
  ListenersByAddress opened;
  for (const std::string& text : AddressesOf(next)) {
    const auto found = absl::c_find(addresses, text);
    std::unique_ptr<Listener> listener;
    if (found == addresses.end()) {
      OPTSTATE_ASSIGN_OR_RETURN(listener, Open(text, mode));
    } else {
      OPTSTATE_ASSIGN_OR_RETURN(
          listener, listeners[found - addresses.begin()]->Reopened(mode));
    }
    if (listener != nullptr) opened[text] = std::move(listener);
  }
  return opened;
}

void HandOverListeners(const v1::DaemonConfig& own, const Listeners& listeners,
                       const ListenersByAddress& missing,
                       v1::SupervisorHandover* handover) {
  std::map<std::string, v1::SupervisorHandover::Listener> by_address;
  const auto add = [&by_address](const std::string& address,
                                 const Listener& listener) {
    const bool is_new = !by_address.contains(address);
    v1::SupervisorHandover::Listener& one = by_address[address];
    one.set_address(address);
    one.set_fd(listener.fd());
    // A reopened listener uses the lock of the previous one.
    if (is_new || listener.lock_fd() >= 0) one.set_lock_fd(listener.lock_fd());
  };
  const std::vector<std::string> addresses = AddressesOf(own);
  for (size_t i = 0; i < addresses.size(); ++i) {
    add(addresses[i], *listeners[i]);
  }
  for (const auto& [address, listener] : missing) add(address, *listener);
  for (const auto& [address, one] : by_address) {
    *handover->add_listeners() = one;
  }
}

}  // namespace optstate::accept
