// The main() of tests of engines: with --engine the process is an engine.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "server/engine/engine.h"

namespace optstate::engine {
namespace {

// The engine process: --engine SOCKET_FD JOB_DIR [private].
int RunTestEngine(char** argv) {
  EngineOptions options;
  options.socket_fd = std::atoi(argv[2]);
  options.config.set_job("test");
  const char* const owner = ::getenv("OPTSTATE_TEST_ENGINE_UID");
  options.config.set_uid(
      owner == nullptr ? ::getuid() : static_cast<uint32_t>(std::atoi(owner)));
  options.config.set_job_dir(argv[3]);
  options.config.set_exit_with_supervisor(*argv[4] != 0);
  options.config.set_restarts(2);
  v1::DaemonConfig& daemon = *options.config.mutable_daemon();
  daemon.mutable_engine()->set_workers(2);
  daemon.mutable_limits()->set_handshake_timeout_ms(200);
  return RunEngine(options);
}

}  // namespace
}  // namespace optstate::engine

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--engine") {
    return optstate::engine::RunTestEngine(argv);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
