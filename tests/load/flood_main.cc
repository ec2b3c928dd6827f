// Floods a daemon as another user; see flood_process.h.
//
//   flood_main SOCKET UID SEED THREADS ROUNDS KIND
//
// KIND is "flood", or "spin": that takes as much time of the cores and leaves
// the daemon alone. Each thread makes ROUNDS rounds or, with 0 (of "spin" the
// only number), goes on until standard input ends. Says "ready", at the end one
// line "KIND COUNT" for each count; or "unable TEXT" when it cannot be that
// user, "failed TEXT" when it cannot attach to a job of its own.

#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "tests/load/flood.h"

namespace optstate::load {
namespace {

struct Arguments {
  std::string socket;
  uid_t uid = 0;
  uint64_t seed = 0;
  size_t threads = 1;
  uint64_t rounds = 0;
  bool spins = false;
};

bool Parse(char** words, Arguments* arguments) {
  arguments->socket = words[1];
  arguments->spins = absl::string_view(words[6]) == "spin";
  return absl::SimpleAtoi(words[2], &arguments->uid) &&
         absl::SimpleAtoi(words[3], &arguments->seed) &&
         absl::SimpleAtoi(words[4], &arguments->threads) &&
         absl::SimpleAtoi(words[5], &arguments->rounds) &&
         arguments->threads > 0 &&
         (arguments->spins ? arguments->rounds == 0
                           : absl::string_view(words[6]) == "flood");
}

// Becomes the user for good. The program was loaded as the one before, who may
// read files that this one may not.
bool BecomeUser(uid_t uid) {
  const auto group = static_cast<gid_t>(uid);
  return setgroups(0, nullptr) == 0 && setresgid(group, group, group) == 0 &&
         setresuid(uid, uid, uid) == 0;
}

void AwaitEndOfInput() {
  char ignored[64];
  while (true) {
    const ssize_t count = read(STDIN_FILENO, ignored, sizeof(ignored));
    if (count == 0 || (count < 0 && errno != EINTR)) return;
  }
}

// Uses a core until `over`.
uint64_t Spin(const std::atomic<bool>& over) {
  std::atomic<uint64_t> turns{0};
  while (!over.load(std::memory_order_relaxed)) {
    turns.fetch_add(1, std::memory_order_relaxed);
  }
  return turns.load();
}

void MakeRounds(uint64_t rounds, const std::atomic<bool>& over, Flood* flood) {
  for (uint64_t made = 0; rounds == 0 || made < rounds; ++made) {
    if (over.load()) return;
    flood->Round();
  }
}

FloodCounts RunFloods(const Arguments& arguments,
                      const std::vector<std::unique_ptr<Flood>>& floods) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  if (arguments.rounds == 0) {
    threads.emplace_back([&over] {
      AwaitEndOfInput();
      over.store(true);
    });
  }
  for (size_t i = 0; i < arguments.threads; ++i) {
    if (arguments.spins) {
      threads.emplace_back([&over] { Spin(over); });
    } else {
      threads.emplace_back([&, flood = floods[i].get()] {
        MakeRounds(arguments.rounds, over, flood);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  FloodCounts all;
  for (const auto& flood : floods) {
    for (const auto& [what, count] : flood->counts()) all[what] += count;
  }
  return all;
}

int Run(const Arguments& arguments) {
  // The daemon closes what it refuses.
  signal(SIGPIPE, SIG_IGN);
  if (!BecomeUser(arguments.uid)) {
    std::cout << "unable to be uid " << arguments.uid << ": "
              << std::strerror(errno) << std::endl;
    return 1;
  }
  // The process ends with the one that started it, however that ends. A change
  // of user would have cleared this.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::vector<std::unique_ptr<Flood>> floods;
  for (size_t i = 0; i < arguments.threads && !arguments.spins; ++i) {
    auto flood = Flood::Start(arguments.socket, arguments.seed + i,
                              /*pushes=*/i == 0);
    if (!flood.ok()) {
      std::cout << "failed "
                << absl::StrReplaceAll(flood.status().ToString(), {{"\n", " "}})
                << std::endl;
      return 1;
    }
    floods.push_back(*std::move(flood));
  }
  std::cout << "ready" << std::endl;
  for (const auto& [what, count] : RunFloods(arguments, floods)) {
    std::cout << what << " " << count << "\n";
  }
  std::cout.flush();
  return 0;
}

}  // namespace
}  // namespace optstate::load

int main(int argc, char** argv) {
  optstate::load::Arguments arguments;
  if (argc != 7 || !optstate::load::Parse(argv, &arguments)) {
    std::cerr << "flood_main SOCKET UID SEED THREADS ROUNDS flood|spin"
              << std::endl;
    return 2;
  }
  return optstate::load::Run(arguments);
}
