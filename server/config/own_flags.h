#ifndef OPTSTATE_SERVER_CONFIG_OWN_FLAGS_H_
#define OPTSTATE_SERVER_CONFIG_OWN_FLAGS_H_

namespace optstate::config {

// Flags that optstated's processes give to each other; --help hides them.

// An engine: its job, its configuration and its listening socket.
inline constexpr char kEngineFlag[] = "--engine";
inline constexpr char kEngineConfigFdFlag[] = "--engine-config-fd";
inline constexpr char kEngineSocketFdFlag[] = "--engine-socket-fd";

// An upgrade: asks a build for its versions, and executes it.
inline constexpr char kFormatVersionsFlag[] = "--format-versions";
inline constexpr char kHandoverFdFlag[] = "--handover-fd";

// A trainer's private daemon: the read end of a pipe that the trainer holds.
inline constexpr char kEmbeddedFlag[] = "--embedded";

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_OWN_FLAGS_H_
