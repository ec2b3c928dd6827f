#ifndef OPTSTATE_TESTS_LOAD_PROCESS_COSTS_H_
#define OPTSTATE_TESTS_LOAD_PROCESS_COSTS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace optstate::load {

// Resources that one or more processes have, as /proc shows it; none of a
// process that is gone.
struct ProcessCosts {
  size_t processes = 0;
  size_t fds = 0;
  size_t threads = 0;
  uint64_t resident_bytes = 0;  // RSS: what they share counts in each
  uint64_t private_bytes = 0;   // RssAnon: what no other process has
  // PSS: a page that n processes have mapped counts an n-th in each. 0: it was
  // not asked for.
  uint64_t proportional_bytes = 0;

  void Add(const ProcessCosts& other);
  std::string ToString() const;
};

// with_pss: the kernel walks all pages for it, which takes seconds for hundreds
// of processes.
ProcessCosts CostsOf(pid_t pid, bool with_pss = true);
ProcessCosts CostsOf(const std::vector<pid_t>& pids, bool with_pss = true);

// Returns the children of a process: those of a daemon are its engines.
std::vector<pid_t> ChildrenOf(pid_t pid);

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_PROCESS_COSTS_H_
