#include "tests/benchmarks/benchmark_daemon.h"

#include <cstdlib>
#include <iostream>
#include <memory>
#include <utility>

namespace optstate {

TestDaemon& Daemon() {
  static const std::unique_ptr<TestDaemon> daemon = [] {
    auto started = TestDaemon::Start();
    if (!started.ok()) {
      std::cerr << started.status() << std::endl;
      std::exit(1);
    }
    return *std::move(started);
  }();
  return *daemon;
}

}  // namespace optstate
